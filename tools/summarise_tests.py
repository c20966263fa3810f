#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: summarise_tests.py [--skipped REASON]... TITLE=testlog.json...

Adds up what Meson's logs say: the test cases of doctest programs, the counts that a runner prints, one for
any other test. Shows the output of what failed and the reason of what was skipped. The last line is
"N passed, N failed, N skipped"; the exit status is 0 only if something passed or failed and nothing failed.
"""

import json
import re
import sys
from dataclasses import dataclass, field

DOCTEST = re.compile(
    r"^\[doctest\] test cases:\s*\d+\s*\|\s*(\d+) passed\s*\|\s*(\d+) failed\s*\|\s*(\d+) skipped", re.M)
COUNTS = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.M)
SKIP = re.compile(r"^\s*skip(?:ped)?:?\s+(.*)$", re.M | re.I)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    notes: list = field(default_factory=list)

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.notes += other.notes


def judge(title, record):
    """What one test of a log amounts to."""
    output = COLOUR.sub("", record.get("stdout") or "") + COLOUR.sub("", record.get("stderr") or "")
    result = record["result"]
    is_doctest = any(word.endswith("_tests") for word in record.get("command", []))
    counts = (DOCTEST if is_doctest else COUNTS).findall(output)
    one = tally(*map(int, counts[-1])) if counts else tally()
    why = f"{one.failed} of {one.passed + one.failed} failed"
    if result == "TIMEOUT":
        why = "ran out of time"
        one.failed = max(one.failed, 1)

    good = result in ("OK", "EXPECTEDFAIL", "SKIP")
    if not good and one.failed == 0:
        one.failed, why = 1, f"{result.lower()}, exit status {record.get('returncode')}"
    elif good and is_doctest and not counts:
        one.failed, why = 1, "ended without doctest's summary"
    elif good and counts and one.passed + one.failed + one.skipped == 0:
        one.failed, why = 1, "ran no test"
    elif result == "SKIP" and not counts:
        one.skipped = 1
    elif not counts and good:
        one.passed = 1

    name = f"{title}: {record['name'].split(' / ')[-1]}"
    if one.failed:
        one.notes.append(f"FAILED {name} ({why})\n" + "\n".join("    " + l for l in output.splitlines()[-200:]))
    if one.skipped:
        reasons = SKIP.findall(output) or [f"{one.skipped} marked to be skipped in the source"]
        one.notes += [f"SKIPPED {name}: {reason}" for reason in reasons]
    return one


def summarise(logs, skipped=()):
    """The tally of several logs, given as (title, lines or None)."""
    total = tally(skipped=len(skipped), notes=[f"SKIPPED {reason}" for reason in skipped])
    for title, lines in logs:
        records = [json.loads(line) for line in lines or [] if line.strip()]
        for record in records:
            total.add(judge(title, record))
        if not records:
            total.add(tally(failed=1, notes=[f"FAILED {title}: no test ran (nothing to run, or it did not compile)"]))
    if total.passed + total.failed == 0:
        total.notes.append("FAILED: there was no test to run")
    return total


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as log:
            return log.readlines()
    except OSError:
        return None


def main(arguments):
    skipped, logs = [], []
    while arguments:
        argument = arguments.pop(0)
        if argument == "--skipped" and arguments:
            skipped.append(arguments.pop(0))
        elif "=" in argument and not argument.startswith("-"):
            title, path = argument.split("=", 1)
            logs.append((title, read(path)))
        else:
            print(__doc__, file=sys.stderr)
            return 2
    total = summarise(logs, skipped)
    for note in sorted(total.notes, key=lambda note: note.startswith("FAILED")):
        print(note)
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped", flush=True)
    return 1 if total.failed or total.passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
