#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: generate_test.py GENERATE TRAIN_LM TEXT_FILE

Trains a small model, saves it, and has it generate: every way of using the cache, at every rank count, must write
the text that is written without a cache. Then what the program says of its options and of bad input.
"""

import pathlib
import subprocess
import sys
import tempfile

import tally

PROMPT = "Licensed under the Apache License"
# Drawn in double precision: every token depends on all before it, and rounding does not show.
DRAWN = ["--prompt", PROMPT, "--tokens", "80", "--dtype", "double", "--temperature", "0.8"]
WAYS = [
    ("in one prefill", []),
    ("in chunks", ["--chunk", "7"]),
    ("token by token", ["--chunk", "1"]),
    ("head-parallel", ["--chunk", "7", "--head-parallel"]),
    ("by the formula", ["--attention", "reference", "--chunk", "5"]),
    ("head-parallel by the formula", ["--attention", "reference", "--head-parallel"]),
]
OPTIONS = "--ranks --prompt --tokens --chunk --head-parallel --no-cache --temperature --seed --dtype --attention".split()


def bad_input(folder, model):
    """(name, arguments, parts of the message)"""
    whole = model.read_bytes()
    other, short, longer = folder / "other", folder / "short", folder / "longer"
    other.write_bytes(b"a text\n")
    short.write_bytes(whole[:-8])
    longer.write_bytes(whole + b" ")
    return [
        ("no model", [], ["MODEL_FILE"]),
        ("no such file", [folder / "none"], ["cannot read the model file", "none", "No such file"]),
        ("no model file", [other], ["other", "no model file of train_lm --save"]),
        ("a cut file", [short], ["short", "has not the", "parameters"]),
        ("a longer file", [longer], ["longer", "has not the", "parameters"]),
        ("no prompt", [model, "--prompt", ""], ["--prompt must not be empty"]),
        ("no tokens", [model, "--tokens", "0"], ["--tokens", "0"]),
        ("no chunk", [model, "--chunk", "0"], ["--chunk", "0"]),
        ("element type", [model, "--dtype", "half"], ["--dtype", "half"]),
    ]


def main(generate, train_lm, text):
    count = tally.tally()

    def run(program, *arguments):
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, errors="replace",
                              timeout=250)

    def check(name, condition, done):
        count.ok(name) if condition else count.fail(name, f"exit status {done.returncode}, it said:\n"
                                                          f"{done.stdout}{done.stderr}")

    def written(done):
        return done.stdout.partition("\n----\n")[2].removesuffix("\n----\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        model = folder / "model"
        done = run(train_lm, text, "--ranks", "2", "--heads", "6", "--kv-heads", "2", "--layers", "2", "--width", "48",
                   "--steps", "60", "--tokens", "240", "--sample", "0", "--save", model)
        check("train and save", done.returncode == 0 and f"the model of P = 2: {model}" in done.stdout and model.exists(), done)
        plain = run(generate, model, "--ranks", "1", "--no-cache", *DRAWN)
        expected = written(plain)
        check("without a cache", plain.returncode == 0 and len(set(expected)) > 10, plain)
        for name, options in WAYS:
            done = run(generate, model, "--ranks", "1,2,3,4,8", *DRAWN, *options)
            check(f"{name}: the same text at every P", done.returncode == 0 and written(done) == expected
                  and done.stdout.count("decode ") == 5, done)
        greedy = run(generate, model, "--ranks", "1,2,3,4", "--dtype", "double", "--prompt", PROMPT)
        check("greedy: the same text at every P", greedy.returncode == 0 and written(greedy) != "", greedy)
        other = run(generate, model, "--ranks", "1", *DRAWN, "--seed", "2")
        check("another seed", other.returncode == 0 and written(other) != expected, other)
        for name, arguments, parts in bad_input(folder, model):
            done = run(generate, *arguments)
            check(name, done.returncode == 2 and done.stdout == "" and done.stderr.startswith("generate: ")
                  and all(part in done.stderr for part in parts), done)
    done = run(generate, "--help")
    check("help", done.returncode == 0 and all(option in done.stdout for option in ["MODEL_FILE", *OPTIONS]), done)
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
