#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: nvcc.py ROOT NVCC [-IDIRECTORY]...

Each .cu file of the repository compiles for sm_90 without a warning, nvcc/engine.cu with all that an engine makes
of the library in one. Prints what registers each kernel takes; one that spills them is a failure.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import tally

OPTIONS = ["-std=c++20", "-O2", "-arch=sm_90", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra", "-Xptxas=-v"]
KERNEL = re.compile(r"Compiling entry function '(\w+)' for .*?(\d+) bytes spill stores, (\d+) bytes spill loads"
                    r".*?Used (\d+) registers", re.DOTALL)


def kernels(text):
    """(name, registers, bytes spilled) of each kernel that ptxas tells of"""
    return [(name, int(registers), int(stores) + int(loads)) for name, stores, loads, registers in KERNEL.findall(text)]


def readable(name):
    if not shutil.which("c++filt"):
        return name
    text = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    short = re.sub(r"ulysses::v\d+::(detail::)?|ulysses_bench::|\(anonymous namespace\)::", "", text)
    return short.removeprefix("void ").split("(")[0]


def main(root, nvcc, *includes):
    count = tally.tally()
    root = pathlib.Path(root)
    for source in sorted(path for path in root.rglob("*.cu") if not path.relative_to(root).parts[0].startswith("build")):
        name = str(source.relative_to(root))
        with tempfile.TemporaryDirectory() as folder:
            compiled, text = tally.compile([nvcc, *OPTIONS, f"-I{root / 'include'}", *includes, "-c", str(source), "-o",
                                            f"{folder}/object.o"])
        found = kernels(text)
        if not compiled or not found and "__global__" in source.read_text(encoding="utf-8"):
            count.fail(name, text)
            continue
        count.ok(f"{name} compiles for sm_90")
        for kernel, registers, spilled in found:
            line = f"{readable(kernel)}: {registers} registers"
            count.fail(line, f"{spilled} bytes spilled") if spilled else count.ok(line)
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
