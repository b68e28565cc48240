"""Logits processors of users: found and checked, traced into the graph, in front of every mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_engine
import torch
from sampler_graphs import VOCAB, X, graph, inputs
from tiny_graphs import Values, apply, roles, run, step
from tiny_models import prompts, save_checkpoint
from torch import Tensor

from llmc import LogitsBatch, LogitsProcessor, RowTable
from llmc.errors import ConfigError, InvalidRequestError
from llmc.passes import user_code
from llmc.passes.append_sampler import append_sampler
from llmc.passes.inputs import StepInput
from llmc.passes.logits_processors import (
    GROUP,
    processor_passes,
    processors_digest,
    user_processors,
)
from llmc.runner.row_states import RowStates

EXAMPLE = Path(__file__).parents[2] / "examples" / "logits_processor.py"


class Only(LogitsProcessor):
    """Lets a request draw one token alone, once its output has `after` tokens."""

    arguments = ("only", "after")

    def tables(self, vocab_size: int) -> Mapping[str, RowTable]:
        number = RowTable(dtype=torch.int32, neutral=-1)
        return {"token": number, "after": number}

    def begin(
        self, args: Mapping[str, Any], prompt_token_ids: Sequence[int], vocab_size: int
    ) -> Mapping[str, Any]:
        if not 0 <= args["only"] < vocab_size:
            raise ValueError(f"only must be below {vocab_size}")
        return {"token": args["only"], "after": args.get("after", 0)}

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        token = batch.state["token"][:, None]
        output = (batch.length - batch.prompt_length)[:, None]
        ids = torch.arange(logits.shape[1], device=logits.device)
        others = (token >= 0) & (output >= batch.state["after"][:, None]) & (ids != token)
        return logits.masked_fill_(others, float("-inf"))  # in place is fine


class Doubled(LogitsProcessor):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits * 2


class Repeats(LogitsProcessor):
    """Prefers the newest token, to show that histories can be read."""

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        newest = batch.tokens().long().gather(1, batch.length[:, None].long() - 1)
        return logits.scatter_add(1, newest, torch.full_like(newest, 100, dtype=logits.dtype))


class OnValues(LogitsProcessor):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits if bool(logits.max() > 3) else logits + 1


class OneSize(LogitsProcessor):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits + 1 if logits.shape[0] == 2 else logits


class FewRows(LogitsProcessor):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits + 1 if logits.shape[0] < 8 else logits


class WrongShape(LogitsProcessor):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits[:, :3]


class Broken(LogitsProcessor):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        raise KeyError("oh")


class Constant(LogitsProcessor):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits + torch.ones(VOCAB) * CAUGHT


CAUGHT = torch.ones(VOCAB)


def example() -> type[LogitsProcessor]:
    [found] = user_processors([f"{EXAMPLE}:Boost"])
    return type(found)


def sampled(*processors: LogitsProcessor) -> Any:
    gm, reports = apply(graph(), append_sampler(), *processor_passes(processors))
    return gm, reports


def test_they_change_what_is_drawn_and_not_what_is_reported() -> None:
    gm, reports = sampled(Only(), Doubled())
    assert [report.name for report in reports[1:]] == ["Only", "Doubled"]
    values = inputs()
    values["processor_Only_token"] = step(torch.tensor([5, -1, 7], dtype=torch.int32))
    values["processor_Only_after"] = step(torch.tensor([0, 0, 3], dtype=torch.int32))
    assert set(values) - {"position_offset"} == {role.name for role in roles(gm, StepInput)}
    token, logits = run(gm, Values.of(**values))
    assert torch.equal(logits, X.tensor * 2)
    plain = logits.argmax(-1).tolist()
    assert token.tolist() == [plain[0], 5]  # lines are of table rows 2, too short yet, and 0


def test_a_mask_wins_over_them() -> None:
    """Row 2 must draw token 5 by the processor, and may draw token 3 alone by its mask."""
    gm, _ = sampled(Repeats(), Only())
    mask = torch.zeros(3, 2, dtype=torch.int32)
    mask[2, 0] = 1 << 3
    values = inputs(
        has_mask=torch.tensor([0, 0, 1], dtype=torch.int32),
        mask=mask,
        history=torch.tensor([[1, 9], [0, 0], [4, 0]], dtype=torch.int32),
    )
    values["processor_Only_token"] = step(torch.tensor([-1, -1, 5], dtype=torch.int32))
    values["processor_Only_after"] = step(torch.zeros(3, dtype=torch.int32))
    token, _ = run(gm, Values.of(**values))
    assert token.tolist() == [-1, 9]  # nothing is left for the first; the other repeats its newest


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (OnValues(), "can't become part of the graph"),
        (Broken(), "can't become part of the graph: 'oh'"),
        (Constant(), "can't become part of the graph"),
        (OneSize(), "works only for some numbers of requests"),
        (FewRows(), "works only for some numbers of requests"),
        (WrongShape(), "returns torch.float32"),
    ],
)
def test_what_is_no_function_of_torch_is_refused_at_load(
    processor: LogitsProcessor, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"logits processor {processor.name!r} {said}"):
        sampled(processor)


def test_they_are_found_like_passes() -> None:
    assert [p.name for p in user_processors([Only, Doubled(), f"{EXAMPLE}:Boost"])] == [
        *("Only", "Doubled", "Boost")
    ]
    entry = EntryPoint(name="mine", value=f"{__name__}:Doubled", group=GROUP)
    with (
        mock.patch.object(user_code, "entry_points", return_value=[entry]) as asked,
        mock.patch.object(EntryPoint, "load", return_value=Doubled),
    ):
        assert [p.name for p in user_processors([Only])] == ["Doubled", "Only"]
    asked.assert_called_once_with(group="llmc.logits_processors")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nothing"], "is not a class"),
        ([3], "is not a logits processor"),
        ([LogitsProcessor], "can't be called without options"),
        ([Only, Only()], "two user logits processors are called 'Only'"),
        ([Only, type("Other", (Doubled,), {"arguments": ("after",)})], "are called 'after'"),
    ],
)
def test_what_is_no_processor_is_refused(given: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        user_processors(given)


def test_the_digest_follows_code_and_attributes() -> None:
    one, other = Only(), Only()
    other.limit = 3  # type: ignore[attr-defined]
    digests = [processors_digest([p]) for p in (one, other, Doubled())]
    assert None not in digests and len(set(digests)) == 3
    other.limit = object()  # type: ignore[attr-defined]
    assert processors_digest([other]) is None


def test_values_of_a_request_are_checked_when_it_comes() -> None:
    states = RowStates([Only(), example()()], VOCAB)
    state = states.begin({"only": 7}, [1])
    assert {
        name: torch.frombuffer(bytearray(b), dtype=torch.int32) for name, b in state.items()
    } == {
        "processor_Only_token": torch.tensor([7]),
        "processor_Only_after": torch.tensor([0]),
    }
    for args in ({"only": VOCAB}, {"after": 1}, {"boost_tokens": [VOCAB]}, {"boost_tokens": "x"}):
        with pytest.raises(InvalidRequestError, match="refused the request") as caught:
            states.begin(args, [1])
        assert caught.value.param == "extra_args"


def test_a_table_that_does_not_fit_a_row_is_refused() -> None:
    for table in (RowTable(dtype=torch.bool), RowTable(shape=(3, 0))):
        odd = type("Odd", (Doubled,), {"tables": lambda self, width, table=table: {"t": table}})
        with pytest.raises(ConfigError, match="'Odd' has a table 't'"):
            RowStates([odd()], VOCAB)


def test_in_an_engine_rows_get_their_own_values_and_lose_them(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model")
    running = tiny_engine.start(path, logits_processors=[f"{EXAMPLE}:Boost", Only])
    assert running.started.info.extra_args == ("boost_tokens", "boost", "only", "after")
    some = [list(prompt) for prompt in prompts((9, 12, 5))]
    engine = running.engine(row_states=running.started.engine._features.row_states)
    plain = tiny_engine.generate(engine, some, 6)
    forced = tiny_engine.generate(engine, some, 6, extra_args={"only": 11, "after": 2})
    for mine, free in zip(forced, plain, strict=True):
        assert mine.tokens == [*free.tokens[:2], 11, 11, 11, 11]
    boosted = tiny_engine.generate(engine, some, 4, extra_args={"boost_tokens": [3], "boost": 1e4})
    assert [mine.tokens for mine in boosted] == [[3] * 4] * 3
    again = tiny_engine.generate(engine, some, 6)  # in the same rows
    assert [mine.tokens for mine in again] == [free.tokens for free in plain]
    with pytest.raises(
        InvalidRequestError, match=r"boost_tokens must be 1 to 8 token ids below 96"
    ):
        tiny_engine.generate(engine, some, 4, extra_args={"boost_tokens": [96]})


def test_the_documented_example_is_the_tested_one_and_short() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    definition = source[source.index("class Boost") : source.index("\n\ndef main")]
    assert len(definition.splitlines()) <= 20
    docs = EXAMPLE.parents[1] / "docs" / "python.md"
    assert definition in docs.read_text(encoding="utf-8")
