# SPDX-License-Identifier: Apache-2.0
# Runs the portfile as vcpkg does, with stand-ins for the functions of vcpkg that it calls.

set(PORT ulysses)

function(vcpkg_configure_meson)
  cmake_parse_arguments(PARSE_ARGV 0 given "" "SOURCE_PATH" "OPTIONS")
  execute_process(
    COMMAND meson setup "${CURRENT_BUILDTREES_DIR}/build" "${given_SOURCE_PATH}"
      "--prefix=${CURRENT_PACKAGES_DIR}" --libdir lib ${given_OPTIONS}
    COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_install_meson)
  execute_process(COMMAND meson install -C "${CURRENT_BUILDTREES_DIR}/build" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# The files come one level up; vcpkg knows the line that says where the prefix is, and corrects it.
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 given "" "CONFIG_PATH" "")
  set(to "${CURRENT_PACKAGES_DIR}/share/${PORT}")
  file(RENAME "${CURRENT_PACKAGES_DIR}/${given_CONFIG_PATH}" "${to}")
  file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/cmake")
  file(READ "${to}/ulyssesConfig.cmake" config)
  if(NOT config MATCHES "get_filename_component\\(PACKAGE_PREFIX_DIR \"[^\n]*/\\.\\./\\.\\./\\.\\./\" ABSOLUTE\\)")
    message(FATAL_ERROR "ulyssesConfig.cmake has no line for vcpkg to correct:\n${config}")
  endif()
  string(REPLACE "/../../../\" ABSOLUTE" "/../../\" ABSOLUTE" config "${config}")
  file(WRITE "${to}/ulyssesConfig.cmake" "${config}")
endfunction()

function(vcpkg_fixup_pkgconfig)
  if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/lib/pkgconfig/${PORT}.pc")
    message(FATAL_ERROR "there is no lib/pkgconfig/${PORT}.pc")
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 given "" "" "FILE_LIST")
  configure_file("${given_FILE_LIST}" "${CURRENT_PACKAGES_DIR}/share/${PORT}/copyright" COPYONLY)
endfunction()

include("${CURRENT_PORT_DIR}/portfile.cmake")
