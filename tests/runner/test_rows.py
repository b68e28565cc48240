"""RowTables: what a plan's deltas leave in the tables that the step reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmc import sampling_params
from llmc.engine.plan import NewRow, RowMask, RowWork, StepPlan
from llmc.kernels.ban_words import ban_words
from llmc.kernels.process_logits import process_logits
from llmc.kernels.step_inputs import BAD_WORD_TOKENS, ROW_TABLES
from llmc.kernels.write_segments import SEGMENT_WORDS, write_segments
from llmc.runner.delta import encode
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


def fill(rows: RowTables, new: NewRow) -> None:
    apply(rows, StepPlan(step=0, new_rows=[new], work=()))


def append_blocks(rows: RowTables, work: Sequence[RowWork]) -> None:
    apply(rows, StepPlan(step=0, work=work))


def apply(rows: RowTables, plan: StepPlan) -> None:
    delta = encode(rows, plan)
    write_segments.reference(rows.memory, torch.from_numpy(delta.words))


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
    tables = rows.tables
    named = {name.removesuffix("_penalty"): table for name, table in tables.items()}
    given = [named[name] for name in list(process_logits.defaults)[3:]]  # after logits, row, length
    which = torch.tensor([row]), torch.tensor([length], dtype=torch.int32)
    out: torch.Tensor = process_logits.reference(torch.ones(1, VOCAB), *which, *given)
    so_far = tables["history"], tables["prompt_len"]
    ban_words.reference(out, *which, *so_far, tables["bad_words"], BAD_WORD_TOKENS)
    return out[0]


def neutral(rows: RowTables, row: int) -> bool:
    same = torch.equal(processed(rows, row, 3), torch.ones(VOCAB))
    return same and float(rows.tables["temperature"][row]) == 0.0


def test_rows_start_neutral_with_one_more_for_padding() -> None:
    rows = tables()
    assert rows.padding_row == 3
    assert all(neutral(rows, row) for row in range(4))
    assert list(rows.tables) == list(ROW_TABLES)
    for name, table in ROW_TABLES.items():
        assert rows.tables[name].shape[0] == 4 and rows.tables[name].dtype == table.dtype
        assert rows.tables[name].eq(table.neutral).all()


def test_fill_enters_tokens_and_parameters() -> None:
    rows = tables()
    fill(
        rows,
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
            repeat_last_n=2,
            logprobs=4,
        ),
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
        "repeat_last_n": 2,
    }
    assert {name: pytest.approx(float(t[name][1])) for name in want} == want
    assert rows.logprobs == [None, 4, None, None]
    assert neutral(rows, 0) and neutral(rows, 2) and neutral(rows, 3)


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
def test_seeds_take_all_64_bits(seed: int) -> None:
    rows = tables()
    fill(rows, new_row(seed=seed))
    assert int(rows.tables["seed"][0]) == seed


def test_bias_is_added_for_as_long_as_the_request_runs() -> None:
    rows = tables()
    fill(rows, new_row(logit_bias={4: 2.5, 60: -100.0}))
    for length in (3, 18):
        out = processed(rows, 0, length)
        assert out[4] == 3.5 and out[60] == -99.0
        assert out[[0, 5, 69]].tolist() == [1.0, 1.0, 1.0]


def test_min_tokens_bans_the_stop_tokens_until_they_are_out() -> None:
    rows = tables()
    fill(rows, new_row(stop=(2, 30), min_tokens=2, max_tokens=9, logit_bias={5: 1.0}))
    banned = float("-inf")
    for length, first in ((3, banned), (4, banned), (5, 1.0), (9, 1.0)):  # the prompt has 3
        out = processed(rows, 0, length)
        assert out[2] == first and out[30] == first, length
        assert out[5] == 2.0


def test_stop_tokens_are_not_banned_without_min_tokens() -> None:
    rows = tables()
    fill(rows, new_row(stop=(2, 30)))
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
    fill(rows, new_row(0, (1,), stop=stop, min_tokens=1, logit_bias=bias))
    assert sorted(rows.tables["bias_token"][0].tolist()) == [*bias, *stop]


def test_bad_words_are_banned_where_they_would_end() -> None:
    rows = tables()
    words = [[9], [6, 5], [7, 7, 8]]
    fill(rows, new_row(0, [5, 6, 6], prompt=2, bad_words_token_ids=words))
    banned = (processed(rows, 0, 3) == float("-inf")).nonzero()[:, 0].tolist()
    assert banned == [5, 9], "the output so far is 6"
    fill(rows, new_row(0, [5, 6, 6], prompt=2))
    assert torch.equal(processed(rows, 0, 3), torch.ones(VOCAB))


def test_a_bad_word_that_is_admitted_has_a_place_in_the_table() -> None:
    assert sampling_params.BAD_WORD_TOKENS == BAD_WORD_TOKENS


@pytest.mark.parametrize("allowed", [[0], [31, 32], [63, 64, 69], list(range(VOCAB))])
def test_the_mask_allows_exactly_the_given_tokens(allowed: list[int]) -> None:
    """Bits 31 and 63 are the signs of their words."""
    rows = tables()
    fill(rows, new_row(allowed_token_ids=allowed))
    finite = processed(rows, 0, 3).isfinite()
    assert finite.nonzero()[:, 0].tolist() == allowed


def test_a_released_row_counts_its_blocks_from_none() -> None:
    rows = tables()
    fill(rows, new_row(logprobs=2))
    append_blocks(rows, [RowWork(row=0, start=0, num_tokens=3, sample=True, new_blocks=(7,))])
    apply(rows, StepPlan(step=1, released_rows=[0], work=()))
    assert rows.num_blocks[0] == 0 and rows.logprobs[0] is None


def test_penalties_that_look_at_no_token_are_off() -> None:
    rows = tables()
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    fill(rows, new_row(0, [1, 2, 3], temperature=0.0, repeat_last_n=0, **penalties))
    assert neutral(rows, 0)
    fill(rows, new_row(0, [1, 2, 3], temperature=0.0, **penalties))
    assert not neutral(rows, 0)


def test_nothing_of_the_last_request_stays_in_a_row() -> None:
    """A row that is filled again without a release between behaves as a fresh one."""
    rows, fresh = tables(), tables()
    loud = {
        "logit_bias": {4: 1.0},
        "allowed_token_ids": [1],
        "min_tokens": 3,
        "logprobs": 1,
        "temperature": 2.0,
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repeat_last_n": 3,
    }
    fill(rows, new_row(0, [1, 2, 3, 4, 5], stop=(3,), seed=9, **loud))
    append_blocks(rows, [RowWork(row=0, start=0, num_tokens=3, sample=True, new_blocks=(7,))])
    assert not torch.equal(processed(rows, 0, 2), torch.ones(VOCAB))
    quiet = new_row(0, [5, 6], temperature=0.0)
    fill(rows, quiet)
    fill(fresh, quiet)
    assert torch.equal(processed(rows, 0, 2), processed(fresh, 0, 2))
    for name in (name for name, table in ROW_TABLES.items() if len(table.dims) == 1):
        assert torch.equal(rows.tables[name][0], fresh.tables[name][0]), name


def test_blocks_are_appended_row_by_row() -> None:
    rows = tables()
    for row in (0, 2):
        fill(rows, new_row(row))
    first = [
        RowWork(row=0, start=0, num_tokens=5, sample=False, new_blocks=(9, 4)),
        RowWork(row=2, start=0, num_tokens=1, sample=True, new_blocks=(1,)),
    ]
    append_blocks(rows, first)
    append_blocks(rows, [RowWork(row=0, start=5, num_tokens=1, sample=True)])
    append_blocks(rows, [RowWork(row=0, start=8, num_tokens=1, sample=True, new_blocks=(6,))])
    assert rows.num_blocks == [3, 0, 1, 0]
    assert rows.block_table[0, :3].tolist() == [9, 4, 6]
    assert rows.block_table[2, :1].tolist() == [1]


def test_blocks_may_take_the_place_of_others() -> None:
    rows = tables()
    append_blocks(rows, [RowWork(row=1, start=0, num_tokens=9, sample=True, new_blocks=(9, 4, 7))])
    again = RowWork(row=1, start=9, num_tokens=1, sample=True, new_blocks=(5, 6), kept_blocks=1)
    append_blocks(rows, [again])
    assert rows.block_table[1].tolist()[:3] == [9, 5, 6]
    append_blocks(rows, [RowWork(row=1, start=10, num_tokens=1, sample=True, new_blocks=(8,))])
    assert rows.block_table[1].tolist()[:4] == [9, 5, 6, 8]


def test_a_row_mask_stands_until_it_is_replaced_or_lifted() -> None:
    rows = tables()
    fill(rows, new_row(1, allowed_token_ids=[5]))

    def allow(*tokens: int) -> RowMask:
        words = torch.zeros((VOCAB + 31) // 32, dtype=torch.int64)
        for token in tokens:
            words[token // 32] += 1 << (token % 32)
        return RowMask(row=1, words=words.to(torch.int32).numpy().tobytes())

    for mask, want in ((allow(3, 31, 69), [3, 31, 69]), (allow(40), [40])):
        apply(rows, StepPlan(step=1, work=(), row_masks=[mask]))
        assert processed(rows, 1, 3).isfinite().nonzero()[:, 0].tolist() == want
    apply(rows, StepPlan(step=2, work=(), row_masks=[RowMask(row=1, words=None)]))
    assert torch.equal(processed(rows, 1, 3), torch.ones(VOCAB))
    with pytest.raises(ValueError, match="a mask has 1 words, but the vocabulary needs 3"):
        apply(rows, StepPlan(step=3, work=(), row_masks=[RowMask(row=1, words=b"1234")]))


def test_a_mask_that_comes_with_its_row_is_written_once() -> None:
    """Runs of one delta are written in any order, so none may overlap another."""
    rows = tables()
    mask = RowMask(row=0, words=bytes([0b10000]) + bytes(11))
    plan = StepPlan(step=0, new_rows=[new_row(allowed_token_ids=[1])], row_masks=[mask], work=())
    delta = encode(rows, plan)
    count, first = delta.words[:2]
    segments = delta.words[first : first + count * SEGMENT_WORDS].reshape(-1, SEGMENT_WORDS)
    places = [i for target, length, _ in segments for i in range(target, target + length)]
    assert len(places) == len(set(places))
    write_segments.reference(rows.memory, torch.from_numpy(delta.words))
    assert processed(rows, 0, 3).isfinite().nonzero()[:, 0].tolist() == [4]


def test_drafts_go_behind_the_rows_own_tokens() -> None:
    rows = tables()
    fill(rows, new_row(2, [9, 8, 7]))
    work = RowWork(row=2, start=2, num_tokens=4, sample=True, draft_token_ids=(4, 5, 6))
    apply(rows, StepPlan(step=1, work=[work]))
    assert rows.tables["history"][2, :6].tolist() == [9, 8, 7, 4, 5, 6]
    assert encode(rows, StepPlan(step=2, work=[work])).num_sampled == 4


def test_a_chosen_token_takes_the_place_of_the_drawn_one() -> None:
    rows = tables()
    fill(rows, dataclasses.replace(new_row(2, [9, 8, 7]), num_candidates=40))
    rows.tables["history"][2, 3] = 5  # drawn
    work = RowWork(row=2, start=3, num_tokens=1, sample=True, entered_token_ids=(6,))
    plan = StepPlan(step=1, work=[work])
    assert encode(rows, plan).wanted == (40,)
    apply(rows, plan)
    assert rows.tables["history"][2, :4].tolist() == [9, 8, 7, 6]
