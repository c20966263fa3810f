#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: train_lm_test.py PROGRAM TEXT_FILE

What the training example says of its options, of bad input, and of runs that fail: message and exit status.
"""

import pathlib
import subprocess
import sys
import tempfile

import tally

OPTIONS = ("--ranks --heads --kv-heads --layers --width --tokens --batch --steps --dtype --attention --seed "
           "--learning-rate --sample --tolerance --help").split()


def small(text, *options):
    return [text, "--layers", "1", "--width", "24", "--heads", "6", "--tokens", "64", "--steps", "40", "--sample", "8",
            *options]


def cases(text, folder):
    """(name, arguments, exit status, parts of the message)"""
    empty, short = folder / "empty.txt", folder / "short.txt"
    empty.write_bytes(b"")
    short.write_bytes(b"too short\n")
    return [
        ("no text", [], 2, ["TEXT_FILE"]),
        ("unknown option", [text, "--head", "6"], 2, ["--head"]),
        ("missing value", [text, "--steps"], 2, ["--steps"]),
        ("no such file", [folder / "none.txt"], 2, ["cannot read", "none.txt", "No such file"]),
        ("a folder", [folder], 2, ["cannot read", str(folder), "directory"]),
        ("empty file", [empty], 2, ["empty.txt", "is empty"]),
        ("short file", [short, "--tokens", "64"], 2, ["short.txt", "too short", "10 bytes", "64 tokens", "1300"]),
        ("kv heads", [text, "--heads", "6", "--kv-heads", "4"], 2, ["--kv-heads must divide", "heads 6", "kv-heads 4"]),
        ("width", [text, "--width", "100", "--heads", "6"], 2, ["--width", "width 100", "heads 6"]),
        ("odd head dim", [text, "--width", "18", "--heads", "6"], 2, ["even multiple", "width 18", "heads 6"]),
        ("no ranks", [text, "--ranks", "4,0"], 2, ["--ranks", "0"]),
        ("ranks not a number", [text, "--ranks", "four"], 2, ["--ranks", "four"]),
        ("no steps", [text, "--steps", "0"], 2, ["--steps", "0"]),
        ("negative tokens", [text, "--tokens", "-5"], 2, ["--tokens", "-5"]),
        ("element type", [text, "--dtype", "half"], 2, ["--dtype", "half", "float", "double"]),
        ("attention", [text, "--attention", "flash"], 2, ["--attention", "flash", "reference"]),
        ("learns nothing", small(text, "--learning-rate", "0"), 1, ["P = 1 did not learn", "bits a byte"]),
        ("losses apart", small(text, "--ranks", "1,3", "--tolerance", "0"), 1, ["losses differ", "tolerance"]),
    ]


def main(program, text):
    count = tally.tally()

    def run(arguments):
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, errors="replace",
                              timeout=120)

    def check(name, condition, done):
        said = done.stdout + done.stderr
        count.ok(name) if condition else count.fail(name, f"exit status {done.returncode}, it said:\n{said}")

    with tempfile.TemporaryDirectory() as folder:
        for name, arguments, status, parts in cases(text, pathlib.Path(folder)):
            done = run(arguments)
            quiet = status != 2 or done.stdout == ""  # nothing was run
            check(name, done.returncode == status and quiet and done.stderr.startswith("train_lm: ")
                  and all(part in done.stderr for part in parts), done)
    done = run(["--help"])
    check("help", done.returncode == 0 and all(option in done.stdout for option in ["TEXT_FILE", *OPTIONS]), done)
    done = run(small(text, "--ranks", "2,3"))
    check("report", done.returncode == 0 and done.stderr == "" and "\r" not in done.stdout and all(
        part in done.stdout for part in ["P = 2", "P = 3", "difference", "tokens/s", "activations", "workspace",
                                         "closed form", "held-out bits", "The model continues"]), done)
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
