#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: train_lm_mpi_test.py TEXT_FILE TRAIN_LM TRAIN_LM_MPI MPIEXEC...

The training example over processes: the losses of the same training over threads, who prints and writes files, and
what it says of bad input.
"""

import pathlib
import subprocess
import sys
import tempfile

import tally

RANKS, STEPS, TOLERANCE = (1, 2, 3, 4), 20, 1e-9
# With 6 heads, 4 ranks cut heads.
MODEL = ["--heads", "6", "--kv-heads", "2", "--layers", "2", "--width", "48", "--tokens", "120", "--dtype", "double",
         "--steps", str(STEPS), "--sample", "8"]


def columns(path):
    """The losses of each run in a losses file."""
    return list(zip(*([float(word) for word in line.split("\t")] for line in path.read_text().splitlines())))


def complaint(done, theirs, ours):
    """What is wrong with a training over processes, or None."""
    if done.returncode != 0 or done.stdout.count("held-out bits a byte, after") != 1:
        return f"exit status {done.returncode}, it said:\n{done.stdout + done.stderr}"
    if not len(theirs) == len(ours) == STEPS:
        return f"{len(theirs)} and {len(ours)} losses of {STEPS} steps"
    largest = max(abs(a - b) for a, b in zip(theirs, ours))
    return None if largest <= TOLERANCE else f"losses differ by {largest:.3e}"


def main(text, over_threads, over_processes, *mpiexec):
    count = tally.tally()

    def run(*words):
        return subprocess.run([str(word) for word in words], capture_output=True, text=True, errors="replace", timeout=120)

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run(over_threads, text, *MODEL, "--ranks", ",".join(map(str, RANKS)), "--losses", folder / "threads")
        expected = columns(folder / "threads")
        for ranks, theirs in zip(RANKS, expected):
            file, model = folder / f"losses{ranks}", folder / f"model{ranks}"
            done = run(*mpiexec, "-n", ranks, over_processes, text, *MODEL, "--losses", file, "--save", model)
            wrong = complaint(done, theirs, columns(file)[0] if file.exists() else [])
            wrong = wrong or (None if model.exists() else "no model was saved")
            count.ok(f"{ranks} processes") if wrong is None else count.fail(f"{ranks} processes", wrong)
        bad = {"unknown option": ([text, "--ranks", "2"], "--ranks"),
               "losses file": ([text, *MODEL, "--losses", folder / "none" / "losses"], "cannot write the losses file")}
        for name, (arguments, said) in bad.items():
            done = run(*mpiexec, "-n", 2, over_processes, *arguments)
            right = done.returncode != 0 and said in done.stderr and "loss, nats" not in done.stdout
            count.ok(name) if right else count.fail(name, f"exit status {done.returncode}, it said:\n{done.stderr}")
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
