"""Over HTTP, with a tiny model: grammars of every spelling, bad words, scored prompts."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from live_server import Live, live_server
from tiny_chat import start_tiny_chat

from llmc.errors import InvalidRequestError
from llmc.server.settings import ServerSettings
from llmc.structured.trial import Trial
from llmc.structured_outputs import StructuredOutputsParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["age", "ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
GRAMMAR = 'root ::= "<" [a-c] [a-c]? ">"'
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "json"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {**SCHEMA, "not": {"required": ["no"]}}},
            }
        },
        "json",
    ),
    ({"guided_json": SCHEMA}, "json"),
    ({"guided_json": {**SCHEMA, "propertyNames": {"type": "string"}}}, "json"),
    ({"guided_json": json.dumps(SCHEMA)}, "json"),
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"structured_outputs": {"regex": "[A-F]{3}"}}, "[A-F]{3}"),
    ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
    ({"structured_outputs": {"grammar": GRAMMAR}}, "<[a-c]{1,2}>"),
    (
        {"structured_outputs": {"choice": ["one"], "regex": None, "disable_any_whitespace": False}},
        "one",
    ),
    ({"guided_regex": "[A-F]{3}", "guided_decoding_backend": "xgrammar"}, "[A-F]{3}"),
    ({"guided_choice": ["one", "two"]}, "one|two"),
    ({"guided_grammar": GRAMMAR}, "<[a-c]{1,2}>"),
    ({"guided_json": SCHEMA, "response_format": {"type": "json_schema", "schema": SCHEMA}}, "json"),
    ({"json_schema": SCHEMA}, "json"),
    ({"regex": "[A-F]{3}"}, "[A-F]{3}"),
    ({"ebnf": GRAMMAR}, "<[a-c]{1,2}>"),
    ({"grammar": GRAMMAR, "cache_prompt": True, "repeat_penalty": 1.5}, "<[a-c]{1,2}>"),
    # as guidance sends it, for old and new versions of vLLM
    ({"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR}}, "<[a-c]{1,2}>"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"),
    ({"regex": "(a"}, "regex"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"guided_json": False}, "guided_json"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"not": {}}, "strict": True},
            }
        },
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        "response_format",
    ),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    model = start_tiny_chat(
        max_model_len=512, max_num_seqs=8, async_scheduling=True, scheduling_policy="priority"
    )
    with live_server(over=model) as live:
        assert live.llm.prepare._trial._process is None, "nobody has asked for a grammar"
        yield live
    assert live.llm.prepare._trial._process is None, "the trial's process outlived the server"


def fits(text: str, shape: str) -> bool:
    if shape != "json":
        return re.fullmatch(shape, text) is not None
    value = json.loads(text)
    return (
        set(value) == {"age", "ok"}
        and type(value["age"]) is int
        and 0 <= value["age"] <= 99
        and type(value["ok"]) is bool
    )


@pytest.mark.parametrize(("fields", "shape"), FIELDS, ids=lambda value: str(value)[:40])
def test_an_answer_follows_its_grammar(fields: dict[str, Any], shape: str, live: Live) -> None:
    options = {"temperature": 0.9, "seed": 4, "max_tokens": 80, **fields}
    [choice] = live.complete(**{**options, "prompt": "A pass is"}).json()["choices"]
    assert choice["finish_reason"] == "stop" and fits(choice["text"], shape), choice
    [choice] = live.chat("A pass?", **options).json()["choices"]
    assert choice["finish_reason"] == "stop" and fits(choice["message"]["content"], shape), choice


def test_different_grammars_are_refused(live: Live) -> None:
    both = {"structured_outputs": {"regex": "a"}, "guided_regex": "b"}
    error = live.complete(prompt="x", **both).json()["error"]
    assert error["param"] == "guided_regex" and "can't be combined" in error["message"]


def test_a_stream_of_many_choices(live: Live) -> None:
    body = {"prompt": "A pass is", "max_tokens": 80, "n": 3, "seed": 1, "response_format": FORMAT}
    texts = ["", "", ""]
    for event in live.events(COMPLETIONS, body):
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert all(fits(text, "json") for text in texts), texts
    assert texts == [c["text"] for c in live.post(COMPLETIONS, body).json()["choices"]]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_grammar_is_a_400(fields: dict[str, Any], param: str, live: Live) -> None:
    for path, prompt in (
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        for stream in (False, True):
            response = live.post(path, {**prompt, **fields, "stream": stream})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param and error["message"].startswith(param)
    assert live.complete(max_tokens=3).status_code == 200


def test_slow_grammars_of_one_caller_delay_another_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    may_end = threading.Event()

    def slow(_: Trial, spec: StructuredOutputsParams) -> None:
        tried.append(spec.text)
        assert may_end.wait(30)
        raise InvalidRequestError("it took too long")

    monkeypatch.setattr(Trial, "check", slow)
    settings = ServerSettings(api_keys=("one", "another"))
    with live_server(settings) as live, ThreadPoolExecutor(8) as pool:

        def ask(key: str, regex: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "x", "guided_regex": regex}
            return live.post(COMPLETIONS, body, headers=headers).status_code

        def begin(key: str, regex: str) -> Future[int]:
            waiting = live.llm.num_preparing
            asked = pool.submit(ask, key, regex)
            while live.llm.num_preparing == waiting:
                time.sleep(0.005)
            return asked

        answers = [begin("one", f"slow {i}") for i in range(4)]
        answers.append(begin("another", "mine"))
        may_end.set()
        assert [answer.result() for answer in answers] == [400] * 5
    assert tried == ["slow 0", "slow 1", "mine", "slow 2", "slow 3"]


def test_any_object(live: Live) -> None:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 200, "temperature": 0}
    [choice] = live.complete(**fields, prompt="{}").json()["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)
    assert choice["text"].startswith("{")


def token_bytes(token: str) -> bytes:
    """A token of log probabilities: text, or the bytes of one that is none by itself."""
    if token.startswith("bytes:"):
        return bytes(int(byte, 16) for byte in token[len("bytes:") :].split("\\x")[1:])
    return token.encode()


def test_bad_words_are_not_said(live: Live) -> None:
    fields = {"prompt": "A pass is a function from", "temperature": 0, "max_tokens": 12}
    [choice] = live.complete(**fields, logprobs=1).json()["choices"]
    tokens = choice["logprobs"]["tokens"]
    word = max((token for token in tokens if re.fullmatch("[a-z]+", token)), key=len)
    [choice] = live.complete(**fields, logprobs=1, bad_words=[word]).json()["choices"]
    assert word not in choice["logprobs"]["tokens"] and len(choice["logprobs"]["tokens"]) > 6


def test_an_echo_has_the_log_probabilities_of_the_prompt(live: Live) -> None:
    fields = {"prompt": "A pass is a function", "temperature": 0, "max_tokens": 3, "logprobs": 2}
    [plain] = live.complete(**fields).json()["choices"]
    body = live.complete(**fields, echo=True, return_token_ids=True).json()
    [choice] = body["choices"]
    num_prompt = body["usage"]["prompt_tokens"]
    assert choice["text"] == fields["prompt"] + plain["text"]
    reported = choice["logprobs"]
    assert reported["token_logprobs"][0] is None and reported["top_logprobs"][0] is None
    assert all(value < 0 for value in reported["token_logprobs"][1:])
    assert {len(values) for values in reported.values()} == {num_prompt + 3}
    assert b"".join(map(token_bytes, reported["tokens"])).decode(errors="replace") == choice["text"]
    assert reported["tokens"][num_prompt:] == plain["logprobs"]["tokens"]
    assert reported["token_logprobs"][num_prompt:] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert all(len(top) in (2, 3) for top in reported["top_logprobs"][1:])
    assert (len(choice["token_ids"]), len(choice["prompt_token_ids"])) == (3, num_prompt)
    events = live.events(COMPLETIONS, {**fields, "echo": True})
    streamed = [e["choices"][0]["logprobs"]["tokens"] for e in events]
    assert [word for words in streamed for word in words] == reported["tokens"]


def test_prompt_logprobs(live: Live) -> None:
    body = live.complete(prompt="A pass is", max_tokens=1, prompt_logprobs=2, n=2).json()
    first, second = (choice["prompt_logprobs"] for choice in body["choices"])
    assert first == second and len(first) == body["usage"]["prompt_tokens"]
    assert first[0] is None
    for position in first[1:]:
        assert 2 <= len(position) <= 3
        assert {"logprob", "rank", "decoded_token"} == set(next(iter(position.values())))
    answer = live.chat("A pass?", prompt_logprobs=0, max_tokens=1).json()
    reported = answer["prompt_logprobs"]
    assert len(reported) == answer["usage"]["prompt_tokens"]
    assert reported[0] is None and all(len(position) == 1 for position in reported[1:])
    assert "prompt_logprobs" not in live.chat("A pass?", max_tokens=1).json()


def test_only_the_end_of_a_long_prompt_is_kept(live: Live) -> None:
    tokenizer, fields = live.scripted.tokenizer, {"max_tokens": 1, "return_token_ids": True}
    room = live.scripted.info.max_model_len - 1
    text = "A pass is " * room
    ids = tokenizer.encode(text)
    assert live.complete(prompt=text, **fields).status_code == 400
    for kept in (1, 30, -1):
        for prompt in (text, ids):
            body = live.complete(
                prompt=prompt, truncate_prompt_tokens=kept, echo=True, **fields
            ).json()
            [choice] = body["choices"]
            most = room if kept == -1 else kept
            assert choice["prompt_token_ids"] == ids[-most:]
            assert body["usage"]["prompt_tokens"] == most
            assert choice["text"].startswith(tokenizer.decode(ids[-most:]))
    short = live.complete(prompt="A pass", truncate_prompt_tokens=200, echo=True, **fields).json()
    assert short["choices"][0]["prompt_token_ids"] == tokenizer.encode("A pass")
    body = live.chat(text, truncate_prompt_tokens=-1, **fields).json()
    assert body["usage"]["prompt_tokens"] == room


def test_best_of_and_priority(live: Live) -> None:
    body = live.complete(
        prompt="A pass is", max_tokens=4, n=2, best_of=4, seed=3, logprobs=0, priority=-2
    ).json()
    sums = [sum(c["logprobs"]["token_logprobs"]) for c in body["choices"]]
    assert len(sums) == 2 and sums[0] >= sums[1]
    assert body["usage"]["completion_tokens"] == 16


def test_all_at_once_say_what_each_says_alone(live: Live) -> None:
    common = {"prompt": "A pass is a function", "seed": 8, "max_tokens": 40}
    bodies = [
        {**common, **fields}
        for fields in (
            {"guided_json": SCHEMA, "n": 2},
            {"guided_regex": "[A-F]{3}", "logprobs": 1},
            {"guided_regex": "(a"},
            {"max_tokens": 9, "bad_words": ["graph"]},
            {"max_tokens": 3, "echo": True, "logprobs": 1},
            {"max_tokens": 9, "temperature": 0, "min_tokens": 9},
        )
    ]

    def ask(body: dict[str, Any]) -> Any:
        answer = live.post(COMPLETIONS, body).json()
        return [
            (c["text"], c["finish_reason"], (c["logprobs"] or {}).get("tokens"))
            for c in answer.get("choices", ())
        ]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(len(bodies) * 2) as pool:
        assert list(pool.map(ask, bodies * 2)) == alone * 2
    assert alone[2] == [] and all(answer for i, answer in enumerate(alone) if i != 2)


def test_a_grammar_begins_behind_the_reasoning(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is made to draw the mark of the end at once."""
    tokenizer = live.scripted.tokenizer
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning %}<|im_start|>"
        "{{ m.reasoning }}<|endoftext|>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<|im_start|>{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    [end] = tokenizer.ids_of(["<|endoftext|>"])
    body = {
        "messages": [{"role": "user", "content": "A pass?"}],
        "logit_bias": {str(end): 100.0},
        "response_format": FORMAT,
        "max_tokens": 100,
        "return_token_ids": True,
    }
    [choice] = live.post(CHAT, body).json()["choices"]
    assert choice["token_ids"][0] == end and end not in choice["token_ids"][1:]
    events = live.events(CHAT, body)
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    limited = {**body, "logit_bias": {str(end): -100.0}, "thinking_token_budget": 5}
    for more in ({}, {"response_format": None, "ignore_eos": True, "max_tokens": 20}):
        [cut] = live.post(CHAT, {**limited, **more}).json()["choices"]
        assert cut["token_ids"].index(end) == 5 and cut["message"]["content"]
    for content in (choice["message"]["content"], streamed):
        assert set(json.loads(content)) == {"age", "ok"}
