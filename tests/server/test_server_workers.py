"""`llmc serve` as processes: the main one is killed, or has others beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_command import Served, served
from live_processes import PROMPT
from scripted_process import HANG_IN_C, has_ended, wait_for

pytestmark = pytest.mark.e2e


def test_the_engine_ends_with_a_killed_main_process(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert server.complete().status_code == 200
        engine = server.children()["engine"]
        [private] = server.folder.iterdir()
        assert private.stat().st_mode & 0o777 == 0o700
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: has_ended(engine.pid), seconds=5)
        assert list(server.folder.iterdir()) == []


def test_an_engine_that_hangs_ends_with_a_killed_main_process(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        engine = server.children()["engine"]
        body = {"prompt": [HANG_IN_C], "max_tokens": 5}
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: has_ended(engine.pid), seconds=5)


def test_several_api_processes_share_an_engine_and_a_port(tmp_path: Path) -> None:
    with served(tmp_path, "--api-workers", "2") as server:
        wait_for(lambda: "api-1 is ready" in server.log.read_text(), seconds=60)
        worker = server.children()["api"]

        statuses: list[Any] = []

        def ask() -> None:
            for _ in range(5):
                answer = server.complete()
                statuses.append((answer.status_code, answer.json()["choices"][0]["token_ids"]))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [(200, PROMPT)] * 30
        assert worker.cpu_times().user > 0
        # Whoever is asked answers for all.
        for _ in range(4):
            assert sum(server.metric("request_success_total").values()) == 30
            assert sum(server.metric("process_up").values()) == 3

        events = [server.event() for _ in range(6)]
        assert {event["stats"]["num_finished"] for event in events} == {30}
        assert {event["blocks"]["num_used"] for event in events} == {0}
        check_a_killed_worker(server, worker)
        check_a_killed_engine(server)

        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        log = server.log.read_text()
        assert "Traceback" not in log and "Fatal" not in log, log


def test_the_limit_of_waiting_requests_is_for_all_api_processes(tmp_path: Path) -> None:
    limits = ("--max-num-seqs", "2", "--max-queue", "3")
    with served(tmp_path, "--api-workers", "2", *limits) as server:
        wait_for(lambda: "api-1 is ready" in server.log.read_text(), seconds=60)
        statuses: list[int] = []

        def ask() -> None:
            # long enough that none ends before all have arrived
            statuses.append(server.complete(max_tokens=150, ignore_eos=True).status_code)

        for _ in range(2):  # the second time nothing of the first may still count
            statuses.clear()
            threads = [threading.Thread(target=ask) for _ in range(30)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(statuses) == [200] * 5 + [429] * 25


def check_a_killed_worker(server: Served, worker: psutil.Process) -> None:
    """Its requests are freed, the others go on, and there is another one soon."""
    stopped = threading.Event()
    outcomes: list[str] = []

    def ask_for_much() -> None:
        try:
            outcomes.append(str(server.complete(max_tokens=1900, ignore_eos=True).status_code))
        except httpx.HTTPError:
            outcomes.append("lost")
        stopped.set()

    # Enough of them that both processes have some.
    threads = [threading.Thread(target=ask_for_much) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(server.metric("num_requests_running").values()) == 8)
    worker.kill()
    assert stopped.wait(20)
    wait_for(lambda: sum(server.metric("num_requests_running").values()) == 8 - len(outcomes))
    assert server.complete().status_code == 200
    wait_for(lambda: server.log.read_text().count("api-1 is ready") == 2, seconds=60)
    [restarts] = [v for k, v in server.metric("process_restarts_total").items() if "api-1" in k]
    assert restarts == 1
    server.killed_threads = threads  # type: ignore[attr-defined]
    assert set(outcomes) == {"lost"} and 0 < len(outcomes) < 8


def check_a_killed_engine(server: Served) -> None:
    server.children()["engine"].kill()
    for thread in server.killed_threads:  # type: ignore[attr-defined]
        thread.join(10)
        assert not thread.is_alive()

    def all_are_ready() -> bool:
        ups = [server.metric("engine_up").popitem()[1] for _ in range(6)]
        return ups == [1.0] * 6

    wait_for(all_are_ready)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        answers = [server.complete().status_code for _ in range(6)]
        if answers == [200] * 6:
            return
    raise AssertionError(f"not everybody found the new engine: {answers}")
