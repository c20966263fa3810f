#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: compile_fail.py INCLUDE_DIRECTORY FOLDER_OR_CASE...

A case is a .cpp file that must not compile. Its first lines `// expect: TEXT` are what the compiler's
message must contain, each of them; with ULYSSES_CONTROL defined it must compile.
"""

import pathlib
import sys

import tally

# A source line that is shown beside the message must not count as the message.
NO_ECHO = {"g++": "-fno-diagnostics-show-caret", "clang++": "-fno-caret-diagnostics"}


def expectations(case):
    prefix, found = "// expect: ", []
    for line in case.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        if line.startswith(prefix):
            found.append(line[len(prefix):].strip())
    return found


def run(compiler, include, case):
    """Why the case fails, or None."""
    expected = expectations(case)
    if not expected:
        return "its first lines have no `// expect: TEXT`"
    command = [compiler, "-std=c++20", "-fsyntax-only", NO_ECHO[compiler], f"-I{include}", str(case)]
    compiled, message = tally.compile(command)
    if compiled:
        return "it compiles"
    absent = [text for text in expected if text not in message]
    if absent:
        return "the message lacks " + ", ".join(f"`{text}`" for text in absent) + ". It is:\n" + message
    compiled, message = tally.compile(command + ["-DULYSSES_CONTROL"])
    return None if compiled else "its control does not compile:\n" + message


def main(include, *paths):
    cases = []
    for path in map(pathlib.Path, paths):
        cases += [path] if path.is_file() else sorted(path.glob("*.cpp"))
    count = tally.tally()
    runs = [(compiler, include, case) for compiler in tally.compilers(count) for case in cases]
    for (compiler, _, case), reason in zip(runs, tally.in_parallel(run, runs)):
        name = f"{case.stem} ({compiler})"
        count.fail(name, reason) if reason else count.ok(name)
    if not runs:
        count.fail("compile_fail", "no case to compile, or no compiler")
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
