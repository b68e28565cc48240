"""The interpreter ends in order while a thread beside the main one is busy in torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading, time
import torch
from llmc.background_thread import BackgroundThread

@torch.library.custom_op("test::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.001)  # needs the interpreter's lock again, with torch's C++ functions on the stack
    return x + 1

is_asked, is_busy = threading.Event(), threading.Event()

def run():
    x = torch.ones(4)
    while not is_asked.is_set():
        x = torch.ops.test.slow(x)
        is_busy.set()

BackgroundThread(run, "busy", stop=is_asked.set if sys.argv[1] == "ask" else None).start()
assert is_busy.wait(60)  # the first call imports much
print("the end")
"""


@pytest.mark.parametrize("how", ["ask", "interrupt"])
def test_a_busy_thread_ends_before_the_interpreter(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
