#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: headers.py INCLUDE_DIRECTORY [KIT_INCLUDE_DIRECTORY]...

Each header compiles alone and without a warning, and knows the name of the inline namespace where it opens
the library's. Four translation units that include all of them link to one program, tests/odr: two in
opposite orders, one under another ULYSSES_ABI, one without exceptions. An adapter whose kit is not
installed is skipped.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

import tally

KITS = {"cblas.h", "mpi.h", "cuda.h", "cuda_runtime_api.h", "cuda_runtime.h", "cublas_v2.h", "nvtx3/nvToolsExt.h", "cudnn.h",
        "cudnn_frontend.h", "nccl.h", "nccl_device.h", "dlpack/dlpack.h"}
ABSENT = re.compile(r"fatal error: '?([^':\n]+)'?(?:: No such file| file not found)")
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow",
            "-Wold-style-cast", "-Werror"]
ONLY = {"g++": ["-Wuseless-cast"]}  # warnings that one compiler alone has
UMBRELLA = "ulysses/ulysses.hpp"
# Of one file of a program: each takes a compiler half a minute, so that they are compiled together.
ONE_FILE = [f"ulysses/adapters/cudnn/{name}.hpp" for name in ("device", "sdpa_plan", "engine")]
ODR = pathlib.Path(__file__).resolve().parent / "odr"

# A header that opens the namespace before config/macros.hpp was included opens one that is called
# ULYSSES_ABI, and then no struct can have that name.
PROBE = "#undef ULYSSES_ABI\nnamespace ulysses {\nstruct ULYSSES_ABI;\n}\n"
NAMELESS = re.compile(r"ULYSSES_ABI.*different kind")


def alone(compiler, flags, text):
    """(whether it compiles alone, what the compiler said)"""
    compiled, message = tally.compile([compiler, *WARNINGS, *ONLY.get(compiler, []), *flags, "-fsyntax-only", "-x", "c++", "-"], text + PROBE)
    if NAMELESS.search(message):
        message = "opens the namespace of the library before it includes ulysses/config/macros.hpp\n" + message
    return compiled, message


def link(compilers, flags, headers):
    """Why the units do not link to a program that works, or None. The compilers share the units."""
    first, last = compilers[0], compilers[-1]
    ordered = sorted(headers, key=lambda header: (header != UMBRELLA, header))
    units = [("one", first, ordered, []), ("two", last, ordered[::-1], []),
             ("other", first, ordered, ["-DULYSSES_ABI=v0_other"]),
             ("no_exceptions", last, ordered, ["-fno-exceptions", "-fno-rtti"])]
    with tempfile.TemporaryDirectory() as folder:
        runs = [([first, "-c", ODR / "main.cpp", "-o", f"{folder}/main.o"],)]
        for name, compiler, order, extra in units:
            everything = pathlib.Path(folder, f"{name}.hpp")
            everything.write_text("".join(f"#include <{header}>\n" for header in order))
            runs.append(([compiler, *WARNINGS, *ONLY.get(compiler, []), *flags, *extra, f"-DUNIT={name}", "-include", everything, "-c",
                          ODR / "unit.cpp", "-o", f"{folder}/{name}.o"],))
        for (command,), (compiled, message) in zip(runs, tally.in_parallel(tally.compile, runs)):
            if not compiled:
                return f"{command[-1]} does not compile with {command[0]}\n{message}"
        objects = [command[-1] for command, in runs]
        linked, message = tally.compile([first, *objects, "-pthread", "-o", f"{folder}/program"])
        if not linked:
            return "they do not link\n" + message
        done = subprocess.run([f"{folder}/program"], capture_output=True, text=True, timeout=60)
        return None if done.returncode == 7 else f"the program ends with {done.returncode}\n{done.stdout}{done.stderr}"


def main(include, *kit_includes):
    flags = [f"-I{include}"] + [f"-isystem{kit}" for kit in kit_includes if kit]
    root = pathlib.Path(include)
    headers = sorted(str(path.relative_to(root)) for path in root.rglob("*.hpp"))
    count = tally.tally()
    compilers = tally.compilers(count)
    if not compilers:
        return count.close()

    # One compiler: what a header forgets to include is missing for both, and both warn below.
    together = [header for header in ONE_FILE if header in headers]
    groups = [[header] for header in headers if header not in together] + ([together] if together else [])
    runs = [(compilers[0], flags, "".join(f"#include <{header}>\n" for header in group)) for group in groups]
    runs.append((compilers[0], flags, "namespace ulysses::inline ULYSSES_ABI {}\n"))
    *results, (compiled, message) = tally.in_parallel(alone, runs)
    name = "a header without config/macros.hpp is found"
    count.fail(name, message) if compiled or not NAMELESS.search(message) else count.ok(name)
    linked = []
    for group, (compiled, message) in zip(groups, results):
        header = ", ".join(group)
        absent = ABSENT.search(message)
        if compiled:
            count.ok(header)
            if group != together:
                linked += group
        elif header.startswith("ulysses/adapters/") and absent and absent[1] in KITS:
            count.skip(header, f"{absent[1]} is not installed")
        else:
            count.fail(header, "does not compile alone\n" + message)

    name = f"four translation units ({', '.join(compilers)})"
    wrong = link(compilers, flags, linked)
    count.fail(name, wrong) if wrong else count.ok(name)
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
