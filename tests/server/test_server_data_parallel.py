"""Several engines behind one port: equal answers, caches that are found, deaths that few notice."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_command import served
from live_processes import PROMPT, LiveProcesses, live_processes
from scripted_process import BLOCK_SIZE, wait_for

from llmc.processes.server_processes import RestartBudget
from llmc.server.settings import ServerSettings

pytestmark = pytest.mark.e2e
PLENTY = RestartBudget((0.05,) * 50)
LONG = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveProcesses]:
    settings = ServerSettings(admin_api_key="operator")
    with live_processes(settings, delay_s=0.01, budget=PLENTY, data_parallel_size=2) as live:
        yield live


@pytest.fixture(autouse=True)
def check_idle(live: LiveProcesses) -> Iterator[None]:
    yield
    wait_for(lambda: None not in live.llm.processes().engines.values())
    live.wait_idle()
    live.check_served()


def metrics(live: LiveProcesses, name: str) -> dict[str, float]:
    """Values by the labels beside the model's name."""
    text = live.client.get("/metrics").text
    found = re.findall(rf"^llmc:{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    own = 'model_name="scripted"'
    return {labels.replace(own, "").strip(","): float(value) for labels, value in found}


def ask_many(live: LiveProcesses, count: int, **fields: Any) -> list[Any]:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(live.complete(**fields)))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def test_all_engines_answer_and_their_numbers_add_up(live: LiveProcesses) -> None:
    before = metrics(live, "generation_tokens_total")[""]
    answers = ask_many(live, 12)
    assert {tuple(a.json()["choices"][0]["token_ids"]) for a in answers} == {
        tuple((PROMPT * 3)[:12])
    }
    wait_for(lambda: metrics(live, "generation_tokens_total")[""] == before + 12 * 12)
    each = metrics(live, "engine_generation_tokens_total")
    assert set(each) == {'engine="engine-0"', 'engine="engine-1"'}
    assert all(value > 0 for value in each.values())
    up = metrics(live, "process_up")
    assert up == {f'process="{name}"': 1.0 for name in ("api-0", "engine-0", "engine-1")}


def test_prompts_find_their_prefix_again(live: LiveProcesses) -> None:
    """Eight chats of five turns: every turn finds all full blocks of the one before."""
    chats = [[20 + chat] * (4 * BLOCK_SIZE) for chat in range(8)]
    for turn in range(5):
        for chat in chats:
            usage = live.complete(prompt=chat, max_tokens=2).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == (len(chat) - BLOCK_SIZE if turn else 0), turn
            chat += [100 + turn] * BLOCK_SIZE
    # The chats are dealt out.
    hits = metrics(live, "engine_prefix_cache_hits_total")
    assert len(hits) == 2 and min(hits.values()) > 0.3 * max(hits.values())


def test_a_killed_engine_takes_its_own_requests_along_and_comes_back(live: LiveProcesses) -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(live.complete(**LONG))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: live.llm.stats().num_running == 6)
    counted = live.llm.stats().num_finished
    first = live.engines.supervisors[0]
    before = first.processes.restarts["engine-0"]
    first._budget = RestartBudget((1.0,) * 50)  # time to look at the server without it
    os.kill(live.engine_pid, signal.SIGKILL)
    wait_for(lambda: len(answers) == 3)
    for answer in answers:
        assert answer.status_code == 503
        assert "engine-0" in answer.json()["error"]["message"]
    assert live.status("/ready") == live.status("/health") == 200
    live.check_served()
    assert live.llm.stats().num_finished >= counted
    assert metrics(live, "engine_num_requests_running") == {'engine="engine-1"': 3.0}
    first._budget = PLENTY
    wait_for(lambda: None not in live.llm.processes().engines.values())
    assert first.processes.restarts["engine-0"] == before + 1
    assert len(answers) == 3  # those of the other engine still run
    for thread in threads:
        thread.join(60)
    assert sorted(a.status_code for a in answers) == [200] * 3 + [503] * 3


def test_the_operator_reaches_all_engines(live: LiveProcesses) -> None:
    key = {"authorization": "Bearer operator"}
    tokens = [7] * (4 * BLOCK_SIZE)
    ask_many(live, 4, prompt=tokens, max_tokens=2)
    assert live.client.post("/reset_prefix_cache", headers=key).status_code == 200
    usage = live.complete(prompt=tokens, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert set(live.client.get("/server_info", headers=key).json()["processes"]) == {
        *("api-0", "engine-0", "engine-1")
    }


def test_the_server_goes_on_without_an_engine_that_died_too_often() -> None:
    budget = iter([RestartBudget(()), RestartBudget((0.05,) * 3)])
    with live_processes(data_parallel_size=2, budget=lambda: next(budget)) as live:
        os.kill(live.engine_pid, signal.SIGKILL)
        wait_for(lambda: live.supervisor.processes.is_over)
        wait_for(lambda: live.llm.processes().engines["engine-0"] is None)
        live.check_served()
        assert live.status("/ready") == 200 and not live.failures


def test_several_api_processes_share_several_engines(tmp_path: Path) -> None:
    with served(tmp_path, "--api-workers", "2", "--data-parallel-size", "2") as server:
        wait_for(lambda: "api-1 is ready" in server.log.read_text(), seconds=60)
        answers = [server.complete().json()["choices"][0]["token_ids"] for _ in range(12)]
        assert answers == [PROMPT] * 12
        for _ in range(4):
            assert sum(server.metric("process_up").values()) == 4
            wait_for(lambda: sum(server.metric("engine_generation_tokens_total").values()) == 60)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log.read_text()
