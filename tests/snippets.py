#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: snippets.py REPOSITORY

A code block in README.md or docs/*.md that follows `<!-- cut from FILE -->` must be code of that file,
apart from indentation: one of the regions between `// [snippet]` and `// [/snippet]`, or, in a file
without such regions, any run of whole lines. A region that begins with `// [snippet NAME]` is cut by
`<!-- cut from FILE NAME -->`.
"""

import difflib
import pathlib
import re
import sys
import textwrap

import tally

BLOCK = re.compile(r"^[ \t]*<!-- cut from (\S+)(?: (\S+))? -->[ \t]*\n\s*?^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$",
                   re.M | re.S)
MARK = re.compile(r"<!-- cut from ")
REGION = re.compile(r"^[ \t]*// \[snippet(?: (\S+))?\][ \t]*\n(.*?)^[ \t]*// \[/snippet\][ \t]*$", re.M | re.S)


def lines(text):
    return textwrap.dedent(text).strip("\n").split("\n")


def occurs(block, source):
    """Whether the lines of block follow each other in source, moved by one indentation."""
    wanted, all_lines = lines(block), source.split("\n")
    last = len(all_lines) - len(wanted)
    return any(lines("\n".join(all_lines[at:at + len(wanted)])) == wanted for at in range(last + 1))


def complaint(block, source, name=""):
    """Why block is not a cut of source, or None."""
    marked = REGION.findall(source)
    regions = [text for own, text in marked if own == name]
    if not regions and (marked or name):
        return f"there is no region `// [snippet{' ' + name if name else ''}]`"
    if not regions:
        return None if occurs(block, source) else "no run of lines there is this block"
    if any(lines(region) == lines(block) for region in regions):
        return None
    nearest = max(regions, key=lambda region: difflib.SequenceMatcher(None, region, block).ratio())
    return "differs from the nearest region there\n" + "\n".join(
        difflib.unified_diff(lines(nearest), lines(block), "source", "document", lineterm=""))


def main(repository):
    root = pathlib.Path(repository)
    count = tally.tally()
    for document in [root / "README.md", *sorted(root.glob("docs/*.md"))]:
        text = document.read_text(encoding="utf-8") if document.is_file() else ""
        blocks = list(BLOCK.finditer(text))
        if len(blocks) != len(MARK.findall(text)):
            count.fail(document.name, "a `cut from` line is not followed by a code block")
        for match in blocks:
            line = text.count(chr(10), 0, match.start()) + 1
            name = " ".join([f"{document.name}:{line} cut from {match[1]}", *filter(None, [match[2]])])
            source = root / match[1]
            wrong = "no such file"
            if source.is_file():
                wrong = complaint(match[3], source.read_text(encoding="utf-8"), match[2] or "")
            count.fail(name, wrong) if wrong else count.ok(name)
    if count.passed + count.failed == 0:
        count.fail("README.md", "there is no code block that was cut from an example")
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
