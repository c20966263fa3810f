#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: train_lm_test.py PROGRAM TEXT_FILE

What the training example says of its options, of bad input, and of runs that fail: message and exit status;
the trace that it writes; and in what order examples/run takes its arguments.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import tally

OPTIONS = ("--ranks --heads --kv-heads --layers --width --tokens --batch --steps --dtype --attention --seed "
           "--learning-rate --sample --tolerance --trace --losses --save --help").split()


def small(text, *options):
    return [text, "--layers", "1", "--width", "24", "--heads", "6", "--tokens", "64", "--steps", "40", "--sample", "8",
            *options]


def cases(text, folder):
    """(name, arguments, exit status, parts of the message)"""
    empty, short, longer = folder / "empty.txt", folder / "short.txt", folder / "longer.txt"
    empty.write_bytes(b"")
    short.write_bytes(b"too short\n")
    longer.write_bytes(b"x" * 219)
    return [
        ("no text", [], 2, ["TEXT_FILE"]),
        ("unknown option", [text, "--head", "6"], 2, ["--head"]),
        ("missing value", [text, "--steps"], 2, ["--steps"]),
        ("no such file", [folder / "none.txt"], 2, ["cannot read", "none.txt", "No such file"]),
        ("a folder", [folder], 2, ["cannot read", str(folder), "directory"]),
        ("empty file", [empty], 2, ["empty.txt", "is empty"]),
        ("short file", [short, "--tokens", "64"], 2, ["short.txt", "too short", "10 bytes", "64 tokens", "1300",
                                                      "give a longer text\n"]),
        ("shorter sequences", [longer, "--tokens", "64"], 2, ["219 bytes", "or lower --tokens to 9 or less"]),
        ("trace file", small(text, "--trace", folder / "none" / "trace.json"), 2, [
            "cannot write the trace file", "trace.json", "No such file"]),
        ("trace into a folder", small(text, "--trace", folder), 2, ["cannot write the trace file", str(folder)]),
        ("losses file", small(text, "--losses", folder / "none" / "losses"), 2, [
            "cannot write the losses file", "losses", "No such file"]),
        ("model file", small(text, "--save", folder / "none" / "model"), 2, [
            "cannot write the model file", "model", "No such file"]),
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


def check_trace(path, layers, ranks):
    """What is wrong with the trace of two steps of training, or None."""
    events = [event for event in json.loads(path.read_bytes().decode("utf-8")) if event["ph"] != "M"]
    for rank in range(ranks):
        track = [event for event in events if event["tid"] == rank]
        names = lambda category: [event["name"] for event in track if event["cat"] == category]  # noqa: E731
        forward = [f"layer {i}: forward" for i in range(layers)]
        backward = [f"layer {i}: backward" for i in reversed(range(layers))]
        if names("call") != (forward + backward) * 2:
            return f"calls of rank {rank}: {names('call')}"
        if names("recorder"):
            return f"rank {rank}: {names('recorder')}"
        inner = ["project_in", "to_heads", "attend", "to_tokens", "project_out"]
        if names("step") != (["shard"] + inner * layers + inner[::-1] * layers) * 2:
            return f"steps of rank {rank}: {names('step')}"
    return None if {event["tid"] for event in events} == set(range(ranks)) else "other tracks"


def given_to_program(folder, arguments):
    """What examples/run gives to the program, after its own words; tools and program are stood in for."""
    root = pathlib.Path(folder, "root")
    for script, body in [("tools/setup", ""), ("tools/build", ""), ("tools/openblas_core", ""),
                         ("tools/mpis", 'echo "one $(dirname "$0")/mpiexec --many"; echo "other none"'),
                         ("tools/mpiexec", '[ "$1 $2 $3" = "--many -n 2" ] && shift 3 && exec "$@"'),
                         ("build/examples/train_lm_one", 'printf "over MPI <%s>" "$@"'),
                         ("build/examples/train_lm", 'printf "<%s>" "$@"'),
                         ("build/examples/generate", 'printf "<%s>" "$@"')]:
        path = root / script
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    (root / "examples").mkdir(exist_ok=True)
    own = pathlib.Path(__file__).resolve().parent.parent / "examples" / "run"
    shutil.copy(own, root / "examples" / "run")
    done = subprocess.run([root / "examples" / "run", *arguments], capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL, env=os.environ | {"LC_ALL": "C"})
    return done.stdout.splitlines()[-1] + done.stderr if done.stdout else done.stderr


ORDERS = [
    ("t.txt", "<t.txt>"),
    ("t.txt --steps 5 --ranks 1,2", "<t.txt><--steps><5><--ranks><1,2>"),
    ("--steps 5 t.txt --ranks 1,2", "<t.txt><--steps><5><--ranks><1,2>"),
    ("--steps=5 t.txt", "<t.txt><--steps=5>"),
    ("--steps 5 --ranks 1,2 t.txt", "<t.txt><--steps><5><--ranks><1,2>"),
    ("t.txt u.txt", "<t.txt><u.txt>"),
    ("t.txt --steps", "<t.txt><--steps>"),
    ("--tokens -5 t.txt", "<t.txt><--tokens><-5>"),
    ("--steps 5 --generate t.txt", "root/build/trained_model><--temperature><0.6>"),
    ("--steps 5 --mpi 2 t.txt", "over MPI <t.txt>over MPI <--steps>over MPI <5>"),
    ("t.txt --mpi 2 --generate", "root/build/trained_model><--temperature><0.6>"),
    ("--steps 5 --help", "<--help>"),
    ("-h", "<--help>"),
    ("--steps 5", "own_text.txt><--steps><5>"),
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
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        # The largest rank count is not the last; TEXT_FILE may stand behind --ranks.
        done = run(["--ranks", "1,3,2", "--trace", path, *small(text)])
        wrong = check_trace(path, layers=1, ranks=3) if path.exists() else "no file"
        check(f"trace{'' if wrong is None else ': ' + wrong}", done.returncode == 0 and wrong is None and all(
            part in done.stdout for part in ["the last 2 steps on 3 ranks", str(path), "perfetto"]), done)
        done = run([text, "--layers", "1", "--width", "24", "--heads", "6", "--tokens", "64", "--steps", "1", "--sample",
                    "0", "--ranks", "1", "--trace", path])
        check("trace of one step", "the last step on 1 rank" in done.stdout, done)
        for arguments, expected in ORDERS:
            given = given_to_program(folder, arguments.split())
            name = f"examples/run {arguments}"
            whole = expected.startswith("<")
            right = given == expected if whole else given.endswith(expected)
            count.ok(name) if right else count.fail(name, f"the program is given {given}")
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
