"""Threads that need Python's lock get it before the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys, threading, time
from meshwright.runtime.ending import let_threads_finish_at_exit
go = threading.Event()
def late():
    go.wait()
    for _ in range(3):
        time.sleep(0.003)  # gives the lock up and wants it again, as a thread does that frees tensors
    os.write(1, b"done")
threading.Thread(target=late, daemon=True).start()
if sys.argv[1] == "wait":
    let_threads_finish_at_exit()
    let_threads_finish_at_exit()
go.set()
"""


def test_a_thread_that_still_works_finishes_before_the_interpreter_ends():
    told = {
        how: subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=120).stdout
        for how in ("wait", "not")
    }
    assert told == {"wait": "done", "not": ""}
