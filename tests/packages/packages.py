#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: packages.py REPOSITORY WAY...

Builds and runs a small program in each of the ways that docs/install.md names, with the compiler CXX:

  headers      -I and nothing else
  pkg-config   the flags of the installed package
  meson        the installed package as a dependency
  subproject   the sources as a Meson subproject
  cmake        the installed package, the sources, and which versions find_package takes
  cmake-export a library that links the sources and is exported itself
  dist         `meson dist`, its archive as a wrap
  vcpkg        the port of docs/packaging, over stand-ins for vcpkg's functions
  recipes      what port and Conan recipe say of themselves

What is installed is moved to another folder before it is used. A way whose tool is not here is skipped,
with exit status 77 when that was all.
"""

import ast
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import tally  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
ONLY_INSTALL = ["-Dtests=disabled", "-Dexamples=disabled", "-Dbench=disabled"]
HEADERS = {".hpp", ".cuh"}
PLAIN = ["--buildtype=plain", "-Dcpp_args=-O0"]


class failed(Exception):
    pass


class skipped(Exception):
    pass


def version_of(root):
    text = (root / "include/ulysses/config/version.hpp").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^#define ULYSSES_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", text, re.M))


def copy_sources(root, to):
    """The tree as it is now, committed or not, without builds."""
    shutil.copytree(root, to, ignore=lambda folder, names: [
        name for name in names if name in (".git", "shared", "__pycache__") or
        (pathlib.Path(folder) == root and re.match(r"build(-|$|.*\.log$)", name))])


class bench:
    """A temporary folder, and commands that are run in it."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.version = version_of(root)
        self.compiler = shlex.split(os.environ.get("CXX", "c++"))
        unwanted = ("PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH", "DESTDIR", "CXXFLAGS", "LDFLAGS", "CMAKE_GENERATOR")
        self.environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.environment |= {"LC_ALL": "C", "CXX": shlex.join(self.compiler)}

    def run(self, *command, may_fail=False, **environment):
        done = subprocess.run([str(word) for word in command], cwd=self.folder, text=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
                              env=self.environment | environment)
        if done.returncode != 0 and not may_fail:
            raise failed(f"`{shlex.join(map(str, command))}` ends with {done.returncode}:\n{done.stdout}")
        return done if may_fail else done.stdout

    def expect_program(self, program):
        """It runs, gets its numbers right, and was compiled with headers of this version."""
        output, wanted = self.run(program), f"ulysses {self.version} attends"
        if wanted not in output.splitlines():
            raise failed(f"{program.name} says `{output.strip()}`, expected `{wanted}`")

    def compile(self, *flags):
        program = self.folder / "program"
        self.run(*self.compiler, "-std=c++20", "-O0", HERE / "consumer/main.cpp", "-o", program, *flags)
        self.expect_program(program)

    def installed(self):
        """A prefix that was moved after the installation."""
        first, moved = self.folder / "first prefix", self.folder / "moved"
        self.run("meson", "setup", "build-install", self.root, f"--prefix={first}", *ONLY_INSTALL)
        self.run("meson", "install", "-C", "build-install")
        first.rename(moved)
        for file in moved.rglob("*"):
            if file.is_file() and file.suffix not in HEADERS and str(first) in file.read_text(encoding="utf-8"):
                raise failed(f"{file.relative_to(moved)} names the prefix it was installed to")
        return moved

    def meson_consumer(self, *options, wrap=None, sources=None, **environment):
        consumer, build = self.folder / "consumer", self.folder / "build-consumer"
        shutil.copytree(HERE / "consumer", consumer)
        if wrap is not None:
            (consumer / "subprojects").mkdir()
            (consumer / "subprojects/ulysses.wrap").write_text(wrap)
        if sources is not None:
            copy_sources(sources, consumer / "subprojects/ulysses")
        self.run("meson", "setup", build, consumer, *PLAIN, *options, **environment)
        return build


def headers(at):
    at.compile("-I", at.root / "include", "-pthread")


def pkg_config(at):
    if not shutil.which("pkg-config"):
        raise skipped("there is no pkg-config")
    prefix = at.installed()
    where = {"PKG_CONFIG_PATH": str(prefix / "share/pkgconfig")}
    said = at.run("pkg-config", "--modversion", "ulysses", **where).strip()
    if said != at.version:
        raise failed(f"pkg-config says version {said}, the headers {at.version}")
    at.compile(*shlex.split(at.run("pkg-config", "--cflags", "--libs", "ulysses", **where)))


def meson(at):
    if not shutil.which("pkg-config"):
        raise skipped("there is no pkg-config, by which Meson finds what is installed")
    prefix = at.installed()
    build = at.meson_consumer("--wrap-mode=nofallback", PKG_CONFIG_PATH=str(prefix / "share/pkgconfig"))
    at.run("ninja", "-C", build)
    at.expect_program(build / "consumer")


def subproject(at):
    build = at.meson_consumer("--wrap-mode=forcefallback", sources=at.root)
    at.run("ninja", "-C", build)
    at.expect_program(build / "consumer")


def versions_to_ask_for(version):
    """(accepted, refused) by what find_package may be given before its other words."""
    major, minor, patch = map(int, version.split("."))
    accepted = ["", version, f"{major}.{minor}", f"{version};EXACT"]
    refused = [f"{major}.{minor}.{patch + 1}", f"{major}.{minor + 1}", f"{major + 1}.0",
               f"{major}.{minor}.{patch + 1};EXACT"]
    (accepted if major else refused).append(f"{major}.{minor - 1}" if minor else f"{major}.{minor + 2}")
    return accepted, refused


def cmake(at):
    if not shutil.which("cmake"):
        raise skipped("there is no cmake")
    at.run("cmake", f"-DTEMPLATE={at.root}/tools/cmake/ulyssesConfigVersion.cmake.in", f"-DFOLDER={at.folder}",
           "-P", HERE / "versions.cmake")

    prefix = at.installed()
    configure = ["cmake", "-S", HERE / "consumer", "-G", "Ninja", "-DCMAKE_CXX_FLAGS=-O0"]
    package = [*configure, "-B", "build-package", f"-DCMAKE_PREFIX_PATH={prefix}"]
    accepted, refused = versions_to_ask_for(at.version)
    for version in accepted:
        at.run(*package, "-Uulysses_DIR", f"-DWANTED={version}")
    cache = (at.folder / "build-package/CMakeCache.txt").read_text(encoding="utf-8")
    if f"ulysses_DIR:PATH={prefix}/share/cmake/ulysses\n" not in cache:
        raise failed(f"another package than that of {prefix} was found")
    for version in refused:
        answer = at.run(*package, "-Uulysses_DIR", f"-DWANTED={version}", may_fail=True)
        if answer.returncode == 0:
            raise failed(f"find_package takes {at.version} for {version}")
        if f"ulyssesConfig.cmake, version: {at.version}" not in answer.stdout:
            raise failed(f"find_package refuses {version}, but not for its version:\n{answer.stdout}")
    at.run(*package, "-Uulysses_DIR", f"-DWANTED={at.version}")
    at.run("cmake", "--build", "build-package")
    at.expect_program(at.folder / "build-package/consumer")

    at.run(*configure, "-B", "build-sources", f"-DSOURCES={at.root}")
    at.run("cmake", "--build", "build-sources")
    at.expect_program(at.folder / "build-sources/consumer")

    # Both build systems install the same files, but for the one that only pkg-config needs.
    second = at.folder / "second"
    at.run("cmake", "-S", at.root, "-B", "build-cmake", "-G", "Ninja", f"-DCMAKE_INSTALL_PREFIX={second}")
    at.run("cmake", "--install", "build-cmake")
    (second / "share/pkgconfig").mkdir()
    shutil.copy(prefix / "share/pkgconfig/ulysses.pc", second / "share/pkgconfig")
    difference = at.run("diff", "-r", prefix, second, may_fail=True)
    if difference.returncode != 0:
        raise failed(f"CMake installs other files than Meson:\n{difference.stdout}")


def cmake_export(at):
    if not shutil.which("cmake"):
        raise skipped("there is no cmake")
    configure = ["cmake", "-S", HERE / "exporter", "-G", "Ninja", "-DCMAKE_CXX_FLAGS=-O0"]
    ways = {"ON": ("ulysses::ulysses", "with"), "OFF": ("$<BUILD_INTERFACE:ulysses::ulysses>", "without")}
    for install, (link, headers) in ways.items():
        build, prefix = at.folder / f"build-{install}", at.folder / f"prefix-{install}"
        at.run(*configure, "-B", build, f"-DSOURCES={at.root}", f"-DULYSSES_INSTALL={install}", f"-DLINK={link}",
               f"-DCMAKE_INSTALL_PREFIX={prefix}")
        at.run("cmake", "--build", build)
        at.run("cmake", "--install", build)
        moved = prefix.rename(at.folder / f"moved-{install}")
        for file in moved.rglob("*.cmake"):
            if str(at.root) in file.read_text(encoding="utf-8"):
                raise failed(f"{file.relative_to(moved)} names the sources")
        at.run(*configure, "-B", f"{build}-use", "-DINSTALLED=ON", f"-DCMAKE_PREFIX_PATH={moved}")
        at.run("cmake", "--build", f"{build}-use")
        said, wanted = at.run(f"{build}-use/program").strip(), f"{at.version.split('.')[1]} {headers} headers"
        if said != wanted:
            raise failed(f"ULYSSES_INSTALL={install}: the program says `{said}`, expected `{wanted}`")


def documented_wrap(root, address, digest):
    """The wrap of docs/install.md, of another archive."""
    text = (root / "docs/install.md").read_text(encoding="utf-8")
    wrap = re.search(r"^(\[wrap-file\]\n.*?)^```", text, re.M | re.S)
    if not wrap:
        raise failed("docs/install.md has no wrap")
    text = wrap[1]
    for name, value in (("source_url", address), ("source_hash", digest)):
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.M)
        if count != 1:
            raise failed(f"the wrap of docs/install.md has no {name}")
    return text


def dist(at):
    if not shutil.which("git") or not (at.root / ".git").exists():
        raise skipped("this is no git work tree")
    at.run("meson", "setup", "build-dist", at.root, *ONLY_INSTALL)
    at.run("meson", "dist", "-C", "build-dist", "--no-tests", "--allow-dirty", "--formats", "gztar")
    name = f"ulysses-{at.version}"
    archive = at.folder / f"build-dist/meson-dist/{name}.tar.gz"
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())
    for file in ("LICENSE", "meson.build", "include/ulysses/ulysses.hpp"):
        if f"{name}/{file}" not in names:
            raise failed(f"the archive lacks {file}")

    wrap = documented_wrap(at.root, archive.as_uri(), hashlib.sha256(archive.read_bytes()).hexdigest())
    build = at.meson_consumer("--wrap-mode=forcefallback", wrap=wrap)
    if not (at.folder / f"consumer/subprojects/{name}/LICENSE").is_file():
        raise failed("the archive did not become the subproject")
    tests = at.run("meson", "introspect", "--tests", build).strip()
    if tests != "[]":
        raise failed(f"a subproject has tests: {tests}")


def vcpkg(at):
    if not shutil.which("cmake"):
        raise skipped("there is no cmake")
    packages = at.folder / "packages"
    at.run("cmake", f"-DCURRENT_PACKAGES_DIR={packages}", f"-DCURRENT_BUILDTREES_DIR={at.folder}",
           f"-DCURRENT_PORT_DIR={at.root}/docs/packaging/vcpkg/ulysses", "-P", HERE / "vcpkg.cmake")
    installed = {str(file.relative_to(packages)) for file in packages.rglob("*")
                 if file.is_file() and file.suffix not in HEADERS}
    wanted = {"lib/pkgconfig/ulysses.pc", *(f"share/ulysses/{file}" for file in (
        "copyright", "usage", "ulyssesConfig.cmake", "ulyssesConfigVersion.cmake"))}
    if installed != wanted:
        raise failed(f"the port installs {sorted(installed)}, expected {sorted(wanted)}")
    at.compile("-I", packages / "include", "-pthread")


def recipe_class(file):
    """The constants and the methods of the class in a Conan recipe."""
    module = ast.parse(file.read_text(encoding="utf-8"), str(file))
    recipe, = (node for node in module.body if isinstance(node, ast.ClassDef))
    if [base.id for base in recipe.bases] != ["ConanFile"]:
        raise failed(f"{file.name} has no ConanFile")
    constants = {node.targets[0].id: ast.literal_eval(node.value) for node in recipe.body
                 if isinstance(node, ast.Assign)}
    return constants, {node.name for node in recipe.body if isinstance(node, ast.FunctionDef)}


def expect_fields(where, found, wanted):
    for name, value in wanted.items():
        if found.get(name) != value:
            raise failed(f"{where}: {name} is {found.get(name)!r}, expected {value!r}")


def recipes(at):
    folder = at.root / "docs/packaging"
    same = {"name": "ulysses", "version": at.version, "license": "Apache-2.0"}

    port = json.loads((folder / "vcpkg/ulysses/vcpkg.json").read_text(encoding="utf-8"))
    expect_fields("vcpkg.json", port, same)
    tools = {tool["name"] for tool in port["dependencies"] if tool.get("host")}
    if not port.get("description") or tools != {"vcpkg-cmake-config", "vcpkg-tool-meson"}:
        raise failed(f"vcpkg.json lacks its description, or the tools of its portfile: {tools}")
    if "find_package(ulysses CONFIG REQUIRED)" not in (folder / "vcpkg/ulysses/usage").read_text(encoding="utf-8"):
        raise failed("usage does not say how to find the package")

    constants, methods = recipe_class(folder / "conan/conanfile.py")
    expect_fields("conanfile.py", constants, same | {"package_type": "header-library", "no_copy_source": True})
    if not constants.get("description") or "compiler" not in constants.get("settings", ()):
        raise failed("conanfile.py lacks its description or its settings")
    _, test_methods = recipe_class(folder / "conan/test_package/conanfile.py")
    absent = {"export_sources", "layout", "validate", "package_id", "package", "package_info"} - methods
    absent |= {"requirements", "layout", "build", "test"} - test_methods
    if absent:
        raise failed(f"the recipe lacks {sorted(absent)}")
    program = at.folder / "test_package"
    at.run(*at.compiler, "-std=c++20", "-O0", "-I", at.root / "include", folder / "conan/test_package/main.cpp", "-o",
           program, "-pthread")
    at.run(program)

    if f"directory = ulysses-{at.version}\n" not in documented_wrap(at.root, "", ""):
        raise failed(f"the wrap of docs/install.md is not of {at.version}")


WAYS = {"headers": headers, "pkg-config": pkg_config, "meson": meson, "subproject": subproject, "cmake": cmake,
        "cmake-export": cmake_export, "dist": dist, "vcpkg": vcpkg, "recipes": recipes}


def main(repository, *ways):
    count = tally.tally()
    for way in ways:
        with tempfile.TemporaryDirectory(prefix="ulysses-package-") as folder:
            try:
                WAYS[way](bench(pathlib.Path(repository).resolve(), pathlib.Path(folder).resolve()))
                count.ok(way)
            except skipped as why:
                count.skip(way, why)
            except (failed, OSError, subprocess.TimeoutExpired) as why:
                count.fail(way, why)
    return count.close() or (0 if count.passed else 77)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not set(sys.argv[2:]) <= set(WAYS):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
