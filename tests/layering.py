#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: layering.py INCLUDE_DIRECTORY

Reads the #include lines of the library: a file may include its own folder, layers further down, and the
standard library. Only adapters may include anything else, and nothing includes an adapter.
"""

import pathlib
import re
import sys

import tally

LAYERS = [  # from the top; those of one line are siblings that never include each other
    ["adapters"],
    ["train"],
    ["pipeline.hpp"],
    ["pipeline"],
    ["stage"],
    ["exchange"],
    ["comm", "attention", "gemm", "observer", "projection", "space"],
    ["plan"],
    ["core"],
    ["config"],
]
UMBRELLA = "ulysses.hpp"
HEIGHT = {name: -line for line, names in enumerate(LAYERS) for name in names}

STANDARD = set("""
algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes
climits clocale cmath compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef
cstdint cstdio cstdlib cstring ctime cuchar cwchar cwctype deque exception execution filesystem format
forward_list fstream functional future initializer_list iomanip ios iosfwd iostream istream iterator latch
limits list locale map memory memory_resource mutex new numbers numeric optional ostream queue random ranges
ratio regex scoped_allocator semaphore set shared_mutex source_location span sstream stack stdexcept
stop_token streambuf string string_view strstream syncstream system_error thread tuple type_traits typeindex
typeinfo unordered_map unordered_set utility valarray variant vector version
""".split())
# Headers of the compiler and the operating system, only for the layer that knows the machine.
MACHINE = {"space": {"immintrin.h", "unistd.h"}}

INCLUDE = re.compile(r"^\s*#\s*(?:include|include_next|import)\b\s*(.*)$", re.M)
NAME = re.compile(r'^(?:<([^>]+)>|"([^"]+)")')


def layer(path):
    """The layer of a path below ulysses/: its folder, or its own name at the top."""
    return path.split("/")[0]


def complaint(path, target, exists):
    """What is wrong with `path` (below ulysses/) including `target` (as spelled), or None."""
    name = NAME.match(target)
    if not name:
        return "is computed by a macro"
    written = name[1] or name[2]
    own = layer(path)
    if written.startswith("ulysses/"):
        inner = written[len("ulysses/"):]
        other = layer(inner)
        if not exists(inner):
            return "does not exist"
        if own == UMBRELLA:
            return "is an adapter, which nothing includes" if other == "adapters" else None
        if other not in HEIGHT:
            return "belongs to no layer"
        if own == other or HEIGHT[other] < HEIGHT[own]:
            if own == "core" and other not in ("core", "config"):
                return "is neither core nor config"
            return None
        same = HEIGHT[other] == HEIGHT[own]
        return f"is of {other}, a sibling of {own}" if same else f"is of {other}, above {own}"
    if own == "adapters":
        return None
    if name[2]:
        return 'is not written as "ulysses/..."'
    if written in STANDARD or written in MACHINE.get(own, ()):
        return None
    return "is not of the standard library"


def complaints(path, text, exists):
    """All of them, each a line."""
    if layer(path) not in HEIGHT and path != UMBRELLA:
        return ["belongs to no layer; the layers are in tests/layering.py"]
    found = []
    for match in INCLUDE.finditer(text):
        wrong = complaint(path, match[1], exists)
        if wrong:
            line = text.count("\n", 0, match.start(1)) + 1
            found.append(f"line {line}: {match[1].strip()} {wrong}")
    return found


def main(include):
    root = pathlib.Path(include, "ulysses")
    count = tally.tally()
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        path = file.relative_to(root).as_posix()
        wrong = complaints(path, file.read_text(encoding="utf-8"), lambda inner: (root / inner).is_file())
        count.fail(path, "\n        ".join(wrong)) if wrong else count.ok(path)
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
