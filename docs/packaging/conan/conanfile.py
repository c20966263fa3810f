# SPDX-License-Identifier: Apache-2.0
import os

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy
from conan.tools.layout import basic_layout

required_conan_version = ">=2.0"


class ulysses(ConanFile):
    name = "ulysses"
    version = "0.1.0"
    description = ("Attention over a sequence sharded over several processors, by Ulysses sequence parallelism; "
                   "header-only C++20")
    license = "Apache-2.0"
    topics = ("attention", "sequence-parallelism", "transformer", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    def export_sources(self):
        # The repository that this recipe lies in.
        repository = os.path.join(self.recipe_folder, "..", "..", "..")
        for pattern in ("include/*", "LICENSE"):
            copy(self, pattern, repository, self.export_sources_folder)

    def layout(self):
        basic_layout(self)

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()

    def package(self):
        copy(self, "*.hpp", os.path.join(self.source_folder, "include"), os.path.join(self.package_folder, "include"))
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.set_property("cmake_file_name", "ulysses")
        self.cpp_info.set_property("cmake_target_name", "ulysses::ulysses")
        self.cpp_info.set_property("pkg_config_name", "ulysses")
        if self.settings.os in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
