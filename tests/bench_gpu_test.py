#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: bench_gpu_test.py PROGRAM SCRIPT

The benchmark for a GPU, built over the doubles: what it computes is right, its table and JSON hold what they
should, and without a GPU it and its script say so and end with 3.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import tally


def run(command, **environment):
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | environment)


def main(program, script):
    count = tally.tally()

    def expect(right, name, done):
        count.ok(name) if right else count.fail(name, f"it ends with {done.returncode}\n{done.stdout}{done.stderr}")

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "rows.json")
        done = run([program, "--quick", "--json", str(file)])
        expect(done.returncode == 0, "every result is right", done)
        rows = json.loads(file.read_text()) if file.exists() else []
        names = [row["name"] for row in rows]
        expect(sum("ranks, processes" in name for name in names) == 6, "processes by both ways of copying", done)
        expect(sum("ranks, threads" in name for name in names) == 12, "threads by both ways and both fences", done)
        expect(sum(name.startswith("cuDNN, ") for name in names) >= 7, "options of cuDNN, forward and backward", done)
        expect(sum("tokens, causal" in name for name in names) == 4, "the longest forward, on 1 and 8 ranks", done)
        if any(row["name"] == "6 steps, results" and "not measured: no cuBLAS" in row["against"] for row in rows):
            count.skip("six steps", "no cuBLAS")
        else:
            for what in "6 steps", "training":
                found = sum(name.startswith(what) and name.endswith(": difference") for name in names)
                expect(found == 8, f"{what}, by graphs too", done)
            expect(sum(name.startswith("training") and name.endswith(": dx") for name in names) == 6, "bits of gradients", done)
        expect(all(name in done.stdout for name in names), "the table holds what the JSON does", done)
        expect(all(row["ratio"] == 0 for row in rows if "other bits" in row["against"]), "bits of one rank", done)

        short = done.stdout.split("in short")[-1]
        expect("1 rank: dq" not in short and "0 lines missed their target" in short, "what is right is told in short", done)
        done = run([program, "--quick", "--only", "costs", "--json", str(file)])
        rows = json.loads(file.read_text())
        expect(done.returncode == 0 and len(rows) == 13, "a part alone", done)
        done = run([program, "--only", "threads", "--seconds", "0"])
        expect(done.returncode == 3, "no time for anything", done)

    done = run([program, "--quick"], DOUBLES_WITHOUT_DEVICES="1")
    expect(done.returncode == 3 and "there is no GPU here" in done.stderr, "without a GPU the program ends with 3", done)
    if os.path.exists("/dev/nvidiactl"):
        count.skip("the script without a GPU", "there is one here")
    else:
        done = run([script])
        expect(done.returncode == 3 and "there is no GPU here" in done.stderr, "without a GPU the script ends with 3", done)
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
