# SPDX-License-Identifier: Apache-2.0
"""What the runners share: compilers, a count of outcomes, and its last line."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor


class tally:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def ok(self, name):
        self.passed += 1
        print(f"ok      {name}", flush=True)

    def fail(self, name, reason):
        self.failed += 1
        print(f"FAILED  {name}: {reason}", flush=True)

    def skip(self, name, reason):
        self.skipped += 1
        print(f"skipped {name}: {reason}", flush=True)

    def close(self):
        """Prints the counts; the exit status they deserve."""
        print(f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped")
        return 1 if self.failed or self.passed + self.skipped == 0 else 0


def compilers(count):
    """The compilers that are here, each missing one counted as skipped with its name."""
    names = ["g++", "clang++"]
    for name in names:
        if not shutil.which(name):
            count.skip(name, "this compiler is not installed")
    return [name for name in names if shutil.which(name)]


def compile(command, source=""):
    """(whether it compiled, what the compiler said)"""
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=300,
                              env=os.environ | {"LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        return False, "the compiler was still running after 300 seconds"
    return done.returncode == 0, done.stdout + done.stderr


def in_parallel(function, cases):
    """Calls function(*case) for all cases, as many at a time as there are processors; results in order."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda case: function(*case), cases))
