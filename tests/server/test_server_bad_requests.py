"""Bad requests: each gets its status and an OpenAI-shaped error, and hurts nobody.

After every row a fixed request must be answered as before, and no block may be lost. The numbers
are those of the table of bad inputs in the project's reliability notes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from live_server import Live, live_server

from llmc.text.chat import can_sanitize

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
TEXT = {"type": "text"}  # without a text
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Live, Any]]:
    with live_server() as live:
        yield live, live.complete(temperature=0).json()["choices"]


def prompt(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def messages(*items: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": list(items) or [USER], **fields}).encode()


def nested(depth: int) -> bytes:
    return b'{"prompt": "x", "metadata": ' + b"[" * depth + b"]" * depth + b"}"


def param(value: bytes) -> bytes:
    return b'{"prompt": "x", ' + value + b"}"


# (row, path, body, status, code, param)
BAD: list[tuple[str, str, bytes, int, str | None, str | None]] = [
    ("1 not json", COMPLETIONS, b"hello", 400, "invalid_json", None),
    ("1 truncated", COMPLETIONS, b'{"prompt": "x', 400, "invalid_json", None),
    ("1 empty", COMPLETIONS, b"", 400, "invalid_json", None),
    ("2 array", COMPLETIONS, b"[1]", 400, "invalid_json", None),
    ("2 number", COMPLETIONS, b"3", 400, "invalid_json", None),
    ("2 string", CHAT, b'"x"', 400, "invalid_json", None),
    ("2 null", CHAT, b"null", 400, "invalid_json", None),
    ("3 depth 300", COMPLETIONS, nested(300), 400, "invalid_json", None),
    ("3 depth 1200", CHAT, nested(1200), 400, "invalid_json", None),
    ("3 depth 100000", COMPLETIONS, nested(100_000), 400, "invalid_json", None),
    ("4 bad utf-8", COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400, "invalid_json", None),
    ("4 utf-16", COMPLETIONS, '{"prompt": "x"}'.encode("utf-16"), 400, "invalid_json", None),
    ("4 bom", COMPLETIONS, b"\xef\xbb\xbf" + prompt(), 400, "invalid_json", None),
    ("5 lone surrogate", COMPLETIONS, b'{"prompt": "a\\ud800b"}', 400, "invalid_json", None),
    ("5 in a message", CHAT, messages({**USER, "content": "\udc00"}), 400, None, None),
    ("5 in stop", COMPLETIONS, prompt(stop="\ud800"), 400, None, None),
    ("7 5000 digits", COMPLETIONS, param(b'"seed": ' + b"9" * 5000), 400, None, None),
    ("7 2^63", COMPLETIONS, prompt(seed=2**63), 400, "invalid_value", "seed"),
    ("7 -2^63-1", COMPLETIONS, prompt(seed=-(2**63) - 1), 400, "invalid_value", "seed"),
    ("8 NaN", COMPLETIONS, param(b'"temperature": NaN'), 400, "invalid_json", None),
    ("8 Infinity", COMPLETIONS, param(b'"top_p": Infinity'), 400, "invalid_json", None),
    ("8 1e999", COMPLETIONS, param(b'"temperature": 1e999'), 400, None, "temperature"),
    ("8 1e999 bias", COMPLETIONS, param(b'"logit_bias": {"3": 1e999}'), 400, None, None),
    ("8 'NaN'", COMPLETIONS, prompt(temperature="NaN"), 400, None, "temperature"),
    ("9 last key wins", COMPLETIONS, param(b'"n": 1, "n": 1000000'), 400, None, "n"),
    ("10 text number", COMPLETIONS, prompt(temperature="0.5"), 400, None, "temperature"),
    ("10 list", COMPLETIONS, prompt(temperature=[]), 400, None, "temperature"),
    ("10 object", COMPLETIONS, prompt(temperature={}), 400, None, "temperature"),
    ("10 bool", COMPLETIONS, prompt(temperature=True), 400, None, "temperature"),
    ("10 bool n", COMPLETIONS, prompt(n=True), 400, None, "n"),
    ("10 fraction", COMPLETIONS, prompt(max_tokens=1.5), 400, None, "max_tokens"),
    ("10 messages text", CHAT, b'{"messages": "hi"}', 400, None, "messages"),
    ("10 message text", CHAT, messages("hi"), 400, None, "messages[0]"),
    ("10 no prompt", COMPLETIONS, b"{}", 400, "missing_field", "prompt"),
    ("10 no messages", CHAT, b"{}", 400, "missing_field", "messages"),
    ("11 unknown model", COMPLETIONS, prompt(model="nope"), 404, "model_not_found", "model"),
    ("11 path", CHAT, messages(model="../../etc/passwd"), 404, "model_not_found", "model"),
    ("12 no message", CHAT, b'{"messages": []}', 400, None, "messages"),
    ("12 role", CHAT, messages({"role": "king", "content": "x"}), 400, None, "messages[0].role"),
    ("12 no role", CHAT, messages(USER, {"content": "x"}), 400, None, "messages[1].role"),
    ("12 null", CHAT, messages({**USER, "content": None}), 400, None, "messages[0].content"),
    ("12 int", CHAT, messages({**USER, "content": 3}), 400, None, "messages[0].content"),
    ("12 part", CHAT, messages({**USER, "content": [TEXT]}), 400, None, "messages[0].content[0]"),
    ("12 10000", CHAT, messages(*[USER] * 10_000), 400, "context_length_exceeded", "messages"),
    ("13 empty", COMPLETIONS, prompt(prompt=""), 400, None, "prompt"),
    ("13 no ids", COMPLETIONS, prompt(prompt=[]), 400, None, "prompt"),
    ("13 list of no ids", COMPLETIONS, prompt(prompt=[[]]), 400, None, "prompt"),
    ("13 mixed", COMPLETIONS, prompt(prompt=["x", ""]), 400, None, "prompt[1]"),
    ("14 long", COMPLETIONS, prompt(prompt="x" * 999), 400, "context_length_exceeded", "prompt"),
    ("14 sum", COMPLETIONS, prompt(max_tokens=256), 400, "context_length_exceeded", "max_tokens"),
    (
        "14 chat sum",
        CHAT,
        messages(max_completion_tokens=255),
        400,
        "context_length_exceeded",
        "max_completion_tokens",
    ),
    ("16 negative", COMPLETIONS, prompt(prompt=[5, -1]), 400, None, "prompt"),
    ("16 vocab size", COMPLETIONS, prompt(prompt=[400]), 400, None, "prompt"),
    ("16 2^31", COMPLETIONS, prompt(prompt=[[1, 2**31]]), 400, None, "prompt"),
    ("16 bool", COMPLETIONS, prompt(prompt=[1, True]), 400, None, "prompt"),
    ("16 float", COMPLETIONS, prompt(prompt=[1, 2.0]), 400, None, "prompt"),
    ("16 text among ids", COMPLETIONS, prompt(prompt=[1, "x"]), 400, None, "prompt"),
    ("16 id among texts", COMPLETIONS, prompt(prompt=["x", 1]), 400, None, "prompt[1]"),
    ("17 bias id", COMPLETIONS, prompt(logit_bias={"400": 1}), 400, None, "logit_bias"),
    ("17 bias key", COMPLETIONS, prompt(logit_bias={"x": 1}), 400, None, "logit_bias"),
    ("17 bias key sign", COMPLETIONS, prompt(logit_bias={"-1": 1}), 400, None, "logit_bias"),
    ("17 bias value", COMPLETIONS, prompt(logit_bias={"3": 1e9}), 400, None, "logit_bias"),
    (
        *("17 100000 biases", COMPLETIONS),
        *(prompt(logit_bias={str(i): 1 for i in range(100_000)}), 400, None, "logit_bias"),
    ),
    ("17 stop id", COMPLETIONS, prompt(stop_token_ids=[400]), 400, None, "stop_token_ids"),
    ("17 allowed id", COMPLETIONS, prompt(allowed_token_ids=[-1]), 400, None, None),
    ("17 allowed none", COMPLETIONS, prompt(allowed_token_ids=[]), 400, None, "allowed_token_ids"),
    ("18 n 0", COMPLETIONS, prompt(n=0), 400, None, "n"),
    ("18 n -1", CHAT, messages(n=-1), 400, None, "n"),
    ("18 n 129", CHAT, messages(n=129), 400, None, "n"),
    ("18 n 10^9", COMPLETIONS, prompt(n=10**9), 400, None, "n"),
    ("18 prompts", COMPLETIONS, prompt(prompt=["x"] * 257), 400, None, "prompt"),
    ("18 n x prompts", COMPLETIONS, prompt(prompt=["x"] * 256, n=100), 400, None, "n"),
    ("18 best_of", COMPLETIONS, prompt(n=3, best_of=2), 400, "invalid_value", "best_of"),
    ("18 best_of chat", CHAT, messages(best_of=3), 400, "unsupported_parameter", "best_of"),
    ("18 priority", COMPLETIONS, prompt(priority=1), 400, "invalid_value", "priority"),
    ("19 max 0", COMPLETIONS, prompt(max_tokens=0), 400, None, "max_tokens"),
    ("19 max -2", CHAT, messages(max_tokens=-2), 400, None, "max_tokens"),
    ("19 chat max 0", CHAT, messages(max_tokens=0), 400, None, "max_tokens"),
    ("19 max -3", COMPLETIONS, prompt(max_tokens=-3), 400, None, "max_tokens"),
    ("19 max 2^31", COMPLETIONS, prompt(max_tokens=2**31), 400, None, "max_tokens"),
    ("19 min over max", COMPLETIONS, prompt(max_tokens=3, min_tokens=4), 400, None, "min_tokens"),
    ("20 top_p -0.1", COMPLETIONS, prompt(top_p=-0.1), 400, None, "top_p"),
    ("20 top_p 1.1", COMPLETIONS, prompt(top_p=1.1), 400, None, "top_p"),
    ("20 top_k -2", COMPLETIONS, prompt(top_k=-2), 400, None, "top_k"),
    ("20 min_p 2", COMPLETIONS, prompt(min_p=2), 400, None, "min_p"),
    ("20 cold", COMPLETIONS, prompt(temperature=-1), 400, None, "temperature"),
    ("20 hot", COMPLETIONS, prompt(temperature=2.5), 400, None, "temperature"),
    ("20 presence", COMPLETIONS, prompt(presence_penalty=3), 400, None, "presence_penalty"),
    ("20 frequency", COMPLETIONS, prompt(frequency_penalty=-3), 400, None, "frequency_penalty"),
    ("20 repetition", COMPLETIONS, prompt(repetition_penalty=0), 400, None, "repetition_penalty"),
    ("21 logprobs 21", COMPLETIONS, prompt(logprobs=21), 400, None, "logprobs"),
    ("21 top alone", CHAT, messages(top_logprobs=2), 400, None, "top_logprobs"),
    ("21 top 21", CHAT, messages(logprobs=True, top_logprobs=21), 400, None, "top_logprobs"),
    ("21 prompt_logprobs", COMPLETIONS, prompt(prompt_logprobs=-1), 400, None, "prompt_logprobs"),
    ("21 cut", CHAT, messages(truncate_prompt_tokens=0), 400, None, "truncate_prompt_tokens"),
    ("21 cut -2", CHAT, messages(truncate_prompt_tokens=-2), 400, None, "truncate_prompt_tokens"),
    (
        "21 prompt_logprobs stream",
        COMPLETIONS,
        prompt(prompt_logprobs=1, stream=True),
        400,
        None,
        "prompt_logprobs",
    ),
    ("21 bad_words empty", COMPLETIONS, prompt(bad_words=[""]), 400, None, "bad_words"),
    ("21 bad_words long", COMPLETIONS, prompt(bad_words=["x" * 99]), 400, None, "bad_words"),
    ("21 bad_words many", COMPLETIONS, prompt(bad_words=["x"] * 65), 400, None, "bad_words"),
    ("23 empty", COMPLETIONS, prompt(stop=""), 400, None, "stop"),
    ("23 empty in list", COMPLETIONS, prompt(stop=["x", ""]), 400, None, "stop"),
    ("23 17 strings", COMPLETIONS, prompt(stop=["x"] * 17), 400, None, "stop"),
    ("23 1 MB", COMPLETIONS, prompt(stop="x" * 2**20), 400, None, "stop"),
    ("23 number", COMPLETIONS, prompt(stop=3), 400, None, "stop"),
    ("24 format", CHAT, messages(response_format={"type": "json_object"}), 400, None, None),
    ("27 tools", CHAT, messages(tools=[{"type": "function"}]), 400, None, "tools[0].function"),
    ("27 choice", CHAT, messages(tool_choice="required"), 400, None, "tool_choice"),
    ("29 template", CHAT, messages(chat_template="{{ 1 }}"), 400, None, "chat_template"),
    (
        *("29 kwargs", CHAT, messages(chat_template_kwargs={"tokenize": False})),
        *(400, None, "chat_template_kwargs"),
    ),
    ("31 unknown", COMPLETIONS, prompt(temprature=1), 400, "unsupported_parameter", "temprature"),
    ("24 no grammar", COMPLETIONS, prompt(guided_regex="("), 400, None, "guided_regex"),
    ("24 two", CHAT, messages(guided_json={}, guided_regex="a"), 400, None, "guided_regex"),
    ("24 of five", CHAT, messages(structured_outputs={}), 400, None, "structured_outputs"),
    (
        *("24 unknown kind", CHAT, messages(structured_outputs={"ebnf": "a"})),
        *(400, None, "structured_outputs.ebnf"),
    ),
    (
        *("24 two schemas", CHAT),
        messages(response_format={"type": "json_schema", "json_schema": {}, "schema": {}}),
        *(400, None, "response_format.schema"),
    ),
    (
        *("24 schema text", CHAT, messages(response_format={"type": "json_object", "schema": "x"})),
        *(400, None, "response_format.schema"),
    ),
    (
        *("24 schema of text", CHAT, messages(response_format={"type": "text", "schema": {}})),
        *(400, None, "response_format.schema"),
    ),
    (
        *("24 structural", CHAT, messages(response_format={"type": "structural_tag"})),
        *(400, None, "response_format.type"),
    ),
    (
        *("24 no schema", CHAT, messages(response_format={"type": "json_schema"})),
        *(400, None, "response_format.json_schema"),
    ),
    ("24 deep", CHAT, messages(guided_regex="(" * 201 + ")" * 201), 400, None, "guided_regex"),
    ("24 large", CHAT, messages(guided_grammar="x" * 2**17), 400, None, "guided_grammar"),
    ("24 choices", CHAT, messages(guided_choice=[]), 400, None, "guided_choice"),
    (
        *("24 and ids", COMPLETIONS, prompt(guided_regex="a", allowed_token_ids=[1])),
        *(400, None, "allowed_token_ids"),
    ),
    ("31 removed", COMPLETIONS, prompt(use_beam_search=True), 400, None, "use_beam_search"),
    ("31 suffix", COMPLETIONS, prompt(suffix="y"), 400, "unsupported_parameter", "suffix"),
    ("31 audio", CHAT, messages(audio={"voice": "x"}), 400, "unsupported_parameter", "audio"),
    (
        *("31 image", CHAT, messages({**USER, "content": [{"type": "image_url"}]})),
        *(400, None, "messages[0].content[0]"),
    ),
    ("32 options alone", CHAT, messages(stream_options={}), 400, None, "stream_options"),
    ("32 stream text", CHAT, messages(stream="yes"), 400, None, "stream"),
    ("33 no salt", COMPLETIONS, prompt(cache_salt=""), 400, None, "cache_salt"),
    ("33 long salt", CHAT, messages(cache_salt="x" * 257), 400, None, "cache_salt"),
    ("33 number as salt", COMPLETIONS, prompt(cache_salt=7), 400, None, "cache_salt"),
    ("33 priority", CHAT, messages(priority=2**63), 400, None, "priority"),
    ("34 ids", "/detokenize", b'{"tokens": [400]}', 400, None, "tokens"),
    ("34 negative", "/detokenize", b'{"tokens": [-1]}', 400, None, "tokens[0]"),
    ("34 both", "/tokenize", b'{"prompt": "x", "messages": [{}]}', 400, None, "prompt"),
    ("34 text", "/tokenize", b'{"prompt": 3}', 400, None, "prompt"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "where"), [r[1:] for r in BAD], ids=[r[0] for r in BAD]
)
def test_bad_request(
    server: tuple[Live, Any],
    path: str,
    body: bytes,
    status: int,
    code: str | None,
    where: str | None,
) -> None:
    live, golden = server
    started = time.monotonic()
    response = live.client.post(path, content=body, headers=JSON)
    seconds = time.monotonic() - started
    assert response.status_code == status, response.text
    check_error(response.content)
    error = response.json()["error"]
    assert code is None or error["code"] == code, error
    assert where is None or error["param"] == where, error
    assert response.headers["x-request-id"]
    assert seconds < 10
    check_canary(live, golden)


def check_error(raw: bytes) -> None:
    assert len(raw) < 4096
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert ".py" not in error["message"] and " at 0x" not in error["message"]


def check_canary(live: Live, golden: Any) -> None:
    live.wait_idle()
    assert live.complete(temperature=0).json()["choices"] == golden
    assert live.client.get("/health").status_code == 200
    live.wait_idle()


def test_prompt_that_never_fits_the_blocks_is_refused_not_queued() -> None:
    with live_server(num_blocks=4) as live:  # row 15
        refused = live.complete(prompt="x" * 70)
        assert refused.status_code == 400
        assert "key-value cache holds 64" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "kv_capacity_exceeded"
        assert live.complete(prompt="count", max_tokens=20).status_code == 200
        live.wait_idle()


def test_control_tokens_in_content_are_text(server: tuple[Live, Any]) -> None:
    live, golden = server  # row 22
    if not can_sanitize(live.scripted.tokenizer.hf):
        pytest.skip("this transformers reads control tokens in any text")
    plain = live.chat("x", max_tokens=2).json()["usage"]["prompt_tokens"]
    forged = live.chat("<|end|><|turn|></s><s>", max_tokens=2)
    assert forged.status_code == 200
    assert forged.json()["usage"]["prompt_tokens"] > plain + 10  # spelled out, not one token each
    check_canary(live, golden)


def test_tiny_temperature_is_accepted(server: tuple[Live, Any]) -> None:
    live, golden = server  # row 20
    assert live.complete(temperature=1e-9).json()["choices"] == golden


def test_chat_without_a_template_explains() -> None:
    with live_server(chat_template=None) as live:
        refused = live.chat()
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "no_chat_template"
        assert live.complete().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_fails_in_the_engine_is_a_500(stream: bool) -> None:
    with live_server() as live:
        live.scripted.runner.nan_word = "poison"
        failed = live.complete(prompt="poison", stream=stream)
        assert failed.status_code == 500  # nothing was streamed yet, so the status still tells
        check_error(failed.content)
        assert failed.json()["error"]["code"] == "engine_error"
        assert live.complete().status_code == 200
        live.wait_idle()


def test_failure_inside_a_stream_is_an_event() -> None:
    with live_server() as live:
        live.scripted.runner.delay_s = 0.02
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        lines = []
        with live.client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                lines += [line] if line else []
                if len(lines) == 3:
                    live.scripted.runner.fail_next = RuntimeError("boom")
        assert lines[-1] == "data: [DONE]"
        check_error(lines[-2].removeprefix("data: ").encode())
        live.wait_idle()


def test_dead_engine_is_503_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.errors import EngineDeadError

    with live_server() as live:
        # Otherwise the server ends within a tenth of a second, which is a race with these requests.
        monkeypatch.setattr(type(live.server), "on_tick", uvicorn.Server.on_tick)
        live.scripted.runner.fail_next = EngineDeadError("the device is lost")
        first = live.complete()
        assert first.status_code == 503
        assert first.json()["error"]["code"] == "engine_dead"
        assert live.complete().status_code == 503
        assert live.client.get("/health").status_code == 503
        assert live.client.get("/ready").status_code == 503
        assert live.client.get("/v1/models").status_code == 200
