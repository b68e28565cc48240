"""What each endpoint answers to a good request, streamed and not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import Live, live_server
from scripted_engine import REPLY, SCRIPTS, make_scripted

from llmc.server.app import ROUTES
from llmc.server.openapi import BATCH_PATHS, EMBEDDING_PATHS, SCORING_PATHS
from llmc.server.settings import ServerSettings

COUNT = SCRIPTS["count"]
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "count"}]


def test_completion(live: Live) -> None:
    answer = live.complete().json()
    [choice] = answer["choices"]
    assert (answer["object"], answer["model"]) == ("text_completion", "scripted")
    assert answer["id"].startswith("cmpl-")
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (COUNT, "stop", 0)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == len(live.scripted.tokenizer.encode("count"))


def test_completion_defaults_to_16_tokens(live: Live) -> None:
    answer = live.post("/v1/completions", {"prompt": "x"}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_every_form_of_prompt(live: Live) -> None:
    ids = live.scripted.tokenizer.encode("count")
    for prompt in ("count", ["count"], ids, [ids]):
        assert live.complete(prompt=prompt).json()["choices"][0]["text"] == COUNT


def test_many_prompts_number_their_choices_through(live: Live) -> None:
    answer = live.complete(prompt=["x", "count"], n=2, max_tokens=100).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == [REPLY, REPLY, COUNT, COUNT]
    events = live.events("/v1/completions", {"prompt": ["x", "count"], "n": 2, "max_tokens": 100})
    texts = ["", "", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [REPLY, REPLY, COUNT, COUNT]


def test_special_tokens_are_left_out_when_asked(live: Live) -> None:
    bare = []
    tokenizer = live.scripted.tokenizer
    encode = tokenizer.encode

    def recording(text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not add_special_tokens:
            bare.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "encode", recording)
        assert live.complete(add_special_tokens=False).json()["choices"][0]["text"] == COUNT
        assert live.complete(prompt=["count", "count"], add_special_tokens=False).status_code == 200
        assert live.complete(prompt=[5, 6], add_special_tokens=False).status_code == 200
        assert live.complete().status_code == 200
    assert bare == ["count"] * 3


def test_echo(live: Live) -> None:
    assert live.complete(echo=True).json()["choices"][0]["text"] == "count" + COUNT
    events = live.events("/v1/completions", {"prompt": "count", "echo": True, "max_tokens": 100})
    assert "".join(e["choices"][0]["text"] for e in events) == "count" + COUNT


def test_an_echo_without_tokens_scores_the_prompt(live: Live) -> None:
    ask = {"prompt": ["count", [5, 6, 7]], "echo": True, "n": 2, "max_tokens": 0}
    bare = live.complete(**ask).json()
    assert [c["text"][:5] for c in bare["choices"][:2]] == ["count"] * 2
    assert all(c["logprobs"] is None for c in bare["choices"])
    scored = {**ask, "logprobs": 1, "ignore_eos": True}
    answer = live.complete(**scored).json()
    longer = live.complete(**{**scored, "max_tokens": 1}).json()
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    for one, more in zip(answer["choices"], longer["choices"], strict=True):
        assert (one["finish_reason"], more["text"].startswith(one["text"])) == ("length", True)
        for name, values in one["logprobs"].items():
            assert values == more["logprobs"][name][:-1], name
        assert one["logprobs"]["token_logprobs"][0] is None
    options = {"stream_options": {"include_usage": True}}
    *events, last = live.events("/v1/completions", {**scored, **options})
    streamed = sorted((e["choices"][0] for e in events), key=lambda choice: choice["index"])
    assert streamed == answer["choices"] and last["usage"]["completion_tokens"] == 0


def test_an_echo_without_tokens_may_fill_the_context(live: Live) -> None:
    most = live.scripted.info.max_model_len
    ask = {"echo": True, "max_tokens": 0, "logprobs": 0}
    whole = live.complete(prompt=[5] * most, **ask).json()
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == most
    error = live.complete(prompt=[5] * (most + 1), **ask).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_completion_logprobs(live: Live) -> None:
    answer = live.complete(max_tokens=3, logprobs=2).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 3 and len(logprobs["token_logprobs"]) == 3
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"] == [0, 3, 7]


def test_chat(live: Live) -> None:
    answer = live.chat().json()
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert choice["message"] == {"role": "assistant", "content": COUNT, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_chat_may_fill_the_context(live: Live) -> None:
    for fields in ({}, {"max_tokens": -1}, {"max_completion_tokens": -1, "max_tokens": 1}):
        usage = live.chat("x", ignore_eos=True, **fields).json()["usage"]
        assert usage["total_tokens"] == live.scripted.info.max_model_len
    usage = live.complete(prompt="x", ignore_eos=True, max_tokens=-1).json()["usage"]
    assert usage["total_tokens"] == live.scripted.info.max_model_len


def test_chat_logprobs_with_bytes(live: Live) -> None:
    answer = live.chat("emoji", logprobs=True, top_logprobs=2, max_tokens=4).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "\U0001f642"
    assert content[0]["token"] == "bytes:\\xf0"
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4


def test_logprobs_name_tokens_by_id_on_request(live: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "logprobs": 1, "return_token_ids": True}

    def answered(as_ids: bool, body: dict[str, Any]) -> dict[str, Any]:
        answer = live.complete(**body, return_tokens_as_token_ids=as_ids).json()
        return dict(answer["choices"][0])

    plain, choice = (answered(as_ids, fields) for as_ids in (False, True))
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == named
    assert [next(iter(top)) for top in logprobs["top_logprobs"]] == named
    for name in ("token_logprobs", "text_offset"):
        assert logprobs[name] == plain["logprobs"][name]

    chat = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3, "return_token_ids": True}
    asked = {"messages": MESSAGES, **chat, "return_tokens_as_token_ids": True}
    (one,) = live.post(CHAT, asked).json()["choices"]
    content = [entry for e in live.events(CHAT, asked) for entry in _content(e)]
    assert content == one["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in one["token_ids"]]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in content)
    raw = bytes(b for entry in content for b in entry["bytes"])
    assert one["message"]["content"] == raw.decode(), "bytes are those of the text"


def _content(event: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = event["choices"][0]["logprobs"]
    return [] if logprobs is None else list(logprobs["content"])


def test_documents_of_a_chat() -> None:
    template = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    with live_server(over=make_scripted(chat_template=template)) as live:
        body = {"messages": [{"role": "user", "content": "unt"}]}
        documents = {"documents": [{"title": "A", "text": "co"}]}
        tokens = live.post("/tokenize", {**body, **documents}).json()["tokens"]
        assert live.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "count"
        answer = live.post(CHAT, {**body, **documents}).json()
        assert answer["choices"][0]["message"]["content"] == COUNT
        error = live.post(CHAT, {**body, "documents": [{"text": 1}]}).json()["error"]
        assert error["param"] == "documents[0].text"
        fields = live.client.get("/openapi.json").json()["components"]["schemas"]["ChatBody"]
        assert fields["properties"]["documents"]["anyOf"][0]["maxItems"] == 1024


def test_documents_need_a_template_that_shows_them(live: Live) -> None:
    assert live.chat(documents=[], max_tokens=1).status_code == 200
    error = live.chat(documents=[{"text": "x"}]).json()["error"]
    assert (error["param"], error["code"]) == ("documents", "unsupported_parameter")


def test_text_parts_and_kwargs(live: Live) -> None:
    parts = [{"type": "text", "text": "co"}, {"type": "text", "text": "unt"}]
    answer = live.chat(parts, chat_template_kwargs={"enable_thinking": False}).json()
    assert answer["choices"][0]["message"]["content"] == REPLY  # "co\nunt" is another word


def test_return_token_ids(live: Live) -> None:
    answer = live.chat(return_token_ids=True).json()
    ids = answer["choices"][0]["token_ids"]
    assert live.scripted.tokenizer.decode(ids) == COUNT
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_chat_stream_contract(live: Live) -> None:
    events = live.events(CHAT, {"messages": MESSAGES})
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    first, *rest = [e["choices"][0] for e in events]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in rest)
    assert "".join(choice["delta"].get("content", "") for choice in rest) == COUNT
    assert [c["finish_reason"] for c in rest if c["finish_reason"]] == ["stop"]
    assert rest[-1]["finish_reason"] == "stop"
    assert all("usage" not in event for event in events)


def test_stream_usage_is_the_last_chunk(live: Live) -> None:
    events = live.events(CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == live.chat().json()["usage"]
    assert all("usage" not in event for event in events[:-1])


def test_stream_of_several_choices(live: Live) -> None:
    events = live.events(CHAT, {"messages": MESSAGES, "n": 3})
    texts, ends = ["", "", ""], []
    for event in events:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == [COUNT] * 3 and sorted(ends) == [0, 1, 2]


def test_stream_never_splits_a_character(live: Live) -> None:
    events = live.events(CHAT, {"messages": [{"role": "user", "content": "emoji"}]})
    texts = [e["choices"][0]["delta"].get("content", "") for e in events]
    assert "".join(texts) == SCRIPTS["emoji"]
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(live: Live, stream: bool) -> None:
    body = {"prompt": "count", "max_tokens": 100, "stop": ["e fo", "never"]}
    if stream:
        choices = [e["choices"][0] for e in live.events("/v1/completions", body)]
        text = "".join(choice["text"] for choice in choices)
        last = choices[-1]
    else:
        last = live.post("/v1/completions", body).json()["choices"][0]
        text = last["text"]
    assert text == "one two thre"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "e fo")


def test_stop_string_may_stay(live: Live) -> None:
    answer = live.complete(stop="two", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["text"] == "one two"


def test_stop_as_text_and_as_list_agree(live: Live) -> None:
    one, many = live.complete(stop="six").json(), live.complete(stop=["six"]).json()
    assert one["choices"] == many["choices"]


def test_control_characters_pass(live: Live) -> None:
    answer = live.complete(prompt="a\x00b\x1b[31m control").json()
    assert answer["choices"][0]["text"] == SCRIPTS["control"]


def test_models(live: Live) -> None:
    [card] = live.client.get("/v1/models").json()["data"]
    assert card["certificate"] == {"status": "not checked"}
    assert card["task"] == "generate"
    assert (card["id"], card["object"], card["max_model_len"]) == ("scripted", "model", 256)
    assert live.client.get("/v1/models/scripted").json() == card
    missing = live.client.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_status_endpoints(live: Live) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert live.client.get(path).status_code == 200
    assert live.client.post("/ping").status_code == 200
    assert live.client.get("/version").json()["version"]


def test_others_are_answered_while_many_tokens_are_detokenized(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, may_end = live.scripted.tokenizer.decode, threading.Event()

    def slow(ids: list[int], **options: Any) -> str:
        assert may_end.wait(30)
        return decode(ids, **options)

    tokens = live.scripted.tokenizer.encode("one two ") * 3000
    monkeypatch.setattr(live.scripted.tokenizer, "decode", slow)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(live.post, "/detokenize", {"tokens": tokens})
        time.sleep(0.2)
        assert live.client.get("/health", timeout=5).status_code == 200
        assert not asked.done()
        may_end.set()
        assert asked.result().json()["prompt"] == "one two " * 3000


def test_tokenize_and_back(live: Live) -> None:
    text = "h\u00e9llo <s> world"
    answer = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == text
    chat = live.post("/tokenize", {"messages": MESSAGES}).json()
    assert chat["count"] == live.chat(max_tokens=1).json()["usage"]["prompt_tokens"]


def test_tokenizer_info(live: Live) -> None:
    info = live.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("</s>", "<s>")
    assert "<|turn|>" in info["chat_template"]


def test_metrics(live: Live) -> None:
    live.complete()
    live.wait_idle()
    response = live.client.get("/metrics")
    values = dict(
        line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")
    )
    label = '{model_name="scripted"}'
    assert float(values[f"llmc:generation_tokens_total{label}"]) > 0
    assert float(values[f"llmc:kv_cache_usage_perc{label}"]) == 0
    assert float(values[f"llmc:time_to_first_token_seconds_count{label}"]) > 0
    assert float(values[f"llmc:e2e_request_latency_seconds_count{label}"]) > 0
    ended = 'llmc:request_success_total{finished_reason="stop",model_name="scripted"}'
    assert float(values[ended]) > 0
    assert response.headers["content-type"].startswith("text/plain")


def test_openapi_describes_every_route_that_answers(live: Live) -> None:
    document = live.client.get("/openapi.json").json()
    paths = document["paths"]
    vectors = EMBEDDING_PATHS | SCORING_PATHS | {"/classify", "/pooling"}
    others = [p for _, p, _ in ROUTES if p.startswith(BATCH_PATHS) or p in vectors]
    assert len(paths) == len({path for _, path, _ in ROUTES} - {*others, "/infill"})
    assert not {"/v1/embeddings", "/v1/files"} & paths.keys(), "of a model that generates text"
    assert set(paths["/v1/responses/{name}"]) == {"get", "delete"}
    failure = paths["/v1/messages"]["post"]["responses"]["default"]["content"]["application/json"]
    assert failure["schema"]["$ref"].endswith("/AnthropicError")
    assert set(paths["/ping"]) == {"get", "post"}
    chat = paths["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
    assert {"messages", "temperature", "stop", "stream"} <= fields.keys()


def test_request_id_is_kept_if_it_is_plain(live: Live) -> None:
    given = live.client.get("/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for odd in ("a b", "x" * 1000, "<script>"):
        made = live.client.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert made != odd and len(made) == 32


def test_null_and_no_op_fields_are_accepted(live: Live) -> None:
    extra: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "temperature": None,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": None,
        "stop": None,
        "seed": None,
        "best_of": 1,
        "suffix": None,
        "separate_reasoning": True,  # SGLang's examples set it
        "typical_p": 1.0,  # as the clients of llama.cpp have it
        "xtc_probability": 0,
        "timings_per_token": True,
        "kv_transfer_params": None,
    }
    assert live.complete(**extra).json()["choices"][0]["text"] == COUNT


def test_a_client_can_name_its_answers(live: Live) -> None:
    assert live.complete(request_id="mine-1").json()["id"] == "cmpl-mine-1"
    assert live.chat(request_id="mine-1").json()["id"] == "chatcmpl-mine-1"
    refused = live.complete(request_id="a b")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "request_id"


def test_served_names_and_model_defaults() -> None:
    settings = ServerSettings(served_model_names=("first", "second"))
    with live_server(settings, generation_defaults={"top_k": 5, "top_p": 7.0}) as live:
        assert [m["id"] for m in live.client.get("/v1/models").json()["data"]] == [
            "first",
            "second",
        ]
        assert live.complete(model="second").json()["model"] == "second"
        assert live.complete().json()["model"] == "first"
        assert live.complete(model="scripted").status_code == 404
        assert live.llm.get_default_sampling_params().top_k == 5  # and top_p=7 is left out
