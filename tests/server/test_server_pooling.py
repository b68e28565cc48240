"""Embeddings, scores and classes over HTTP, from a tiny model with a tokenizer."""

from __future__ import annotations

import array
import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from live_server import Live, live_server
from tiny_chat import TinyChat, save_tiny_classifier, start_tiny_chat

from llmc.server import pooling
from llmc.server.errors import ApiError

TEXTS = ["Licensed under the Apache License", "You may obtain a copy", "the weather"]


def start(**options: Any) -> TinyChat:
    return start_tiny_chat(max_model_len=64, kv_cache_memory=1 << 22, max_num_seqs=4, **options)


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    with live_server(over=start(task="embed")) as live:
        yield live


def vectors(live: Live, path: str = "/v1/embeddings", **fields: Any) -> list[list[float]]:
    response = live.post(path, {"input": TEXTS, **fields})
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]]


def near(want: list[list[float]]) -> list[Any]:
    """Steps differ in which texts they hold, and so in how their sums are rounded."""
    return [pytest.approx(vector, abs=1e-6) for vector in want]


def test_openai_embeddings(live: Live) -> None:
    response = live.post("/v1/embeddings", {"input": TEXTS, "model": "tiny-chat", "user": "me"})
    answer = response.json()
    assert answer["object"] == "list" and answer["model"] == "tiny-chat"
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    found = [one["embedding"] for one in answer["data"]]
    assert all(len(v) == 32 and math.hypot(*v) == pytest.approx(1) for v in found)
    tokens = [live.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    count = sum(map(len, tokens))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count
    assert vectors(live, input=tokens) == near(found)
    for one in (TEXTS[1], tokens[1]):
        assert vectors(live, input=one) == near(found[1:2])
    coded = vectors(live, encoding_format="base64")
    decoded = [list(array.array("f", base64.b64decode(v))) for v in coded]  # type: ignore[arg-type]
    assert decoded == near(found)
    short = vectors(live, dimensions=5)
    for whole, cut in zip(found, short, strict=True):
        length = math.hypot(*whole[:5])
        assert cut == pytest.approx([v / length for v in whole[:5]], rel=1e-5)
    raw = live.post("/pooling", {"input": TEXTS}).json()["data"]
    assert raw[0]["object"] == "pooling"
    length = math.hypot(*raw[0]["data"])
    assert [v / length for v in raw[0]["data"]] == pytest.approx(found[0], rel=1e-5)


def test_scores_and_ranks_are_cosines(live: Live) -> None:
    a, b, c = vectors(live)
    want = [sum(x * y for x, y in zip(a, other, strict=True)) for other in (b, c)]
    for path in ("/score", "/v1/score"):
        answer = live.post(path, {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(want, abs=1e-5)
    order = sorted((0, 1), key=lambda i: -want[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body: dict[str, Any] = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}]}
        results = live.post(path, body).json()["results"]
        assert [one["index"] for one in results] == order
        assert results[0]["document"] == {"text": TEXTS[1 + order[0]]}
        assert results[0]["relevance_score"] == pytest.approx(max(want), abs=1e-5)
        (one,) = live.post(path, {**body, "top_n": 1, "return_documents": False}).json()["results"]
        assert "document" not in one


def test_ollama(live: Live) -> None:
    found = vectors(live)
    answer = live.post("/api/embed", {"model": "tiny-chat:latest", "input": TEXTS}).json()
    assert answer["embeddings"] == near(found) and answer["prompt_eval_count"] > 3
    assert live.post("/api/embed", {}).json()["embeddings"] == []
    old = live.post("/api/embeddings", {"prompt": TEXTS[2]}).json()
    assert [old["embedding"]] == near(found[2:])
    shown = live.post("/api/show", {"model": "tiny-chat"}).json()
    assert shown["capabilities"] == ["embedding"]
    assert live.client.get("/v1/models").json()["data"][0]["task"] == "embed"
    long = {"input": "license " * 90}
    assert len(live.post("/api/embed", long).json()["embeddings"]) == 1  # cut, as Ollama does
    refused = live.post("/api/embed", {**long, "truncate": False})
    assert refused.status_code == 400 and "64 tokens" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": [1, 10**6]}, "input"),
        ("/v1/embeddings", {"input": ["a", [1, -1]]}, "input[1]"),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "license " * 90}, "input"),
        ("/v1/embeddings", {"input": "a", "temperature": 0}, "temperature"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/v1/embeddings", {"input": "a", "priority": 1}, "priority"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/rerank", {"query": "a", "documents": ["license " * 90]}, "documents"),
        ("/classify", {"input": "a"}, "model"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
    ],
)
def test_what_is_refused(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    response = live.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    if param == "model":
        assert error["code"] == "wrong_task" and "/v1/embeddings" in error["message"]


def test_a_text_that_is_too_long_is_told_the_field_that_cuts_it(live: Live) -> None:
    message = live.post("/v1/embeddings", {"input": "license " * 90}).json()["error"]["message"]
    assert "let the server cut it with truncate_prompt_tokens" in message


def test_the_sdk_of_openai(live: Live) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model="tiny-chat", input=TEXTS, dimensions=8)
        assert [one.embedding for one in made.data] == vectors(live, dimensions=8)
        with pytest.raises(openai.BadRequestError, match="dimensions must be from 1 to 32"):
            client.embeddings.create(model="tiny-chat", input="a", dimensions=99)


def test_a_model_that_generates_says_how_to_embed() -> None:
    with live_server() as live:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/pooling", {"input": "a"}),
            ("/classify", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
            ("/api/embed", {"input": "a"}),
        ):
            response = live.post(path, body)
            assert response.status_code == 400 and "--task embed" in response.text


def test_a_classifier_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers as tf

    model = save_tiny_classifier(tmp_path, tf.AutoModelForTokenClassification)
    with live_server(over=start_tiny_chat(tmp_path, max_model_len=64)) as live:
        tokens = [live.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
        with torch.no_grad():
            logits = [model(input_ids=torch.tensor([ids])).logits[0] for ids in tokens]
        task = {"task": "token_classify"}
        for fields, want in (
            ({}, logits),
            ({**task, "use_activation": False}, logits),
            (task, [one.softmax(-1) for one in logits]),
        ):
            answer = live.post("/pooling", {"input": TEXTS, **fields}).json()
            for one, wanted in zip(answer["data"], want, strict=True):
                torch.testing.assert_close(torch.tensor(one["data"]), wanted)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
        assert live.post("/api/show", {}).json()["capabilities"] == []
        coded = live.post("/pooling", {"input": TEXTS, **task, "encoding_format": "base64"}).json()
        for one, other in zip(coded["data"], answer["data"], strict=True):
            values = list(array.array("f", base64.b64decode(one["data"])))
            assert values == pytest.approx([v for row in other["data"] for v in row], abs=1e-6)
        for path, body in (
            ("/pooling", {"input": "a", "task": "token_embed"}),
            ("/pooling", {"input": "a", "task": "classify"}),
            ("/classify", {"input": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            error = live.post(path, body).json()["error"]
            assert error["code"] == "wrong_task"
            assert "classification of tokens (/pooling, LLM.encode)" in error["message"]
        refused = live.post("/pooling", {"input": "a", "task": "ner"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "task"
        monkeypatch.setattr(pooling, "MAX_TOKEN_VALUES", 2 * sum(map(len, tokens)) - 1)
        refused = live.post("/pooling", {"input": TEXTS})
        assert refused.status_code == 400 and "Send fewer texts" in refused.text
        assert live.post("/pooling", {"input": TEXTS[:2]}).status_code == 200


def test_late_interaction(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with live_server(over=start(task="token_embed")) as live:
        answer = live.post("/pooling", {"input": TEXTS, "task": "token_embed"}).json()
        rows = [torch.tensor(one["data"]) for one in answer["data"]]
        want = [float((rows[0] @ other.T).amax(1).sum()) for other in rows[1:]]
        answer = live.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(want, rel=1e-4)
        answer = live.post("/score", {"text_1": TEXTS[1:], "text_2": TEXTS[0]}).json()
        back = [float((other @ rows[0].T).amax(1).sum()) for other in rows[1:]]
        assert [one["score"] for one in answer["data"]] == pytest.approx(back, rel=1e-4)
        ranked = live.post("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()
        found = [one["relevance_score"] for one in ranked["results"]]
        assert found == pytest.approx(sorted(want, reverse=True), rel=1e-4)
        monkeypatch.setattr(pooling, "MAX_TOKEN_VALUES", 100)
        for path_, body, param in (
            ("/score", {"text_1": "a b", "text_2": TEXTS}, "text_2"),
            ("/rerank", {"query": "a b", "documents": TEXTS}, "documents"),
        ):
            error = live.post(path_, body).json()["error"]
            assert "Send fewer texts" in error["message"] and error["param"] == param


def test_a_classifier(tmp_path: Path) -> None:
    import torch
    import transformers as tf

    model = save_tiny_classifier(tmp_path, tf.AutoModelForSequenceClassification)
    assert "id2label" in json.loads((tmp_path / "config.json").read_text())
    with live_server(over=start_tiny_chat(tmp_path, max_model_len=64)) as live:
        tokens = live.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
        (found,) = live.post("/classify", {"input": TEXTS[0]}).json()["data"]
        with torch.no_grad():
            want = model(input_ids=torch.tensor([tokens])).logits[0].softmax(-1)
        assert found["probs"] == pytest.approx(want.tolist(), rel=1e-4)
        assert found["label"] == ("bad", "good")[int(want.argmax())] and found["num_classes"] == 2
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            error = live.post(path, body).json()["error"]
            assert error["code"] == "wrong_task" and "/classify" in error["message"]


def test_a_call_that_was_aborted_has_no_vectors() -> None:
    aborted = mock.Mock(completions=[mock.Mock(finish_reason="abort")])
    call = pooling.PooledCall((), lambda stream: {"data": [[]]})
    with pytest.raises(ApiError, match="operator aborted") as caught:
        call.body(mock.Mock(requests=[aborted]))
    assert (caught.value.status, caught.value.code) == (500, "call_aborted")
