"""`suffix`: text in the middle, between the marks that the tokenizer's added tokens are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import Live, live_server
from scripted_engine import make_scripted

from llmc.text.infill import InfillMarks, find_marks

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


@pytest.mark.parametrize(
    ("tokens", "order"),
    [
        (FIM, (0, 1, 2)),
        (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), (0, 1, 2)),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), (0, 1, 2)),
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), (0, 1, 2)),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), (0, 1, None)),
        (("<pre>", "<mid>", "<s>"), None),
        (("prefix", "suffix"), None),
        ((), None),
    ],
)
def test_marks_by_their_names(
    tokens: tuple[str, ...], order: tuple[int | None, ...] | None
) -> None:
    added = {text: 100 + i for i, text in enumerate(tokens)}
    found = find_marks({"<|x|>": 1, **added})
    if order is None:
        assert found is None
        return
    prefix, suffix, middle = (None if i is None else 100 + i for i in order)
    assert prefix is not None and suffix is not None
    ends = frozenset(added.values())
    assert found == InfillMarks(prefix=prefix, suffix=suffix, middle=middle, ends=ends)


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    scripted = make_scripted(special_tokens=FIM)
    scripted.runner.scripts = {
        "<|fim_prefix|>count <|fim_suffix|> three<|fim_middle|>": "two<|fim_pad|>four",
        "count": "one",
    }
    with live_server(over=scripted) as live:
        yield live


def test_the_answer_stands_between_the_marks(live: Live) -> None:
    answer = live.complete(prompt=["count ", "count"], suffix=" three").json()
    first, second = answer["choices"]
    assert first["text"] == "two" and first["finish_reason"] == "stop"  # a mark ends it
    assert second["text"] == "one"
    events = live.events("/v1/completions", {"prompt": "count ", "suffix": " three"})
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == "two"
    body = {"prompt": "count ", "suffix": " three", "stream": False}
    assert live.post("/api/generate", body).json()["response"] == "two"
    assert "insert" in live.post("/api/show", {"model": "scripted"}).json()["capabilities"]


def test_it_begins_as_the_tokenizer_begins_texts(live: Live) -> None:
    tokenizer = live.scripted.tokenizer
    fields = {"suffix": " three", "prompt": "count ", "return_token_ids": True}
    for special in (True, False):
        answer = live.complete(**fields, add_special_tokens=special).json()
        ids = answer["choices"][0]["prompt_token_ids"]
        want = "<|fim_prefix|>count <|fim_suffix|> three<|fim_middle|>"
        assert tokenizer.decode(ids, skip_special_tokens=False).endswith(want)
        assert (ids[0] == tokenizer.bos_token_id) == (special and bool(tokenizer.encode("")))


def test_what_is_refused(live: Live) -> None:
    for fields, param in (
        ({"prompt": [1, 2]}, "suffix"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
    ):
        response = live.complete(**{"suffix": "x", **fields})  # type: ignore[arg-type]
        assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_model_without_marks_says_so() -> None:
    with live_server() as live:
        for path, body in (
            ("/v1/completions", {"prompt": "count", "suffix": "x"}),
            ("/api/generate", {"prompt": "count", "suffix": "x"}),
        ):
            response = live.post(path, body)
            assert response.status_code == 400 and "fim_prefix" in response.text
        assert live.complete(suffix="", max_tokens=3).status_code == 200
