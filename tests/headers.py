#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: headers.py INCLUDE_DIRECTORY [SDK_INCLUDE_DIRECTORY]

Each header compiles alone and without a warning; two translation units that include all of them, in
opposite orders, link to one program. An adapter whose kit is not installed is skipped.
"""

import pathlib
import re
import sys
import tempfile

import tally

KITS = {"cblas.h", "mpi.h", "cuda.h", "cuda_runtime_api.h", "cuda_runtime.h", "cublas_v2.h", "cudnn.h",
        "cudnn_frontend.h", "nccl.h", "nccl_device.h", "dlpack/dlpack.h"}
ABSENT = re.compile(r"fatal error: '?([^':\n]+)'?(?:: No such file| file not found)")
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def alone(compiler, flags, header):
    return tally.compile([compiler, *WARNINGS, *flags, "-fsyntax-only", "-x", "c++", "-"],
                         f"#include <{header}>\n")


def link(compiler, flags, headers):
    """Includes all of them twice, the umbrella first and last, and links the two."""
    ordered = sorted(headers, key=lambda header: (header != "ulysses/ulysses.hpp", header))
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for name, order in (("one", ordered), ("two", ordered[::-1])):
            text = "".join(f"#include <{header}>\n" for header in order)
            text += f"int {name}() {{ return 0; }}\n"
            sources.append(pathlib.Path(folder, f"{name}.cpp"))
            sources[-1].write_text(text)
        main = pathlib.Path(folder, "main.cpp")
        main.write_text("int one();\nint two();\nint main() { return one() + two(); }\n")
        return tally.compile([compiler, *WARNINGS, *flags, *map(str, sources), str(main), "-pthread",
                              "-o", f"{folder}/program"])


def main(include, kit_include=""):
    flags = [f"-I{include}"] + ([f"-isystem{kit_include}"] if kit_include else [])
    root = pathlib.Path(include)
    headers = sorted(str(path.relative_to(root)) for path in root.rglob("*.hpp"))
    count = tally.tally()
    for compiler in tally.compilers(count):
        linked = []
        runs = [(compiler, flags, header) for header in headers]
        for header, (compiled, message) in zip(headers, tally.in_parallel(alone, runs)):
            name, absent = f"{header} ({compiler})", ABSENT.search(message)
            if compiled:
                count.ok(name)
                linked.append(header)
            elif header.startswith("ulysses/adapters/") and absent and absent[1] in KITS:
                count.skip(name, f"{absent[1]} is not installed")
            else:
                count.fail(name, "does not compile alone\n" + message)
        compiled, message = link(compiler, flags, linked)
        name = f"two translation units ({compiler})"
        count.ok(name) if compiled else count.fail(name, "do not link\n" + message)
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
