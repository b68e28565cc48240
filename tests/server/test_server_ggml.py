"""/completion, /infill, /apply-template, /props, /tokenize: llama.cpp's server API.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import Live, live_server
from scripted_engine import make_scripted
from tiny_chat import start_tiny_chat

from llmc.frontend import completion as completion_module
from llmc.server.ggml_protocol import bias_pairs, split_prompts
from llmc.server.settings import ServerSettings

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
FILES = ("<|repo_name|>", "<|file_sep|>")
SECOND = "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>file\n"
INFILL = "<|fim_prefix|>count <|fim_suffix|> three<|fim_middle|>"


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    scripted = make_scripted(special_tokens=(*FIM, *FILES))
    scripted.runner.scripts = {
        SECOND + INFILL: "TWO",
        INFILL + "tw": "o",
        INFILL: "two<|fim_pad|>four",
        "count": "one two three",
        "other": "1\n2",
        "indented": "if x:\n    one\n\t   two\n  three\n    four",
        "empty": "    x\n\n    y",
    }
    with live_server(over=scripted) as live:
        yield live


def completion(live: Live, **fields: Any) -> Any:
    response = live.post("/completion", {"prompt": "count", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Unnamed events, without a [DONE]."""
    response = live.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def encoded(live: Live, text: str) -> list[int]:
    tokens: list[int] = live.post("/tokenize", {"content": text}).json()["tokens"]
    return tokens


def test_a_completion(live: Live) -> None:
    whole = completion(live, n_probs=2, return_tokens=True)
    assert whole["content"] == "one two three"
    plain = live.complete(prompt="count", return_token_ids=True).json()["choices"][0]
    assert whole["tokens"] == plain["token_ids"]
    assert (whole["stop"], whole["stop_type"], whole["stopping_word"]) == (True, "eos", "")
    assert whole["tokens_predicted"] == len(whole["tokens"]) == whole["timings"]["predicted_n"]
    assert whole["tokens_evaluated"] == len(encoded(live, "count"))
    assert not whole["truncated"] and not whole["has_new_line"] and whole["prompt"] == "count"
    for token, one in zip(whole["tokens"], whole["completion_probabilities"], strict=True):
        assert one["id"] == token and len(one["top_logprobs"]) == 2
        assert one["logprob"] <= one["top_logprobs"][0]["logprob"] <= 0
    assert completion(live)["tokens"] == [] and "completion_probabilities" not in completion(live)


def test_a_stream_ends_with_the_whole_object(live: Live) -> None:
    body = {"prompt": "count", "n_probs": 1}
    *parts, last = streamed(live, "/completion", body)
    whole = completion(live, n_probs=1, return_tokens=True)
    assert "".join(one["content"] for one in parts) == whole["content"]
    assert [token for one in parts for token in one["tokens"]] == whole["tokens"]
    said = [one for part in parts for one in part["completion_probabilities"]]
    assert said == whole["completion_probabilities"]
    assert not any(one["stop"] for one in parts)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")
    assert last["tokens_predicted"] == whole["tokens_predicted"] == parts[-1]["tokens_predicted"]


@pytest.mark.parametrize(
    ("fields", "content", "stop_type", "word"),
    [
        ({"stop": ["two"]}, "one ", "word", "two"),
        ({"n_predict": 1}, None, "limit", ""),
        ({"n_predict": 10**6}, "one two three", "eos", ""),
        ({"n_predict": 0}, "", "limit", ""),
        ({"grammar": "", "seed": 2**32 - 1, "top_k": -1, "temperature": -1}, None, "eos", ""),
        ({"dry_multiplier": 0, "typical_p": 1.0, "mirostat_tau": 5, "id_slot": 0}, None, "eos", ""),
    ],
)
def test_how_it_ends(
    fields: dict[str, Any], content: str | None, stop_type: str, word: str, live: Live
) -> None:
    whole = completion(live, **fields)
    assert content is None or whole["content"] == content
    assert (whole["stop_type"], whole["stopping_word"]) == (stop_type, word)


@pytest.mark.parametrize(
    ("prompt", "indent", "content"),
    [
        ("indented", 4, "if x:\n    one\n\t   two\n  "),
        ("indented", 2, None),
        ("empty", 1, "    x\n"),
        ("empty", 0, None),
    ],
)
def test_a_line_with_less_indentation_ends_it(
    prompt: str, indent: int, content: str | None, live: Live
) -> None:
    whole = completion(live, prompt=prompt, n_indent=indent)
    script = live.complete(prompt=prompt, max_tokens=60).json()["choices"][0]["text"]
    assert whole["content"] == (script if content is None else content)
    assert whole["stop_type"] == ("eos" if content is None else "limit")
    body = {"prompt": prompt, "n_indent": indent}
    *parts, last = streamed(live, "/completion", body)
    assert "".join(one["content"] for one in parts) == whole["content"]
    assert last["stop_type"] == whole["stop_type"]
    live.wait_idle()


def test_a_line_break_after_the_time_is_over_ends_it(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))  # seconds; with each text that arrives
    monkeypatch.setattr(completion_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    whole = completion(live, prompt="indented", t_max_predict_ms=8_000)
    assert whole["content"] == "if x:\n    one\n" and whole["stop_type"] == "limit"
    assert completion(live, prompt="indented", t_max_predict_ms=-1)["stop_type"] == "eos"


def test_several_prompts_and_completions(live: Live) -> None:
    tokens = encoded(live, "count")
    found = completion(live, prompt=["other", tokens, {"prompt_string": "count"}], n_cmpl=2)
    assert [one["index"] for one in found] == [*range(6)]
    said = [one["content"] for one in found]
    assert said == ["1\n2"] * 2 + ["one two three"] * 4
    assert found[0]["has_new_line"] and found[2]["prompt"] == "count"
    assert completion(live, prompt=["count"])["content"] == "one two three"  # no list of one
    assert completion(live, prompt=[*encoded(live, "cou"), "nt"])["prompt"] == "count"
    events = streamed(live, "/completion", {"prompt": ["other", "count"]})
    assert {one["index"] for one in events if one["stop"]} == {0, 1}
    text = "".join(one["content"] for one in events if one["index"] == 1)
    assert text == "one two three"


def test_the_fields_of_a_response_can_be_chosen(live: Live) -> None:
    found = completion(live, response_fields=["content", "timings/predicted_n", "none/at_all"])
    assert found == {"content": "one two three", "predicted_n": found["predicted_n"]}


def test_the_settings_are_those_of_the_request(live: Live) -> None:
    asked = {
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.2,
        "repeat_penalty": 1.5,
        "repeat_last_n": 7,
        "presence_penalty": 0.25,
        "n_predict": 5,
        "stop": ["x"],
        "seed": 4,
        "ignore_eos": True,
        "n_probs": 3,
    }
    settings = completion(live, **asked)["generation_settings"]
    assert {name: settings[name] for name in asked} == asked
    chain = {**asked, "samplers": ["min_p", "dry"]}
    settings = completion(live, **chain)["generation_settings"]
    off = {"temperature": 1.0, "top_k": 0, "repeat_last_n": 0}
    assert {name: settings[name] for name in off} == off and settings["min_p"] == 0.2


def test_infill(live: Live) -> None:
    body: dict[str, Any] = {"input_prefix": "count ", "input_suffix": " three", "n_predict": 9}
    whole = live.post("/infill", body).json()
    assert (whole["content"], whole["stop_type"]) == ("two", "eos")
    assert whole["prompt"] == "count "
    assert streamed(live, "/infill", body)[-1]["stop"]
    assert live.post("/infill", {**body, "prompt": "tw"}).json()["content"] == "o"
    files = [{"filename": "a.py", "text": "x = 1", "time": 3}]
    seen = live.post("/infill", {**body, "input_extra": files}).json()
    assert seen["content"] == "TWO"
    # the beginning of other files is cut off, so that the answer has room
    long = [{"filename": "b.py", "text": "y = 2 " * 500}, *files]
    context = live.client.get("/props").json()["default_generation_settings"]["n_ctx"]
    cut = live.post("/infill", {**body, "input_extra": long}).json()
    assert cut["tokens_evaluated"] == context - 9


def test_what_a_client_asks_first(live: Live) -> None:
    props = live.client.get("/props").json()
    assert props["total_slots"] == 4 and not props["modalities"]["vision"]
    assert props["chat_template"] == live.llm.tokenizer.chat_template  # type: ignore[union-attr]
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert live.client.get("/v1/health").json() == {"status": "ok"}
    assert live.client.get("/models").json() == live.client.get("/v1/models").json()
    messages = [{"role": "user", "content": "count"}]
    prompt = live.post("/apply-template", {"messages": messages}).json()["prompt"]
    tokens = live.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert live.post("/detokenize", {"tokens": tokens}).json() == {
        "prompt": prompt,
        "content": prompt,
    }


def test_tokens_with_their_pieces(live: Live) -> None:
    tokens = encoded(live, "count é")
    pieces = live.post("/tokenize", {"content": "count é", "with_pieces": True}).json()["tokens"]
    assert [one["id"] for one in pieces] == tokens
    raw = b"".join(
        one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"])
        for one in pieces
    )
    assert raw.decode() == "count é"


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_bodies_need_no_type_unless_a_page_sends_them(kind: str | None, live: Live) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = json.dumps({"prompt": "count"}).encode()
    assert live.client.post("/completion", content=body, headers=headers).json()["stop"]
    page = {**headers, "origin": str(live.client.base_url)}
    assert live.client.post("/completion", content=body, headers=page).status_code == 415


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/completion", {"mirostat": 2}, "mirostat"),
    ("/completion", {"xtc_probability": 0.5}, "xtc_probability"),
    ("/completion", {"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
    ("/completion", {"n_probs": 21}, "n_probs"),
    ("/completion", {"n_predict": -3}, "n_predict"),
    ("/completion", {"n_indent": -1}, "n_indent"),
    ("/completion", {"t_max_predict_ms": "5"}, "t_max_predict_ms"),
    ("/completion", {"temperature": 3.0}, "temperature"),
    ("/completion", {"repeat_penalty": 0.0}, "repeat_penalty"),
    ("/completion", {"prompt": []}, "prompt"),
    ("/completion", {"prompt": [[]]}, "prompt[0]"),
    ("/completion", {"prompt": [1, None]}, "prompt"),
    ("/completion", {"prompt": [10**7]}, "prompt"),
    ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt"),
    ("/completion", {"prompt": ["count"] * 257}, "prompt"),
    ("/completion", {"prompt": ["count"] * 100, "n_cmpl": 100}, "n_cmpl"),
    ("/completion", {"logit_bias": [["a"]]}, "logit_bias"),
    ("/completion", {"logit_bias": [[1, True]]}, "logit_bias"),
    ("/completion", {"logit_bias": {"99999999": 1.0}}, "logit_bias"),
    ("/completion", {"grammar": "root ="}, "grammar"),
    ("/completion", {"n_predicts": 1}, "n_predicts"),
    ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
    ("/infill", {"input_prefix": "a" * 5000}, "prompt"),
    ("/apply-template", {"messages": [{"role": "nobody", "content": ""}]}, "messages[0].role"),
    ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
    ("/embedding", {"content": "a"}, "model"),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_what_may_not_be_asked(path: str, fields: dict[str, Any], param: str, live: Live) -> None:
    base = {"prompt": "count"} if path == "/completion" else {}
    response = live.post(path, {**base, **fields})
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "").startswith(param), response.text
    live.wait_idle()


def test_prompts_are_split_as_llama_cpp_does() -> None:
    assert split_prompts("a", most=9) == [["a"]]
    assert split_prompts([1, 2], most=9) == [[1, 2]]
    assert split_prompts([1, "a"], most=9) == [[1, "a"]]
    assert split_prompts(["a", "b"], most=9) == [["a"], ["b"]]
    assert split_prompts(["a", [1, "b"]], most=9) == [["a"], [1, "b"]]
    assert split_prompts({"prompt_string": "a", "multimodal_data": []}, most=9) == [["a"]]


def test_biases_in_both_forms() -> None:
    assert bias_pairs({"5": 2, "a b": -1.5}) == [(5, 2.0), ("a b", -1.5)]
    assert bias_pairs([[5, False], ["x", 1e9]]) == [(5, -100.0), ("x", 100.0)]
    assert bias_pairs(None) == []


def test_embeddings_and_keys() -> None:
    over = start_tiny_chat(task="embed", max_model_len=256, kv_cache_memory=1 << 22)
    with live_server(ServerSettings(api_keys=["key"]), over=over) as live:
        headers = {"authorization": "Bearer key"}

        def post(path: str, body: dict[str, Any]) -> Any:
            response = live.post(path, body, headers=headers)
            assert response.status_code == 200, response.text
            return response.json()

        found = post("/embedding", {"content": ["one", "two words"]})
        want = post("/v1/embeddings", {"input": ["one", "two words"]})["data"]
        assert [one["embedding"][0] for one in found] == [one["embedding"] for one in want]
        raw = post("/embedding", {"content": "one", "embd_normalize": -1})
        assert sum(x * x for x in raw[0]["embedding"][0]) != pytest.approx(1.0)
        wrong = {"authorization": "Bearer other"}
        assert live.post("/embedding", {"content": "one"}, headers=wrong).status_code == 401
        assert live.client.get("/props", headers=wrong).status_code == 401
        assert live.client.get("/v1/health").status_code == 200
        refused = live.post("/completion", {"prompt": "one"}, headers=headers)
        assert refused.json()["error"]["code"] == "wrong_task"


def test_a_real_model_is_biased_and_penalized() -> None:
    with live_server(over=start_tiny_chat(max_model_len=256, kv_cache_memory=1 << 22)) as live:
        asked = {"n_predict": 12, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        free = completion(live, **asked)
        text = live.llm.tokenizer.token_text(free["tokens"][0])  # type: ignore[union-attr]
        for bias in ([[free["tokens"][0], False]], [[text, False]], {text: -100}):
            assert completion(live, **asked, logit_bias=bias)["tokens"][0] != free["tokens"][0]
        plain = {"prompt": "count", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        unpenalized = completion(live, **asked, repeat_penalty=2.0, repeat_last_n=0)
        assert unpenalized["tokens"] == free["tokens"]
        for last in (-1, 1, 3):
            fields = {"repeat_penalty": 2.0, "presence_penalty": 1.0, "repeat_last_n": last}
            one = completion(live, **asked, **fields)["tokens"]
            two = live.complete(**plain, **fields, ignore_eos=True).json()["choices"][0]
            assert one == two["token_ids"]
            if last == -1:
                assert len(set(one)) == len(one) and one != free["tokens"]
            else:  # none of the last few tokens again
                assert all(one[i] not in one[max(0, i - last) : i] for i in range(len(one)))
