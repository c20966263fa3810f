# SPDX-License-Identifier: Apache-2.0
# Installs the tree that this port lies in. In a registry, vcpkg_from_git or vcpkg_from_github with the
# tag of the release gives SOURCE_PATH instead.
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../../.." ABSOLUTE)

set(VCPKG_BUILD_TYPE release) # header-only: a debug build would install the same

vcpkg_configure_meson(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    -Dtests=disabled
    -Dexamples=disabled
    -Dbench=disabled
)
vcpkg_install_meson()

vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/ulysses)
file(MAKE_DIRECTORY "${CURRENT_PACKAGES_DIR}/lib")
file(RENAME "${CURRENT_PACKAGES_DIR}/share/pkgconfig" "${CURRENT_PACKAGES_DIR}/lib/pkgconfig")
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/licenses")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
file(INSTALL "${CURRENT_PORT_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
