"""RowTables: what a plan's deltas leave in the tables that the step reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmc.engine.plan import NewRow, RowWork
from llmc.kernels.process_logits import process_logits
from llmc.passes.append_sampler import PER_ROW, TABLES
from llmc.runner.rows import MAX_BANNED, RowTables
from llmc.sampling_params import MAX_LOGIT_BIAS, SamplingParams

VOCAB = 70  # not a multiple of 32: the last mask word is partly used


def tables(num_rows: int = 3) -> RowTables:
    return RowTables(
        num_rows=num_rows,
        max_model_len=20,
        block_size=4,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )


def new_row(
    row: int = 0,
    tokens: Sequence[int] = (5, 6, 7),
    *,
    prompt: int | None = None,
    stop: Sequence[int] = (),
    seed: int = 1,
    **params: Any,
) -> NewRow:
    return NewRow(
        row=row,
        request_id=f"r{row}",
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        sampling=SamplingParams(**params),
        seed=seed,
        stop_token_ids=stop,
    )


def processed(rows: RowTables, row: int, length: int) -> torch.Tensor:
    """Flat logits after the row's processors, by the op's reference."""
    args = [rows.tables[name] for name in TABLES]
    logits = torch.ones(1, VOCAB)
    out: torch.Tensor = process_logits.reference(
        logits, torch.tensor([row]), torch.tensor([length], dtype=torch.int32), *args
    )
    return out[0]


def neutral(rows: RowTables, row: int) -> bool:
    same = torch.equal(processed(rows, row, 3), torch.ones(VOCAB))
    return same and float(rows.tables["temperature"][row]) == 0.0


def test_rows_start_neutral_with_one_more_for_padding() -> None:
    rows = tables()
    assert rows.padding_row == 3
    assert all(neutral(rows, row) for row in range(4))
    for name in (*TABLES, *PER_ROW):
        assert rows.tables[name].shape[0] == 4


def test_fill_enters_tokens_and_parameters() -> None:
    rows = tables()
    rows.fill(
        new_row(
            1,
            [9, 8, 7, 6],
            prompt=3,
            seed=-5,
            temperature=0.7,
            top_k=-1,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            logprobs=4,
        )
    )
    t = rows.tables
    assert t["history"][1, :4].tolist() == [9, 8, 7, 6]
    assert int(t["prompt_len"][1]) == 3 and int(t["seed"][1]) == -5
    want = {
        "temperature": 0.7,
        "top_k": 0,  # -1 is off as 0 is
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
    }
    assert {name: pytest.approx(float(t[name][1])) for name in want} == want
    assert rows.logprobs == [None, 4, None, None]
    assert neutral(rows, 0) and neutral(rows, 2) and neutral(rows, 3)


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
def test_seeds_take_all_64_bits(seed: int) -> None:
    rows = tables()
    rows.fill(new_row(seed=seed))
    assert int(rows.tables["seed"][0]) == seed


def test_bias_is_added_for_as_long_as_the_request_runs() -> None:
    rows = tables()
    rows.fill(new_row(logit_bias={4: 2.5, 60: -100.0}))
    for length in (3, 18):
        out = processed(rows, 0, length)
        assert out[4] == 3.5 and out[60] == -99.0
        assert out[[0, 5, 69]].tolist() == [1.0, 1.0, 1.0]


def test_min_tokens_bans_the_stop_tokens_until_they_are_out() -> None:
    rows = tables()
    rows.fill(new_row(stop=(2, 30), min_tokens=2, max_tokens=9, logit_bias={5: 1.0}))
    banned = float("-inf")
    for length, first in ((3, banned), (4, banned), (5, 1.0), (9, 1.0)):  # the prompt has 3
        out = processed(rows, 0, length)
        assert out[2] == first and out[30] == first, length
        assert out[5] == 2.0


def test_stop_tokens_are_not_banned_without_min_tokens() -> None:
    rows = tables()
    rows.fill(new_row(stop=(2, 30)))
    assert torch.equal(processed(rows, 0, 3), torch.ones(VOCAB))


def test_the_widest_bias_fits_with_the_bans() -> None:
    rows = RowTables(
        num_rows=1,
        max_model_len=8,
        block_size=4,
        vocab_size=1000,
        device=torch.device("cpu"),
    )
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    stop = tuple(range(900, 900 + MAX_BANNED))
    rows.fill(new_row(0, (1,), stop=stop, min_tokens=1, logit_bias=bias))
    assert sorted(rows.tables["bias_token"][0].tolist()) == [*bias, *stop]


@pytest.mark.parametrize("allowed", [[0], [31, 32], [63, 64, 69], list(range(VOCAB))])
def test_the_mask_allows_exactly_the_given_tokens(allowed: list[int]) -> None:
    """Bits 31 and 63 are the signs of their words."""
    rows = tables()
    rows.fill(new_row(allowed_token_ids=allowed))
    finite = processed(rows, 0, 3).isfinite()
    assert finite.nonzero()[:, 0].tolist() == allowed


def test_release_makes_a_row_neutral_again() -> None:
    rows = tables()
    rows.fill(
        new_row(
            stop=(3,),
            min_tokens=5,
            logit_bias={4: 1.0},
            allowed_token_ids=[1],
            temperature=1.0,
            repetition_penalty=2.0,
            presence_penalty=1.0,
            frequency_penalty=1.0,
            logprobs=2,
        )
    )
    rows.append_blocks([RowWork(row=0, start=0, num_tokens=3, sample=True, new_blocks=(7,))])
    assert not neutral(rows, 0)
    rows.release(0)
    assert neutral(rows, 0)
    assert rows.num_blocks[0] == 0 and rows.logprobs[0] is None


def test_nothing_of_the_last_request_stays_in_a_row() -> None:
    """A row that is filled again without a release between behaves as a fresh one."""
    rows, fresh = tables(), tables()
    loud = {"logit_bias": {4: 1.0}, "allowed_token_ids": [1], "min_tokens": 3, "logprobs": 1}
    rows.fill(new_row(0, [1, 2, 3, 4, 5], stop=(3,), seed=9, temperature=2.0, **loud))
    quiet = new_row(0, [5, 6], temperature=0.0)
    rows.fill(quiet)
    fresh.fill(quiet)
    assert torch.equal(processed(rows, 0, 2), processed(fresh, 0, 2))
    for name in (*PER_ROW, "prompt_len", "has_mask", "repetition_penalty"):
        assert torch.equal(rows.tables[name][0], fresh.tables[name][0]), name


def test_blocks_are_appended_row_by_row() -> None:
    rows = tables()
    for row in (0, 2):
        rows.fill(new_row(row))
    first = [
        RowWork(row=0, start=0, num_tokens=5, sample=False, new_blocks=(9, 4)),
        RowWork(row=2, start=0, num_tokens=1, sample=True, new_blocks=(1,)),
    ]
    rows.append_blocks(first)
    rows.append_blocks([RowWork(row=0, start=5, num_tokens=1, sample=True)])
    rows.append_blocks([RowWork(row=0, start=8, num_tokens=1, sample=True, new_blocks=(6,))])
    assert rows.num_blocks == [3, 0, 1, 0]
    assert rows.block_table[0, :3].tolist() == [9, 4, 6]
    assert rows.block_table[2, :1].tolist() == [1]
