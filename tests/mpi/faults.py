#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: faults.py PROGRAM MPIEXEC...

A rank that fails ends the job, with another status than 0 and soon; the others say why where they can.
"""

import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import tally

RANKS, SECONDS = 3, 60
LEFT = r"rank RANK: peer_failed: .*a rank left the group: rank 2: "
IN_MPI = r"every rank must take part within the deadline: rank [012] waited 1000 ms in a call of MPI"
FAULTS = {  # what one of the other ranks must say, or each RANK
    ("killed", "fence"): None,
    ("killed", "make_window"): None,
    ("killed", "close"): None,
    ("killed", "split"): None,
    ("killed", "messages"): None,
    ("killed", "attention"): None,
    ("throws", "fence"): LEFT,
    ("throws", "messages"): LEFT,
    ("throws", "attention"): r"rank RANK: functor_failed: .*of its own",
    ("silent", "fence"): r"rank [01] waited 1000 ms, silent ranks: 2",
    ("silent", "make_window"): "ulysses: make_window: " + IN_MPI,
    ("silent", "close"): "ulysses: close: " + IN_MPI,
    ("silent", "split"): "ulysses: split: " + IN_MPI,
    ("silent", "messages"): r"rank [01] waited 1000 ms(?: for rank 2|, silent ranks: 2)",
    ("silent", "attention"): r"rank [01] waited 1000 ms(?: for rank 2|, silent ranks: 2)",
    ("nothing", "at all"): "",
}


def main(program, *mpiexec):
    count = tally.tally()
    for (fault, place), expected in FAULTS.items():
        name = f"{fault}, {place}"
        begin = time.monotonic()
        try:
            done = subprocess.run([*mpiexec, "-n", str(RANKS), program, fault, place], capture_output=True, text=True,
                                  timeout=SECONDS)
        except subprocess.TimeoutExpired:
            count.fail(name, f"the job was still running after {SECONDS} seconds")
            continue
        said = done.stdout + done.stderr
        missing = [rank for rank in range(RANKS - 1) if expected and not re.search(expected.replace("RANK", str(rank)), said)]
        if (done.returncode == 0) != (fault == "nothing"):
            count.fail(name, f"the job ended with {done.returncode}\n{said}")
        elif missing:
            count.fail(name, f"ranks {missing} do not say what happened\n{said}")
        else:
            count.ok(f"{name}, {time.monotonic() - begin:.1f} s")
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
