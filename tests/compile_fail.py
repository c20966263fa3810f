#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: compile_fail.py INCLUDE_DIRECTORY FOLDER_OR_CASE...

A case is a .cpp file that must not compile. Its first lines `// expect: TEXT` are what the compiler's
message must contain, each of them, and `// never: TEXT` what it must not; it must name each line that ends in
`// refused`. With ULYSSES_CONTROL defined the case must compile, by the last of the compilers: what only one
of them takes, other tests find. What all cases include is compiled once, as reading it again takes most of a
case's time.
"""

import pathlib
import sys
import tempfile

import tally

# A source line that is shown beside the message must not count as the message; and all is to be said.
MESSAGES = {"g++": ["-fno-diagnostics-show-caret"], "clang++": ["-fno-caret-diagnostics", "-ferror-limit=0"]}


def expectations(case):
    """What the message must contain, and what it must not."""
    found, never = [], []
    text = case.read_text(encoding="utf-8").splitlines()
    for line in text:
        if not line.startswith("//"):
            break
        for prefix, texts in (("// expect: ", found), ("// never: ", never)):
            if line.startswith(prefix):
                texts.append(line[len(prefix):].strip())
    refused = [f"{case.name}:{i}:" for i, line in enumerate(text, 1) if line.endswith("// refused")]
    return found + refused if found else [], never


def command_of(compiler, include):
    return [compiler, "-std=c++20", *MESSAGES[compiler], f"-I{include}"]


def precompile(compiler, include, folder):
    """Compiles the headers of all cases into a folder: the options that use it, and what went wrong or None."""
    header = pathlib.Path(folder, f"{compiler}.hpp")
    archetypes = pathlib.Path(__file__).resolve().parent / "archetypes.hpp"
    header.write_text(f'#include <ulysses/ulysses.hpp>\n#include "{archetypes}"\n')
    output = f"{header}.gch" if compiler == "g++" else f"{header}.pch"
    compiled, message = tally.compile([*command_of(compiler, include), "-x", "c++-header", str(header), "-o", output])
    # g++ would quietly read the text when it cannot use what it has compiled.
    use = ["-include", str(header), "-Winvalid-pch"] if compiler == "g++" else ["-include-pch", output]
    return use, None if compiled else message


def run(compiler, include, use, case, has_control):
    """Why the case fails, or None."""
    expected, never = expectations(case)
    if not expected:
        return "its first lines have no `// expect: TEXT`"
    command = [*command_of(compiler, include), *use, "-fsyntax-only", str(case)]
    compiled, message = tally.compile(command)
    if compiled:
        return "it compiles"
    absent = [text for text in expected if text not in message]
    if absent:
        return "the message lacks " + ", ".join(f"`{text}`" for text in absent) + ". It is:\n" + message
    present = [text for text in never if text in message]
    if present:
        return "the message has " + ", ".join(f"`{text}`" for text in present) + ". It is:\n" + message
    if not has_control:
        return None
    compiled, message = tally.compile(command + ["-DULYSSES_CONTROL"])
    return None if compiled else "its control does not compile:\n" + message


def main(include, *paths):
    cases = []
    for path in map(pathlib.Path, paths):
        cases += [path] if path.is_file() else sorted(path.glob("*.cpp"))
    count = tally.tally()
    with tempfile.TemporaryDirectory() as folder:
        compilers = tally.compilers(count)
        made = tally.in_parallel(precompile, [(compiler, include, folder) for compiler in compilers])
        runs = []
        for compiler, (use, wrong) in zip(compilers, made):
            if wrong:
                count.fail(f"headers ({compiler})", "do not compile\n" + wrong)
            else:
                runs += [(compiler, include, use, case, compiler == compilers[-1]) for case in cases]
        for (compiler, _, _, case, _), reason in zip(runs, tally.in_parallel(run, runs)):
            name = f"{case.stem} ({compiler})"
            count.fail(name, reason) if reason else count.ok(name)
    if not runs:
        count.fail("compile_fail", "no case to compile, or no compiler")
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
