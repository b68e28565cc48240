"""Encodes a plan as one array of words: everything that the host sends for a step.

    header | work lines, one per request | segments (target, length, source) | samples that need
    log-probabilities | block copies | blocks to swap | state copies | the segments' words

The kernels that a CUDA graph replays read the first three parts. The work lines are always at the
same place, and the header says how many segments there are and where (`write_segments`).

Its size depends on the number of rows in the step and on what is new to them, never on the length
of their contexts. Each part is aligned to 16 bytes, as the kernels were compiled for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from llmc.engine.plan import StepPlan
from llmc.kernels.prepare_step import WORK_WORDS
from llmc.kernels.prompts import MIN_TOKENS, Prompts
from llmc.kernels.write_segments import HEADER_WORDS, SEGMENT_WORDS
from llmc.runner.rows import RowTables, Segments, Words

_ALIGN = 4
LEAST_TOKENS = {"prompts": MIN_TOKENS, "long_prompts": MIN_TOKENS}  # of one that a hint names


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """`words` and the offsets of its parts. The step has T tokens, R requests and S samples;
    `num_sampled` of the samples belong to requests, and the rest pad a bucket."""

    words: Words
    num_segments: int
    num_requests: int
    num_tokens: int
    num_samples: int
    num_sampled: int
    picks: int
    picked: tuple[int, ...]  # samples whose log-probabilities are requested
    wanted: tuple[int, ...]  # how many alternatives are requested for each
    scored: frozenset[int]  # samples that draw nothing, because the next token is known
    copies: int  # sources, then targets
    num_copies: int
    swaps: int  # blocks to swap out, then blocks to swap in
    states: int  # slots: snapshots and their target rows, then rows and their target snapshots
    num_loads: int
    num_saves: int
    prompts: Prompts  # only those that start in this step
    long_prompts: Prompts  # also those that are partly computed

    def hints(self) -> dict[str, Prompts]:
        """The hints by the names of their step inputs."""
        return {"prompts": self.prompts, "long_prompts": self.long_prompts}


def encode(
    rows: RowTables,
    plan: StepPlan,
    padding: int = 0,
    num_tokens: int | None = None,
    num_samples: int = 0,
    least: Mapping[str, int] = LEAST_TOKENS,
) -> Delta:
    """Encode a plan, adding `padding` dummies. Together they compute the tokens missing to
    `num_tokens`, or one each, and sample at those missing to `num_samples`, but at least at one
    each."""
    segments = _row_changes(rows, plan)
    lines, num_real, num_sampled = _work_lines(plan)
    num_dummy = padding if num_tokens is None else num_tokens - num_real
    if num_dummy < padding or (num_dummy and not padding):
        raise ValueError(f"{padding} dummies can't pad {num_real} tokens to {num_tokens}")
    first, sample = num_real, num_sampled
    more = max(0, num_samples - num_sampled - padding)
    for i in range(padding):
        count = (i + 1) * num_dummy // padding - i * num_dummy // padding
        samples = 1 + min(more, count - 1)
        lines += (rows.padding_row, 0, count, first, 0, sample, samples, 0)
        first, sample, more = first + count, sample + samples, more - samples + 1
    if more:
        raise ValueError(f"{num_dummy} tokens of dummies can't pad to {num_samples} samples")
    dummies = padding, num_dummy // padding if padding else 1
    picks, wanted, scored = _logprob_picks(rows, plan)
    copies = [copy.source for copy in plan.block_copies]
    copies += [copy.target for copy in plan.block_copies]
    count = len(segments.targets)
    at_segments = HEADER_WORDS + len(lines)
    at_picks = _aligned(at_segments + count * SEGMENT_WORDS)
    at_copies = _aligned(at_picks + len(picks))
    swaps = [copy.source for copy in plan.swap_out] + [copy.target for copy in plan.swap_in]
    at_swaps = _aligned(at_copies + len(copies))
    at_states = _aligned(at_swaps + len(swaps))
    first_snapshot = rows.padding_row + 1
    loads = [(n.snapshot, n.row) for n in plan.new_rows if n.snapshot is not None]
    saves = [(w.row, w.snapshot) for w in plan.work if w.snapshot is not None]
    states = [first_snapshot + snapshot for snapshot, _ in loads] + [row for _, row in loads]
    states += [row for row, _ in saves] + [first_snapshot + snapshot for _, snapshot in saves]
    at_payload = at_states + len(states)
    words = np.empty(at_payload + segments.num_words, np.int32)
    parts = (at_picks, picks), (at_copies, copies), (at_swaps, swaps), (at_states, states)
    words[:at_segments] = [count, at_segments, 0, 0, *lines]
    for at, part in parts:
        if part:
            words[at : at + len(part)] = part
    if count:
        _write_segments(words, segments, at_segments, at_payload)
    return Delta(
        words=words,
        num_segments=count,
        num_requests=len(plan.work) + padding,
        num_tokens=first,
        num_samples=sample,
        num_sampled=num_sampled,
        picks=at_picks,
        picked=tuple(picks),
        wanted=tuple(wanted),
        scored=frozenset(scored),
        copies=at_copies,
        num_copies=len(plan.block_copies),
        swaps=at_swaps,
        states=at_states,
        num_loads=len(loads),
        num_saves=len(saves),
        prompts=prompts_of(plan, least["prompts"], *dummies),
        long_prompts=prompts_of(plan, least["long_prompts"], *dummies, started=True),
    )


def work_of(words: Tensor, requests: int) -> Tensor:
    """The lines [requests, 8] int32 for `prepare_step` in a delta's words on the device."""
    return words[HEADER_WORDS : HEADER_WORDS + requests * WORK_WORDS].view(-1, WORK_WORDS)


NO_PROMPTS = Prompts()
NO_HINTS = {"prompts": NO_PROMPTS, "long_prompts": NO_PROMPTS}


def prompts_of(
    plan: StepPlan, least: int, padding: int = 0, dummy_tokens: int = 1, *, started: bool = False
) -> Prompts:
    """The prompts of at least `least` tokens that start in this step and, with `started`, also
    those partly computed. Dummies count like requests, so that a dummy run uses the same kernels.
    """
    if dummy_tokens == 1 and not (plan.work and plan.work[-1].num_tokens >= least):
        return NO_PROMPTS
    lengths = [(work.num_tokens, work.start + work.num_tokens) for work in plan.work]
    if dummy_tokens > 1:
        lengths += [(dummy_tokens, dummy_tokens)] * padding
    return Prompts.find(lengths, least, started=started)


def _aligned(words: int) -> int:
    return -(-words // _ALIGN) * _ALIGN


def _row_changes(rows: RowTables, plan: StepPlan) -> Segments:
    segments = Segments()
    for row in plan.released_rows:
        rows.release(row)
    masked = {mask.row for mask in plan.row_masks}
    for new in plan.new_rows:
        rows.fill(new, segments, is_masked=new.row in masked)  # two runs must not overlap
    for mask in plan.row_masks:
        rows.set_mask(mask, segments)
    for work in plan.work:
        rows.append_blocks(work, segments)
        rows.enter_tokens(work, segments)
    return segments


def _work_lines(plan: StepPlan) -> tuple[list[int], int, int]:
    """The words of all requests' lines, and the step's number of tokens and samples."""
    lines: list[int] = []
    token = sample = 0
    for work in plan.work:
        count, scored = work.num_tokens, work.num_scored
        samples = work.num_samples + scored
        end = work.start + count
        lines += (work.row, work.start, count, token, end, sample, samples, scored)
        token += count
        sample += samples
    assert len(lines) == len(plan.work) * WORK_WORDS
    return lines, token, sample


def _logprob_picks(rows: RowTables, plan: StepPlan) -> tuple[list[int], list[int], list[int]]:
    """Samples that need log-probabilities, their numbers of alternatives, and those only scored."""
    picks: list[int] = []
    wanted: list[int] = []
    scored: list[int] = []
    sample = 0
    for work in plan.work:
        if work.is_scored:
            given = range(sample, sample + work.num_scored)
            scored += given
            picks += given
            wanted += [rows.prompt_logprobs[work.row] or 0] * len(given)
            sample += len(given)
        most = rows.logprobs[work.row]
        if most is not None:
            picks += range(sample, sample + work.num_samples)
            wanted += [most] * work.num_samples
        sample += work.num_samples
    return picks, wanted, scored


def _write_segments(words: Words, segments: Segments, at: int, source: int) -> None:
    lines: list[int] = []
    for target, run in zip(segments.targets, segments.runs, strict=True):
        lines += (target, len(run), source)
        words[source : source + len(run)] = run
        source += len(run)
    words[at : at + len(lines)] = lines
