"""append_sampler: the graph ends with the drawn tokens."""

from __future__ import annotations

import pytest
import torch
from sampler_graphs import ROWS, VOCAB, X, graph, inputs
from tiny_graphs import Values, apply, roles, run, step

from llmc.kernels.step_inputs import BAD_WORD_TOKENS, ROW_TABLES
from llmc.passes.append_sampler import append_sampler
from llmc.passes.inputs import StepInput
from llmc.pooling import DRAFTED


def test_appends_two_ops_and_keeps_the_logits() -> None:
    sampled, (report,) = apply(graph(), append_sampler())
    assert report.added["llmc.process_logits.default"] == 1
    assert report.added["llmc.ban_words.default"] == 1
    assert report.added["llmc.sample.default"] == 1
    assert not report.removed
    token, logits = run(sampled, Values.of(**inputs()))
    assert torch.equal(logits, X.tensor * 2)
    assert token.tolist() == logits.argmax(-1).tolist()


def test_names_the_inputs_that_the_runner_has_tables_for() -> None:
    sampled, _ = apply(graph(), append_sampler())
    names = {role.name for role in roles(sampled, StepInput)}
    others = {"adapter", "position_offset"}  # for the layers, and for what prepares a step
    assert names == {"x", "row", "length", *ROW_TABLES} - others


def test_each_logits_row_takes_the_parameters_of_its_own_table_row() -> None:
    """Row 2 of the tables forbids the best token of logits row 0; row 0 forbids nothing."""
    best = int(X.tensor[0].argmax())
    bias_token = torch.full((ROWS, 2), -1, dtype=torch.int32)
    bias_value = torch.zeros(ROWS, 2)
    bias_until = torch.zeros(ROWS, 2, dtype=torch.int32)
    bias_token[2, 0], bias_value[2, 0], bias_until[2, 0] = best, -100.0, 2**31 - 1
    sampled, _ = apply(graph(), append_sampler())
    changed = inputs(bias_token=bias_token, bias_value=bias_value, bias_until=bias_until)
    token, _ = run(sampled, Values.of(**changed))
    assert token.tolist() == [int(X.tensor[0].topk(2).indices[1]), int(X.tensor[1].argmax())]


def test_a_word_that_the_output_has_begun_is_not_finished() -> None:
    """Row 2 has said 7 and must not say 7 and its best token; row 0 has not said it."""
    best = int(X.tensor[0].argmax())
    bad_words = torch.full((ROWS, 2 * BAD_WORD_TOKENS), -1, dtype=torch.int32)
    bad_words[:, BAD_WORD_TOKENS - 2] = 7
    bad_words[:, BAD_WORD_TOKENS - 1] = torch.tensor([int(X.tensor[1].argmax()), 0, best])
    history = torch.tensor([[3, 4], [0, 0], [7, 0]], dtype=torch.int32)
    sampled, _ = apply(graph(), append_sampler())
    token, _ = run(sampled, Values.of(**inputs(bad_words=bad_words, history=history)))
    assert token.tolist() == [int(X.tensor[0].topk(2).indices[1]), int(X.tensor[1].argmax())]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_draw_depends_on_the_seed_of_the_row(seed: int) -> None:
    """Flat logits: the seeds alone decide, and equal seeds at equal lengths agree."""
    flat = step(torch.zeros(2, VOCAB))
    changed = inputs(temperature=torch.ones(ROWS), seed=torch.full((ROWS,), seed))
    changed |= {"x": flat, "length": step(torch.tensor([5, 5], dtype=torch.int32))}
    sampled, _ = apply(graph(), append_sampler())
    token, _ = run(sampled, Values.of(**changed))
    assert token[0] == token[1]
    later = changed | {"length": step(torch.tensor([5, 6], dtype=torch.int32))}
    after, _ = run(sampled, Values.of(**later))
    assert after[0] == token[0] and after[1] != token[1]


def test_a_draft_heads_tokens_are_marked_and_drawn_for_the_place_behind() -> None:
    """Its rows are a token behind the model's, whose random numbers it shares."""
    draws = {"temperature": torch.ones(ROWS), "seed": torch.arange(ROWS)}
    lengths = inputs(**draws)["length"].tensor
    head, _ = apply(graph(), append_sampler(is_head=True))
    plain, _ = apply(graph(), append_sampler())
    token, _ = run(head, Values.of(**inputs(**draws)))
    later = inputs(**draws) | {"length": step(lengths + 1)}
    want, _ = run(plain, Values.of(**later))
    assert token.tolist() == [DRAFTED + t for t in want.tolist()]


def test_a_draft_head_marks_no_token_where_there_is_none() -> None:
    head, _ = apply(graph(), append_sampler(is_head=True))
    nan = inputs() | {"x": step(torch.full_like(X.tensor, torch.nan))}
    token, _ = run(head, Values.of(**nan))
    assert token.tolist() == [-1] * len(token)
