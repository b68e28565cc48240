"""/sleep and /wake_up: what is refused meanwhile, and what comes back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted_process
from live_processes import LiveProcesses, live_processes
from live_server import live_server
from scripted_process import has_ended, wait_for

from llmc.server.settings import ServerSettings

pytestmark = pytest.mark.e2e
SETTINGS = ServerSettings(admin_api_key="operator")
KEY = {"authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveProcesses]:
    with live_processes(SETTINGS, delay_s=0.01, data_parallel_size=2) as live:
        yield live


@pytest.fixture
def live(shared: LiveProcesses) -> Iterator[LiveProcesses]:
    yield shared
    post(shared, "/wake_up")
    shared.check_served()
    shared.wait_idle()


def post(live: LiveProcesses, path: str, **params: Any) -> httpx.Response:
    return live.client.post(path, headers=KEY, params=params)


def is_sleeping(live: LiveProcesses) -> bool:
    answer: bool = live.client.get("/is_sleeping", headers=KEY).json()["is_sleeping"]
    return answer


def pids(live: LiveProcesses) -> list[int]:
    return live.engines._pids()


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_wakes(live: LiveProcesses, level: int) -> None:
    before = pids(live)
    assert not is_sleeping(live)
    assert post(live, "/sleep", level=level).json() == {"is_sleeping": True}
    assert is_sleeping(live)
    if level == 2:
        assert pids(live) == [] and all(has_ended(pid) for pid in before)
        assert not any(
            os.listdir(one.folder) for one in live.engines.supervisors if os.path.exists(one.folder)
        )
    else:
        assert pids(live) == before
    refused = live.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_asleep"
    assert live.status("/health") == 200 and live.status("/ready") == 503
    assert live.client.get("/v1/models").json()["data"][0]["state"] == "asleep"
    assert post(live, "/sleep", level=level).status_code == 200  # again

    assert post(live, "/wake_up").json() == {"is_sleeping": False}
    assert live.status("/ready") == 200
    live.check_served()
    restarts = [one.processes.restarts[one.name] for one in live.engines.supervisors]
    assert not any(restarts)  # nothing died


def test_level_two_follows_level_one(live: LiveProcesses) -> None:
    post(live, "/sleep", level=1)
    assert pids(live)
    post(live, "/sleep", level=2)
    assert not pids(live)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_that_run_are_aborted_or_waited_for(live: LiveProcesses, mode: str) -> None:
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(live.complete(max_tokens=60, ignore_eos=True))
    )
    thread.start()
    wait_for(lambda: live.llm.stats().num_running == 1)
    assert post(live, "/sleep", level=1, mode=mode).status_code == 200
    thread.join(20)
    [choice] = answers[0].json()["choices"]
    assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")


def test_a_prefix_is_gone_after_a_sleep(live: LiveProcesses) -> None:
    prompt = [40] * 64
    for expected in (0, 48):
        usage = live.complete(prompt=prompt, max_tokens=2).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected
    post(live, "/sleep", level=1)
    post(live, "/wake_up")
    usage = live.complete(prompt=prompt, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("params", [{"level": "0"}, {"level": "x"}, {"mode": "keep"}])
def test_other_levels_and_modes_are_refused(live: LiveProcesses, params: Any) -> None:
    answer = post(live, "/sleep", **params)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(params))
    assert not is_sleeping(live)


def test_an_engine_that_dies_in_its_sleep_comes_back(live: LiveProcesses) -> None:
    post(live, "/sleep", level=1)
    before = pids(live)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(pids(live)) == len(before) and not set(before) & set(pids(live)))
    assert live.complete().status_code == 503 and is_sleeping(live)
    assert post(live, "/wake_up").status_code == 200


def test_an_engine_that_cannot_be_woken_sleeps_on(tmp_path: Path) -> None:
    marker = tmp_path / "fails"
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(Path(scripted_process.__file__).parent)!r})\n"
        f"failure = 'memory' if os.path.exists({str(marker)!r}) else ''\n"
        "sys.argv = ['scripted_process.py', '0', failure, sys.argv[-1]]\n"
        f"runpy.run_path({scripted_process.__file__!r}, run_name='__main__')\n"
    )
    with live_processes(SETTINGS, command=[sys.executable, str(wrapper)]) as live:
        post(live, "/sleep", level=2)
        marker.touch()
        failed = post(live, "/wake_up")
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "wake_up_failed"
        assert is_sleeping(live) and not live.failures
        assert live.complete().json()["error"]["code"] == "engine_asleep"
        marker.unlink()
        assert post(live, "/wake_up").status_code == 200
        live.check_served()


def test_an_engine_in_this_process_cannot_be_ended() -> None:
    with live_server(SETTINGS) as live:
        answer = live.client.post("/sleep", headers=KEY, params={"level": "2"})
        assert answer.status_code == 400
        assert live.client.post("/sleep", headers=KEY).status_code == 200
        assert live.complete().status_code == 503
        assert live.client.post("/wake_up", headers=KEY).status_code == 200
        assert live.complete(max_tokens=2).status_code == 200
