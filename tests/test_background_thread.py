"""The interpreter ends in order while a thread beside the main one is busy in torch."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmc.background_thread import Interruptible

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


def test_a_call_is_ended_and_its_thread_goes_on() -> None:
    is_running = threading.Event()

    def forever() -> None:
        while True:
            is_running.set()

    with ThreadPoolExecutor(1) as workers:
        call = Interruptible(forever)
        future = workers.submit(call)
        assert is_running.wait(60)
        call.end()
        assert isinstance(future.exception(timeout=60), SystemExit)
        for _ in range(200):  # ended at any moment, it disturbs nothing else
            call = Interruptible(lambda: sum(range(100)))
            future = workers.submit(call)
            call.end()
            assert workers.submit(sum, range(100)).result(60) == 4950
            assert future.done()


def test_a_call_that_was_ended_before_it_began_does_nothing() -> None:
    done: list[int] = []
    call = Interruptible(lambda: done.append(1))
    assert call.seconds == 0
    call.end()
    with pytest.raises(SystemExit):
        call()
    assert not done


def test_a_call_that_waits_takes_no_time() -> None:
    """A limit in seconds would end calls on a busy machine."""
    is_running, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        is_running.set()
        may_end.wait(60)

    with ThreadPoolExecutor(1) as workers:
        call = Interruptible(wait)
        future = workers.submit(call)
        assert is_running.wait(60)
        time.sleep(1.0)
        spent = call.seconds
        may_end.set()
        future.result(60)
    assert 0 <= spent < 0.5
