"""Several models on one port: who answers, who is loaded when, and whom a failure concerns."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_models import LiveModels, live_models
from scripted_process import wait_for

from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.processes.engine_processes import EngineProcesses
from llmc.server import model_manager
from llmc.server.settings import ServerSettings

pytestmark = pytest.mark.e2e
KEY = {"authorization": "Bearer operator"}
MODELS = {"a": "scripted:0.005", "b": "scripted:0.005", "broken": "scripted:model"}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveModels]:
    with live_models(MODELS, ServerSettings(admin_api_key="operator")) as live:
        assert live.states() == {"a": "unloaded", "b": "unloaded", "broken": "unloaded"}
        card = live.client.get("/v1/models/a").json()
        assert card["max_model_len"] is None and card["error"] is None
        yield live


def post(live: LiveModels, path: str, **params: Any) -> Any:
    return live.client.post(path, headers=KEY, params=params)


def test_a_model_is_loaded_when_it_is_asked_for(live: LiveModels) -> None:
    live.check_served("a")
    assert live.states()["a"] == "loaded"
    live.check_served("b")
    headers = {"anthropic-version": "2023-06-01"}
    names = [
        one["display_name"] for one in live.client.get("/v1/models", headers=headers).json()["data"]
    ]
    assert names == list(MODELS)
    assert live.client.get("/v1/models/b").json()["max_model_len"] == 2048
    assert [live.manager.models[name].llm.num_active for name in "ab"] == [0, 0]  # type: ignore[union-attr]


def test_many_first_requests_load_a_model_once() -> None:
    with live_models({"a": "scripted:0.005"}) as live:
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(live.complete("a").status_code))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers == [200] * 6
        engines = live.manager.models["a"].engines
        assert engines is not None and len(engines._pids()) == 1


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [(None, 400, "missing_field"), ("other", 404, "model_not_found"), ("a", 200, "")],
)
def test_a_request_names_its_model(
    live: LiveModels, model: str | None, status: int, code: str
) -> None:
    answer = live.complete(model)
    assert answer.status_code == status
    assert code in answer.text


def test_every_protocol_finds_the_model(live: LiveModels) -> None:
    tokens = {"model": "a", "tokens": [5]}
    assert live.client.post("/detokenize", json=tokens).status_code == 400  # it has no tokenizer
    names = [one["name"] for one in live.client.get("/api/tags").json()["models"]]
    assert names == ["a", "b", "broken"]
    running = [one["name"] for one in live.client.get("/api/ps").json()["models"]]
    assert running == [m.name for m in live.manager.models.values() if m.state == "loaded"]
    shown = live.client.post("/api/show", json={"name": "a:latest"})
    assert shown.status_code == 200 and shown.json()["model_info"]["llmc.context_length"] == 2048
    assert live.client.get("/openapi.json", params={"model": "a"}).status_code == 200
    assert live.client.get("/v1/nowhere").status_code == 404
    assert live.client.get("/v1/completions").status_code == 405
    assert live.client.post("/v1/batches", json={}).status_code == 404
    bad = live.client.post("/v1/messages", json={"model": "a"})
    assert bad.status_code == 400 and bad.json()["type"] == "error"  # in its protocol's shape


def test_streams_and_engine_events_pass_through(live: LiveModels) -> None:
    body = {"model": "b", "prompt": [7, 8], "max_tokens": 4, "return_token_ids": True}
    with live.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        *lines, end = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    chunks = [choice for line in lines for choice in json.loads(line)["choices"]]
    # not their number: a reader that falls behind gets some merged
    assert end == "[DONE]" and sum(len(chunk["token_ids"]) for chunk in chunks) == 4
    with live.client.stream("GET", "/v1/engine/events", params={"model": "b"}) as response:
        event = json.loads(next(line for line in response.iter_lines() if line)[6:])
    assert event["num_rows"] == 8
    assert live.manager.models["b"].num_users == 0
    refused = live.client.get("/v1/engine/events", params={"model": "broken"})
    assert refused.status_code == 503


def test_a_model_that_does_not_start_harms_no_other(
    live: LiveModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        answer = live.complete("broken")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_failed"
        assert "'nothing' has no config.json" in answer.json()["error"]["message"]
    card = live.client.get("/v1/models/broken").json()
    assert card["state"] == "failed" and "no config.json" in card["error"]
    live.check_served("a")
    assert live.client.get("/ready").status_code == 200
    monkeypatch.setattr(model_manager, "RETRY_S", 0.0)  # another attempt, which fails again
    assert live.complete("broken").status_code == 503


def test_clients_are_not_told_where_models_lie(
    live: LiveModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def load(*_: Any) -> None:
        raise CheckpointError("no model at '/home/me/models/x': give a directory")

    monkeypatch.setattr(model_manager, "RETRY_S", 0.0)
    monkeypatch.setattr(live.manager.models["broken"], "load", load)
    answer = live.complete("broken").json()["error"]["message"]
    assert answer == "broken could not be loaded: no model at 'x': give a directory"
    assert "/home/me/models/x" in caplog.text


def test_a_killed_engine_is_restarted_and_harms_no_other(live: LiveModels) -> None:
    live.check_served("a")
    live.check_served("b")
    engines = live.manager.models["a"].engines
    assert engines is not None
    [pid] = engines._pids()
    os.kill(pid, signal.SIGKILL)
    live.check_served("b")
    wait_for(lambda: live.complete("a").status_code == 200)
    assert engines.supervisors[0].processes.restarts["engine"] == 1


def test_a_model_that_dies_too_often_is_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_manager, "RETRY_S", 0.0)
    with live_models({"a": "scripted:0.005", "b": "scripted:0.005"}) as live:
        live.check_served("b")
        for number in range(2):  # more than its budget of one
            wait_for(lambda: live.complete("a").status_code == 200)
            engines = live.manager.models["a"].engines
            assert engines is not None
            os.kill(engines._pids()[0], signal.SIGKILL)
            if number == 0:
                wait_for(lambda: live.complete("a").status_code == 503)
        live.wait_state("a", "failed")
        live.check_served("b")
        live.check_served("a")


def test_metrics_are_by_model(live: LiveModels) -> None:
    live.check_served("a")
    live.check_served("b")
    text = live.client.get("/metrics").text
    assert text.count("# TYPE llmc:generation_tokens_total counter") == 1
    found = dict(
        re.findall(r'^llmc:generation_tokens_total\{model_name="(\w+)"\} (\S+)', text, re.M)
    )
    assert set(found) == {"a", "b"} and all(float(value) >= 6 for value in found.values())
    loaded = dict(re.findall(r'^llmc:model_loaded\{model_name="(\w+)"\} (\S+)', text, re.M))
    assert loaded == {"a": "1.0", "b": "1.0", "broken": "0.0"}
    handlers = re.findall(r'^llmc:http_requests_total\{handler="([^"]+)",method="POST"', text, re.M)
    assert set(handlers) <= {
        *("/v1/completions", "/detokenize", "/api/show", "/v1/messages", "none")
    }


def test_the_operator_sees_and_reaches_each_model(live: LiveModels) -> None:
    live.check_served("a")
    live.check_served("b")
    info = live.client.get("/server_info", headers=KEY).json()
    assert info["models"]["a"]["memory_bytes"] > 1 << 20
    assert info["models"]["broken"]["state"] in ("unloaded", "failed")
    assert live.client.get("/load", headers=KEY).json()["models"]["a"]["server_load"] == 0
    assert set(post(live, "/reset_prefix_cache").json()["message"]) == {"a", "b"}
    assert set(post(live, "/reset_prefix_cache", model="a").json()["message"]) == {"a"}
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(live.complete("b", max_tokens=1500, ignore_eos=True))
    )
    thread.start()
    wait_for(lambda: live.manager.stats().num_running == 1)
    aborted = live.client.post("/abort_requests", headers=KEY, json={"all": True}).json()
    thread.join(20)
    assert len(aborted["aborted"]) == 1
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"


def test_one_model_sleeps_until_it_is_woken(live: LiveModels) -> None:
    live.check_served("a")
    live.check_served("b")
    slept = post(live, "/sleep", level=2, model="a").json()
    assert slept == {"is_sleeping": True, "models": ["a"]}
    refused = live.complete("a")
    assert refused.status_code == 503 and "engine_asleep" in refused.text
    assert live.states()["a"] == "asleep"
    live.check_served("b")
    assert post(live, "/wake_up").json() == {"is_sleeping": False, "models": []}
    live.check_served("a")


def test_others_are_loaded_while_a_model_finishes_its_requests_before_a_sleep() -> None:
    settings = ServerSettings(admin_api_key="operator")
    with live_models({"a": "scripted:0.05", "b": "scripted:0.005"}, settings) as live:
        live.check_served("a")
        answers: list[Any] = []
        slept: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(live.complete("a", max_tokens=500, ignore_eos=True))
            ),
            threading.Thread(
                target=lambda: slept.append(post(live, "/sleep", model="a", mode="wait").json())
            ),
        ]
        threads[0].start()
        wait_for(lambda: live.manager.stats().num_running == 1)
        threads[1].start()
        wait_for(lambda: live.complete("a").status_code == 503)
        live.check_served("b")
        assert not answers and not slept
        live.client.post("/abort_requests", headers=KEY, json={"all": True})
        for thread in threads:
            thread.join(30)
        assert slept == [{"is_sleeping": True, "models": ["a"]}]
        live.check_served("b")


def test_idle_models_are_unloaded_and_come_back() -> None:
    settings = ServerSettings(model_idle_timeout_s=0.3)
    with live_models({"a": "scripted:0.01", "b": "scripted:0.01"}, settings) as live:
        live.check_served("a")
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(live.complete("b", max_tokens=200, ignore_eos=True))
        )
        thread.start()
        live.wait_state("b", "loaded")
        live.wait_state("a", "unloaded")
        engines = live.manager.models["a"].engines
        assert engines is not None
        until = time.monotonic() + 20
        while engines._pids() and time.monotonic() < until:
            time.sleep(0.05)
        assert engines._pids() == []
        thread.join(30)
        assert answers[0].status_code == 200  # whoever answers is not idle, however long it takes
        live.wait_state("b", "unloaded")
        live.check_served("a")


def test_models_make_room_for_others_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 40 << 20  # about what a scripted engine takes; measured are other figures
    monkeypatch.setattr(model_manager.ServedModel, "expected_bytes", lambda self: size)
    monkeypatch.setattr(EngineProcesses, "memory_bytes", lambda self: len(self._pids()) * size)
    monkeypatch.setattr(model_manager, "ROOM_S", 0.5)
    settings = ServerSettings(model_memory=int(2.5 * size))
    with live_models(dict.fromkeys("abc", "scripted:0.01"), settings) as live:
        for name in "abac":  # of a and b, b was idle for longer
            live.check_served(name)
        assert live.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        threads = [
            threading.Thread(target=live.complete, args=(name,), kwargs={"max_tokens": 150})
            for name in "ac"
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.manager.stats().num_running == 2)
        refused = live.complete("b")  # both others answer somebody
        assert refused.status_code == 503 and "model_memory_full" in refused.text
        for thread in threads:
            thread.join(30)
        live.check_served("b")
        monkeypatch.setattr(model_manager.ServedModel, "expected_bytes", lambda self: 3 * size)
        gone = next(name for name, state in live.states().items() if state == "unloaded")
        assert "needs 120 MiB, but all models together may use 100 MiB" in live.complete(gone).text


def test_requests_that_wait_for_a_model_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_manager.ServedModel, "max_waiting", 2)
    with live_models({"a": "scripted:0.005"}) as live:
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(live.complete("a").status_code))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(answers) == [200, 200, 429, 429, 429]


def test_the_size_of_weights_is_that_of_all_parts(tmp_path: Path) -> None:
    for part, count in ((1, 100), (2, 50), (3, 25)):
        (tmp_path / f"m-0000{part}-of-00003.gguf").write_bytes(bytes(count))
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(bytes(1000))
    first = tmp_path / "m-00001-of-00003.gguf"
    assert model_manager.weight_file_bytes(EngineConfig(model=str(first))) == 175
