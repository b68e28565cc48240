"""The operator's routes, their key, and request ids from the client to the log."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live_server import Live, live_server

from llmc.logs import REQUEST_ID, JsonFormatter, TextFormatter
from llmc.server.guard import ADMIN_PATHS
from llmc.server.settings import ServerSettings

ADMIN = {"authorization": "Bearer admin-key"}
ASK = {"role": "user", "content": "x"}
GETS = ("/load", "/server_info")


@pytest.fixture(scope="module")
def governed() -> Iterator[Live]:
    settings = ServerSettings(
        api_keys=("client-key",), admin_api_key="admin-key", profile_dir="traces"
    )
    with live_server(settings) as live:
        yield live


def call(live: Live, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    method = "GET" if path in GETS else "POST"
    response = live.client.request(method, path, headers=headers, json={"all": True})
    body = response.json()
    return response.status_code, body.get("error", {}).get("code", "")


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_without_an_admin_key_there_are_no_such_routes(live: Live, path: str) -> None:
    assert call(live, path, ADMIN) == (404, "admin_api_disabled")


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_only_the_operator_passes(governed: Live, path: str) -> None:
    assert call(governed, path) == (403, "admin_api_key_needed")  # the client's key
    assert call(governed, path, {"authorization": "Bearer x"}) == (401, "invalid_api_key")
    assert call(governed, path, {"x-api-key": "admin-key", "authorization": ""})[0] != 401
    assert governed.client.get("/v1/models", headers=ADMIN).status_code == 401


def test_load_and_info(governed: Live) -> None:
    load = governed.client.get("/load", headers=ADMIN).json()
    assert load["server_load"] == 0 and load["num_requests_waiting"] == 0
    response = governed.client.get("/server_info", headers=ADMIN)
    info = response.json()
    assert info["model"]["name"] == "scripted" and info["engine"]["max_num_seqs"] > 0
    assert info["server"]["profile_dir"] == "traces"
    assert "client-key" not in response.text and "admin-key" not in response.text


def test_profile_is_begun_and_ended_once(governed: Live) -> None:
    governed.scripted.runner.is_profiling = False

    def post(path: str) -> tuple[int, str]:
        response = governed.client.post(path, headers=ADMIN)
        return response.status_code, response.text

    assert post("/stop_profile")[0] == 409
    assert post("/start_profile")[0] == 200
    status, text = post("/start_profile")
    assert status == 409 and "already" in text
    assert post("/stop_profile") == (200, '{"message":"traces/profile"}')


def test_reset_prefix_cache(governed: Live) -> None:
    prompt = "a long prompt that fills some blocks " * 4

    def cached() -> int:
        usage = governed.complete(prompt=prompt, max_tokens=1).json()["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    cached()
    assert cached() > 0
    answer = governed.client.post("/reset_prefix_cache", headers=ADMIN).json()
    assert int(answer["message"].removeprefix("dropped ").split()[0]) > 0
    assert cached() == 0
    governed.wait_idle()


def test_calls_are_aborted_by_their_id(governed: Live) -> None:
    governed.scripted.runner.delay_s = 0.01
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    ended: dict[str, str] = {}

    def run(name: str) -> None:
        answer = governed.client.post(
            "/v1/completions", json=body, headers={"x-request-id": "twice"}
        )
        ended[name] = answer.json()["choices"][0]["finish_reason"]

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]  # one id, two calls
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    while governed.llm.num_active < 2 and time.monotonic() < deadline:
        time.sleep(0.005)

    def abort(**fields: object) -> list[str]:
        aborted: list[str] = governed.client.post(
            "/abort_requests", json=fields, headers=ADMIN
        ).json()["aborted"]
        return aborted

    assert abort(request_ids=["unknown"]) == []
    assert abort(request_ids=["twice", "unknown"]) == ["twice"]
    for thread in threads:
        thread.join()
    governed.scripted.runner.delay_s = 0.0
    assert ended == {"a": "abort", "b": "abort"}
    governed.wait_idle()
    assert abort(all=True) == []
    assert governed.client.post("/abort_requests", json={}, headers=ADMIN).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/api/generate", "/completion"])
def test_an_abort_is_an_error_where_no_reason_says_it(
    governed: Live, path: str, stream: bool
) -> None:
    """As the real servers do when they end a call themselves."""
    said = {"messages": [ASK]} if path in ("/v1/messages", "/api/chat") else {"prompt": "x"}
    most = {"max_tokens": 999} if path == "/v1/messages" else {}
    answer = abort_early(governed, path, {**said, **most, "model": "scripted", "stream": stream})
    assert answer.status_code == (200 if stream else 500)
    assert stream or answer.headers["x-should-retry"] == "false"
    *before, last = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert "the server's operator aborted this call" in last
    if path == "/v1/messages":
        error = json.loads(last)
        assert error["type"] == "error" and error["error"]["type"] == "api_error"
        assert "message_stop" not in answer.text and 'stop_reason":"' not in answer.text
    else:
        assert next(iter(json.loads(last))) == "error"
        assert '"done":true' not in answer.text and '"stop":true' not in answer.text
    assert len(before) > 1 if stream else not before, "what was said until then has been sent"


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_is_a_reason_in_sglangs_answers(governed: Live, stream: bool) -> None:
    answer = abort_early(governed, "/generate", {"text": "x", "stream": stream})
    assert answer.status_code == 200
    last = answer.text.strip().removesuffix("data: [DONE]").strip().rpartition("data: ")[2]
    whole = json.loads(last)
    assert whole["meta_info"]["finish_reason"]["type"] == "abort" and whole["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_response_has_failed(governed: Live, stream: bool) -> None:
    answer = abort_early(governed, "/v1/responses", {"input": "x", "stream": stream})
    if stream:
        last = json.loads(answer.text.strip().rpartition("data: ")[2])
        assert last["type"] == "response.failed"
        response = last["response"]
    else:
        response = answer.json()
    assert (response["status"], response["incomplete_details"]) == ("failed", None)
    assert response["error"]["code"] == "server_error"
    assert "aborted" in response["error"]["message"]
    [item] = response["output"]
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"], "what was said until then is kept"


def abort_early(governed: Live, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to a call that the operator aborts."""
    governed.scripted.runner.delay_s = 0.03
    headers = {"x-request-id": "doomed"}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(governed.client.post, path, json=body, headers=headers)
        while governed.llm.num_active == 0 and not asked.done():
            time.sleep(0.005)
        time.sleep(0.3)
        fields = {"request_ids": ["doomed"]}
        governed.client.post("/abort_requests", json=fields, headers=ADMIN)
        answer = asked.result()
    governed.scripted.runner.delay_s = 0.0
    return answer
    governed.wait_idle()


def test_a_request_id_goes_through(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    sent = {"x-request-id": "mine-1"}
    with caplog.at_level(logging.INFO, logger="llmc.access"):
        good = live.client.get("/v1/models", headers=sent)
        bad = live.post("/v1/completions", {"prompt": "x", "temperature": 9}, headers=sent)
        live.client.get("/nowhere", headers=sent)
        theirs = live.post("/v1/messages", {"max_tokens": 1}, headers=sent)
        lines: dict[str, logging.LogRecord] = {}  # written when an answer is gone
        deadline = time.monotonic() + 5
        while "/v1/messages" not in lines and time.monotonic() < deadline:
            found = [record for record in caplog.records if record.name == "llmc.access"]
            lines = {record.fields["path"]: record for record in found}  # type: ignore[attr-defined]
    assert good.headers["x-request-id"] == bad.headers["x-request-id"] == "mine-1"
    assert bad.json()["request_id"] == theirs.json()["request_id"] == "mine-1"
    refused = lines["/v1/completions"]
    assert refused.getMessage().endswith("code=invalid_value param=temperature")
    assert lines["/nowhere"].getMessage().endswith("code=not_found")
    fields = refused.fields  # type: ignore[attr-defined]
    assert (fields["status"], fields["code"], fields["param"]) == (
        400,
        "invalid_value",
        "temperature",
    )


def test_log_lines_in_both_formats() -> None:
    record = logging.LogRecord("llmc.x", logging.WARNING, "f", 1, "said %s", ("a\nb",), None)
    record.fields = {"status": 400, "odd": {1}}
    token = REQUEST_ID.set("mine-2")
    try:
        line = JsonFormatter().format(record)
        text = TextFormatter("%(levelname)s %(message)s").format(record)
    finally:
        REQUEST_ID.reset(token)
    assert "\n" not in line
    read = json.loads(line)
    assert read["message"] == "said a\nb" and read["request_id"] == "mine-2"
    assert (read["status"], read["level"], read["odd"]) == (400, "WARNING", "{1}")
    assert text == "WARNING said a\nb id=mine-2"
    assert "request_id" not in json.loads(JsonFormatter().format(record))


def test_the_admin_key_is_no_clients_key() -> None:
    from llmc.errors import ConfigError

    for wrong in ("", "client"):
        with pytest.raises(ConfigError, match="admin_api_key"):
            ServerSettings(api_keys=("client",), admin_api_key=wrong)
