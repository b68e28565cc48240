"""/generate and its siblings: SGLang's own API.

https://docs.sglang.ai/basic_usage/native_api.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live_server
from scripted_engine import make_scripted


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    scripted = make_scripted()
    scripted.runner.scripts = {"count": "one two three", "other": "four"}
    with live_server(over=scripted) as live:
        yield live


def generated(live: Live, **fields: Any) -> Any:
    body = {"text": "count", **fields}
    response = live.post("/generate", {k: v for k, v in body.items() if v is not None})
    assert response.status_code == 200, response.text
    return response.json()


def encoded(live: Live, text: str) -> list[int]:
    tokens: list[int] = live.post("/tokenize", {"prompt": text}).json()["tokens"]
    return tokens


def test_a_text(live: Live) -> None:
    whole = generated(live)
    plain = live.complete(prompt="count", return_token_ids=True).json()
    [choice] = plain["choices"]
    assert (whole["text"], whole["output_ids"]) == (choice["text"], choice["token_ids"])
    meta = whole["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": choice["token_ids"][-1]}
    assert meta["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert meta["completion_tokens"] == len(choice["token_ids"]) and meta["e2e_latency"] > 0
    by_ids = generated(live, text=None, input_ids=encoded(live, "count"))
    assert by_ids["text"] == whole["text"]


def test_how_it_ends(live: Live) -> None:
    cut = generated(live, sampling_params={"max_new_tokens": 1})
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    stopped = generated(live, sampling_params={"stop": "two", "temperature": 0})
    assert stopped["text"] == "one " and stopped["meta_info"]["finish_reason"]["matched"] == "two"
    kept = generated(live, sampling_params={"stop": ["two"], "no_stop_trim": True})
    assert kept["text"] == "one two"
    all_that_fits = generated(live, sampling_params={"max_new_tokens": None, "stop": None})
    assert all_that_fits["text"] == "one two three"


def test_each_event_has_the_text_so_far(live: Live) -> None:
    whole = generated(live)
    live.scripted.runner.delay_s = 0.03  # so that the tokens are not sent together
    events = live.events("/generate", {"text": "count"})
    live.scripted.runner.delay_s = 0.0
    assert len(events) > 1
    for first, second in zip(events, events[1:], strict=False):
        assert second["text"].startswith(first["text"])
        assert first["meta_info"]["finish_reason"] is None
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop" and "index" not in events[-1]
    last: dict[int, str] = {}
    for event in live.events("/generate", {"text": ["count", "other"]}):
        last[event["index"]] = event["text"]
    assert last == {0: "one two three", 1: "four"}


def test_several_prompts_and_completions(live: Live) -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 99}]
    found = generated(live, text=["count", "count"], sampling_params=params)
    assert [len(one["output_ids"]) for one in found][0] == 1
    assert found[1]["text"] == "one two three"
    assert [one["text"] for one in generated(live, sampling_params={"n": 2})] == [
        found[1]["text"]
    ] * 2
    lists = [encoded(live, "other"), encoded(live, "count")]
    found = generated(live, text=None, input_ids=lists)
    assert [one["text"] for one in found] == ["four", "one two three"]


def test_logprobs(live: Live) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    meta = generated(live, **asked, return_text_in_logprobs=True)["meta_info"]
    plain = live.complete(prompt="count", logprobs=2).json()["choices"][0]["logprobs"]
    got = meta["output_token_logprobs"]
    assert [one[0] for one in got] == pytest.approx(plain["token_logprobs"])
    assert [one[2] for one in got] == plain["tokens"]
    assert all(len(one) == 2 for one in meta["output_top_logprobs"])
    assert meta["input_token_logprobs"] == []
    plain_ids = generated(live, return_logprob=True)["meta_info"]["output_token_logprobs"]
    assert [one[:2] for one in plain_ids] == [one[:2] for one in got]
    assert all(one[2] is None for one in plain_ids)
    prompt = encoded(live, "one two three")
    for start in (0, 2):
        fields = {"text": "one two three", "logprob_start_len": start, **asked}
        meta = generated(live, **fields)["meta_info"]
        given = meta["input_token_logprobs"]
        assert [one[1] for one in given] == prompt[start:]
        assert (given[0][0] is None) == (start == 0) and all(one[0] <= 0 for one in given[1:])
        assert len(meta["input_top_logprobs"]) == len(prompt) - start


def test_what_a_client_asks_first(live: Live) -> None:
    info = live.client.get("/get_model_info").json()
    assert info["model_path"] == "scripted" and info["is_generation"]
    assert live.client.get("/model_info").json() == info
    assert live.client.get("/health_generate").status_code == 200


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"text": None}, "text"),
    ({"input_ids": [1]}, "text"),
    ({"text": []}, "text"),
    ({"text": ""}, "text"),
    ({"text": None, "input_ids": []}, "input_ids"),
    ({"text": None, "input_ids": [[1], 2]}, "input_ids"),
    ({"text": None, "input_ids": [10**8]}, "input_ids"),
    ({"text": None, "input_ids": [[]]}, "input_ids"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params"),
    ({"sampling_params": {"max_tokens": 3}}, "sampling_params"),
    ({"sampling_params": {"max_new_tokens": 10**6}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
    ({"sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ({"sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 3}]}, "sampling_params.n"),
    ({"text": ["a"] * 200, "sampling_params": {"n": 100}}, "sampling_params.n"),
    ({"image_data": "x.png"}, "image_data"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
    ({"inputs": "count"}, "inputs"),
    ({"priority": 3}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_what_may_not_be_asked(fields: dict[str, Any], param: str, live: Live) -> None:
    body = {"text": "count", **fields}
    response = live.post("/generate", {k: v for k, v in body.items() if v is not None})
    assert response.status_code == 400, response.text
    found = response.json()["error"]["param"]
    assert found is not None and found.startswith(param), response.text
    live.wait_idle()


def test_an_unknown_adapter_is_a_404(live: Live) -> None:
    response = live.post("/generate", {"text": "count", "lora_path": "none"})
    assert response.status_code == 404, json.dumps(response.json())
