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
        expect(sum(name.startswith("cuDNN, ") for name in names) >= 4, "options of cuDNN", done)
        expect(sum("tokens, causal" in name for name in names) == 4, "the longest forward, on 1 and 8 ranks", done)
        if any(row["name"] == "6 steps, results" and "not measured: no cuBLAS" in row["against"] for row in rows):
            count.skip("six steps", "no cuBLAS")
        else:
            expect(sum(name.startswith("6 steps") and "difference" in name for name in names) == 8, "six steps, by graphs too", done)
        expect(all(name in done.stdout for name in names), "the table holds what the JSON does", done)
        expect(all(row["ratio"] == 0 for row in rows if "other elements" in row["name"]), "bits of one rank", done)

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
