# SPDX-License-Identifier: Apache-2.0
# usage: cmake -DTEMPLATE=ulyssesConfigVersion.cmake.in -DFOLDER=DIRECTORY -P versions.cmake
# Which versions satisfy which, also for versions that do not exist yet.

function(expect wanted_result VERSION PACKAGE_FIND_VERSION)
  configure_file("${TEMPLATE}" "${FOLDER}/version.cmake" @ONLY)
  include("${FOLDER}/version.cmake")
  if(NOT PACKAGE_VERSION_COMPATIBLE STREQUAL wanted_result)
    message(SEND_ERROR "${VERSION} for ${PACKAGE_FIND_VERSION}: ${PACKAGE_VERSION_COMPATIBLE}")
  endif()
endfunction()

function(expect_in_range wanted_result VERSION PACKAGE_FIND_VERSION_MIN PACKAGE_FIND_VERSION_MAX end)
  set(PACKAGE_FIND_VERSION_RANGE "${PACKAGE_FIND_VERSION_MIN}...${PACKAGE_FIND_VERSION_MAX}")
  set(PACKAGE_FIND_VERSION_RANGE_MAX ${end})
  expect(${wanted_result} ${VERSION} ${PACKAGE_FIND_VERSION_MIN})
endfunction()

foreach(wanted IN ITEMS 0.1 0.1.0 0.1.4)
  expect(TRUE 0.1.4 ${wanted})
endforeach()
foreach(wanted IN ITEMS 0 0.0 0.0.9 0.1.5 0.2 0.10 0.11 1 1.0 1.1.4)
  expect(FALSE 0.1.4 ${wanted})
endforeach()
foreach(wanted IN ITEMS 2 2.0 2.1 2.3 2.3.1)
  expect(TRUE 2.3.1 ${wanted})
endforeach()
foreach(wanted IN ITEMS 0.1 1.0 1.9 2.3.2 2.4 3 3.0 20 22.3)
  expect(FALSE 2.3.1 ${wanted})
endforeach()
expect(FALSE 12.0.0 1)
expect(FALSE 0.12.0 0.1)

expect_in_range(TRUE 0.2.0 0.1 0.3 INCLUDE)
expect_in_range(TRUE 0.3.0 0.1 0.3 INCLUDE)
expect_in_range(FALSE 0.3.0 0.1 0.3 EXCLUDE)
expect_in_range(FALSE 0.3.1 0.1 0.3 INCLUDE)
expect_in_range(FALSE 0.2.0 0.2.1 0.3 INCLUDE)
