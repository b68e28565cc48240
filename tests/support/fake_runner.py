"""A runner that checks everything, and the expected result of each request when it runs alone.

It has the state of a real runner: rows, block tables and a memory of blocks. Each slot of that
memory stores a fingerprint of all tokens up to it, so reading detects a block that is stale, shared
by writers or from the wrong prefix. A block that no later token attends to (`layout`) can be reused
as soon as the last step that needs it is done. The sampled token is a pure function of the history
and the seed: whatever was batched, preempted, cached or aborted around a request, it must end
exactly as it does alone. With `has_states` each row has a fingerprint of what it has computed, like
a recurrent state: it must be right before every step, and starts from a snapshot or from nothing.

Steps are computed when they are submitted, and their outcome is returned on request. After a step
has failed, later steps run on broken rows, until all have been read.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from llmc.engine.core import EngineCore
from llmc.engine.grammar import Matcher
from llmc.engine.kv.layout import CacheLayout
from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.engine.options import MAX_SCORED
from llmc.engine.plan import EagerReason, NewRow, RowWork, StepPlan, StepResult, TokenLogprobs
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams

VOCAB = 9
EOS = 0


class InjectedFault(RuntimeError):
    pass


def fingerprint(before: int, token: int) -> int:
    return ((before * 1000003) ^ ((token + 1) * 0x9E3779B1)) & 0xFFFFFFFFFFFF


def history(token_ids: Sequence[int]) -> list[int]:
    prints, last = [], 0
    for token in token_ids:
        last = fingerprint(last, token)
        prints.append(last)
    return prints


def draw(
    last: int,
    seed: int,
    num_output: int,
    min_tokens: int,
    stop: Sequence[int],
    nan: bool,
    allowed: Sequence[int] = range(VOCAB),
) -> int | None:
    """The 'model': the next token from the history's fingerprint; stop tokens banned at first."""
    if nan and last % 29 == 0:
        return None
    first = ((last >> 5) + seed) % VOCAB
    for token in (*range(first, VOCAB), *range(first)):
        if token in allowed and not (num_output < min_tokens and token in stop):
            return token
    return None


def score(last: int, token: int) -> TokenLogprobs:
    """The 'model's' logprobs of a prompt token after the history that ends in `last`."""
    return TokenLogprobs(token_id=token, logprob=-float(last % 101), rank=1 + last % 7)


def likeliest(last: int, count: int) -> TokenLogprobs:
    """The 'model's' likeliest tokens after the history that ends in `last`, without ties."""
    values = {t: -1.0 - last * (t + 3) % 1009 / 100 - t / 1e4 for t in range(VOCAB)}
    top = sorted(values, key=lambda token: -values[token])[:count]
    return TokenLogprobs(
        token_id=top[0],
        logprob=values[top[0]],
        rank=1,
        top_token_ids=top,
        top_logprobs=[values[token] for token in top],
    )


class DigitMatcher:
    """A toy grammar: each token allows only its two successors; the regex gives the length.

    A grammar of text "n!" breaks after n tokens.
    """

    def __init__(self, text: str) -> None:
        self._breaks = text.endswith("!")
        self._left = int(text.removesuffix("!"))
        self._allowed: Sequence[int] = (2, 3, 5)

    @property
    def allowed(self) -> Sequence[int]:
        return (EOS,) if self.is_complete else self._allowed

    def mask(self) -> bytes:
        if self._breaks and self._left <= 0:
            raise ValueError("it broke")
        return sum(1 << token for token in self.allowed).to_bytes(4, "little")

    def accept(self, token: int) -> None:
        assert token in self.allowed, "sampled a masked token"
        self._left -= 1
        self._allowed = ((token + 1) % VOCAB, (token + 2) % VOCAB)

    @property
    def is_complete(self) -> bool:
        return self._left <= 0 and not self._breaks


class DigitGrammars:
    def begin(self, spec: StructuredOutputsParams) -> Future[Matcher]:
        future: Future[Matcher] = Future()
        future.set_result(DigitMatcher(spec.text))
        return future


@dataclass
class Row:
    request_id: str
    prints: list[int]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    stop: Sequence[int]
    blocks: list[int] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)  # blocks still attended to, by index
    num_computed: int | None = None  # None until its first work states what was cached
    tokens: list[int] = field(default_factory=list)
    mask: bytes | None = None
    broken: bool = False  # was in a failed step, or in a later one
    num_candidates: int = 0
    offset: int = 0  # of its positions
    state: int = -1  # after its newest token; -1: at the start

    def keys(self, first: int, end: int) -> list[int]:
        """The memory contents for tokens, which depend on positions: other offsets can't match."""
        prints = self.prints[first:end]
        return [value + (self.offset << 64) for value in prints] if self.offset else prints

    def key(self, position: int) -> int:
        return self.keys(position, position + 1)[0]


class FakeStep:
    def __init__(self, runner: FakeRunner, plan: StepPlan, outcome: StepResult | Exception) -> None:
        self.runner, self.plan, self.outcome = runner, plan, outcome

    def result(self) -> StepResult:
        runner = self.runner
        assert runner.in_flight and runner.in_flight[0] is self, "results are read in order"
        runner.in_flight.pop(0)
        if not runner.in_flight:
            runner.is_broken = False
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeRunner:
    """`poison` maps a request to the position whose computation always raises."""

    knows_all_tokens = True  # from its first plan, or sampled

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_rows: int,
        max_in_flight: int = 1,
        rng: random.Random | None = None,
        layout: CacheLayout | None = None,
        has_states: bool = False,
    ) -> None:
        self.layout = layout or CacheLayout(block_size=block_size, step_tokens=max_tokens)
        self.rng = rng or random.Random(0)
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.max_in_flight = max_in_flight
        self.num_runtime_compiles = 0
        self.eager_steps: Mapping[EagerReason, int] = {}
        self.long_context_from: int | None = None
        self.num_long = 0  # work items of rows with an offset
        self.has_states = has_states
        self.snapshots: dict[int, int] = {}
        self.num_loaded = 0
        self.memory = [-1] * (num_blocks * block_size)
        self.host: dict[int, list[int]] = {}
        self.rows: dict[int, Row] = {}
        self.holders: Counter[int] = Counter()
        self.first_scheduled: list[str] = []
        self.restarts = 0
        self.in_flight: list[FakeStep] = []
        self.poison: Mapping[str, int] = {}
        self.fault_rate = 0.0
        self.nan = False
        self.faults = 0
        self.is_broken = False
        self.num_submitted = 0
        self.num_copies = 0
        self.num_left = 0  # blocks that left their row's window
        self.num_swapped_in = 0
        self.num_computed = 0  # tokens
        self.num_scored = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.fail_at_swap = False  # once
        self.most_blocks = 0  # that rows held at one time

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        return False

    def release_caches(self) -> int:
        return 0

    def start_profile(self) -> None:
        raise RuntimeError("this runner has no profiler")

    def stop_profile(self, folder: str) -> str:
        raise RuntimeError("this runner has no profiler")

    def submit(self, plan: StepPlan) -> FakeStep:
        assert len(self.in_flight) < self.max_in_flight
        assert plan.step == self.num_submitted, "steps are numbered in order"
        self.num_submitted += 1
        self._check_shape(plan)
        outcome: StepResult | Exception
        try:
            outcome = self._execute(plan)
        except InjectedFault as fault:
            outcome, self.is_broken = fault, True
            self.faults += 1
            self._break_rows(plan)
        step = FakeStep(self, plan, outcome)
        self.in_flight.append(step)
        return step

    def _check_shape(self, plan: StepPlan) -> None:
        rows = [work.row for work in plan.work]
        assert rows and len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_rows for row in rows)
        assert 0 < plan.num_tokens <= self.max_tokens
        assert all(work.num_tokens > 0 for work in plan.work)
        assert {new.row for new in plan.new_rows} <= set(rows)
        busy = {work.row for step in self.in_flight for work in step.plan.work}
        assert not busy & set(plan.released_rows), "released a row that a step in flight uses"
        assert not busy & {new.row for new in plan.new_rows}, "reused a row too early"
        drafted = {work.row for work in plan.work if work.draft_token_ids}
        assert not busy & drafted, "drafted after an unknown token"
        behind = [w.row for step in self.in_flight for w in step.plan.work if w.draft_token_ids]
        assert not set(behind) & set(rows), "planned after draft tokens"

    def _execute(self, plan: StepPlan) -> StepResult:
        if self.is_broken:
            self._break_rows(plan)
            scores = [score(0, EOS)] * sum(work.num_scored for work in plan.work)
            return StepResult(
                token_ids=[EOS] * sum(work.num_samples for work in plan.work), scores=scores
            )
        if self.fail_at_swap and plan.swap_out:
            self.fail_at_swap = False
            raise InjectedFault("before the copies")
        fault = self.rng.random() < self.fault_rate
        if fault and self.rng.random() < 0.5:
            raise InjectedFault("at the start")
        for row in plan.released_rows:
            self._drop(row)
        for new in plan.new_rows:
            assert new.row not in self.rows, "filled a row that is taken"
            self._add_row(new)
        for copy in plan.swap_out:
            self.host[copy.target] = self._block(copy.source)
        self.num_swapped_in += len(plan.swap_in)
        for copy in plan.swap_in:
            self._fill_block(copy.target, self.host[copy.source])
        copied = [self._block(copy.source) for copy in plan.block_copies]  # all at once
        for copy, content in zip(plan.block_copies, copied, strict=True):
            self._fill_block(copy.target, content)
        self.num_copies += len(plan.block_copies)
        stop_at = self.rng.randrange(len(plan.work)) if fault else -1
        for mask in plan.row_masks:
            self.rows[mask.row].mask = mask.words
        masked = {mask.row for mask in plan.row_masks}
        tokens: list[int | None] = []
        scores: list[TokenLogprobs] = []
        saved: dict[int, int] = {}
        logprobs: list[TokenLogprobs | None] = []
        for index, work in enumerate(plan.work):
            row = self.rows[work.row]
            poison = self.poison.get(row.request_id, -1)
            if index == stop_at or work.start <= poison < work.start + work.num_tokens:
                raise InjectedFault("midway")
            if row.sampling.structured_outputs is not None and row.sampling.max_tokens != 0:
                assert work.sample == (work.row in masked), "each draw has its mask, or none"
            if work.draft_token_ids:
                self._compute_drafted(row, work, tokens)
            else:
                self._compute(row, work, tokens)
            scores += self._scores(row, work)
            if work.snapshot is not None:
                saved[work.snapshot] = row.state
            logprobs += [None] * (len(tokens) - len(logprobs))
            if work.sample and row.num_candidates:
                logprobs[-1] = likeliest(row.prints[-2], row.num_candidates)
        self.snapshots |= saved  # after the whole step
        self.most_blocks = max(self.most_blocks, sum(n > 0 for n in self.holders.values()))
        assert len(scores) <= MAX_SCORED
        return StepResult(token_ids=tokens, scores=scores, logprobs=logprobs)

    def _scores(self, row: Row, work: RowWork) -> list[TokenLogprobs]:
        assert not work.is_scored or row.sampling.prompt_logprobs is not None
        self.num_scored += work.num_scored
        positions = range(work.start, work.start + work.num_scored)
        return [score(row.prints[p], row.tokens[p + 1]) for p in positions]

    def _break_rows(self, plan: StepPlan) -> None:
        """Drop the blocks of rows that were released or broken."""
        for row in plan.released_rows:
            self._drop(row)
        for new in plan.new_rows:
            self._drop(new.row)
            self._add_row(new)
        for work in plan.work:
            row = self.rows[work.row]
            row.broken = True
            self.holders.subtract(row.held.values())
            row.blocks, row.held = [], {}

    def _drop(self, row: int) -> None:
        if row in self.rows:
            self.holders.subtract(self.rows.pop(row).held.values())

    def _add_row(self, new: NewRow) -> None:
        if new.request_id in self.first_scheduled:
            self.restarts += 1
        else:
            self.first_scheduled.append(new.request_id)
        self.rows[new.row] = Row(
            request_id=new.request_id,
            prints=history(new.token_ids),
            tokens=list(new.token_ids),
            num_prompt=new.num_prompt_tokens,
            sampling=new.sampling,
            seed=new.seed,
            stop=new.stop_token_ids,
            num_candidates=new.num_candidates,
            offset=new.position_offset,
        )
        if new.snapshot is not None:
            self.rows[new.row].state = self.snapshots[new.snapshot]
            self.num_loaded += 1

    def _block(self, block: int) -> list[int]:
        return self.memory[block * self.block_size : (block + 1) * self.block_size]

    def _fill_block(self, block: int, content: list[int]) -> None:
        assert self.holders[block] == 0, "copied into a block that is in use"
        self.memory[block * self.block_size : (block + 1) * self.block_size] = content

    def _compute_drafted(self, row: Row, work: RowWork, tokens: list[int | None]) -> None:
        """Compute the row's own token, then each draft token as if it had been sampled. Entries
        after the first wrong one stay in memory and must not be read."""
        assert work.sample and work.num_tokens == 1 + len(work.draft_token_ids) == work.num_samples
        one = dataclasses.replace(work, num_tokens=1, draft_token_ids=())
        drawn: list[int | None] = []
        self._compute(row, one, drawn, is_drafted=True)
        kept = row.num_computed, row.prints[:]
        is_right = True
        for count, token in enumerate(work.draft_token_ids, start=1):
            is_right = is_right and drawn[-1] == token
            row.prints[-1] = fingerprint(row.prints[-2], token)
            next_one = dataclasses.replace(one, start=work.start + count, new_blocks=())
            self._compute(row, next_one, drawn, is_drafted=True)
            if is_right:
                kept = row.num_computed, row.prints[:]
                self.num_accepted += 1
        row.num_computed, row.prints = kept
        self._leave_unseen(row)
        self.num_drafted += len(work.draft_token_ids)
        tokens += drawn

    def _needed(self, position: int) -> list[int]:
        """For each group the first block that the tokens from `position` on attend to."""
        return [self.layout.first_needed(g, position) for g in range(self.layout.num_groups)]

    def _hold(self, row: Row, work: RowWork) -> None:
        needed = self._needed(work.start)
        for block in work.new_blocks:
            place = len(row.blocks)
            index, group = divmod(place, self.layout.num_groups)
            row.blocks.append(block)
            if index >= needed[group]:
                row.held[place] = block
                self.holders[block] += 1

    def _leave_unseen(self, row: Row) -> None:
        """Release the row's blocks that later tokens don't attend to."""
        groups, needed = self.layout.num_groups, self._needed(row.num_computed or 0)
        for place, block in list(row.held.items()):
            if place // groups < needed[place % groups]:
                self.holders[block] -= 1
                self.num_left += 1
                del row.held[place]

    def _compute(
        self, row: Row, work: RowWork, tokens: list[int | None], *, is_drafted: bool = False
    ) -> None:
        assert not row.broken, "used a row that was in a failed step"
        size, groups = self.block_size, self.layout.num_groups
        self._hold(row, work)
        if row.num_computed is None:
            row.num_computed = work.start
        end = work.start + work.num_tokens
        if work.entered_token_ids:
            self._enter(row, work)
        assert end < row.num_prompt + (row.sampling.max_tokens or end), "unnecessary work"
        assert work.start == row.num_computed, "positions are not contiguous"
        assert end <= len(row.prints) and end * groups <= len(row.blocks) * size
        if self.long_context_from is not None:
            assert row.offset == (self.long_context_from if row.offset else 0)
            assert row.offset or end <= self.long_context_from, "a long sequence treated as short"
            assert not row.offset or len(row.prints) > self.long_context_from
            self.num_long += bool(row.offset)
        if work.sample or self.knows_all_tokens:
            assert work.sample == (end == len(row.prints))
        for position in range(work.start, end):
            first = position // size * groups
            for place in range(first, first + groups):
                block = row.held[place]
                assert self.holders[block] == 1, "wrote to a block that another row holds"
                self.memory[block * size + position % size] = row.key(position)
        for group, needed in enumerate(self._needed(work.start)):
            for index in range(needed, -(-end // size)):
                block = row.held[index * groups + group]
                known = row.keys(index * size, min((index + 1) * size, end))
                assert self.memory[block * size : block * size + len(known)] == known
        if self.has_states:
            assert row.state == (row.key(work.start - 1) if work.start else -1), "not its state"
            row.state = row.key(end - 1)
        row.num_computed = end
        if not is_drafted:
            self._leave_unseen(row)
        self.num_computed += work.num_tokens
        if work.sample:
            token = draw(
                row.prints[-1],
                row.seed,
                end - row.num_prompt,
                row.sampling.min_tokens,
                row.stop,
                self.nan,
                range(VOCAB) if row.mask is None else allowed_by(row.mask),
            )
            tokens.append(token)
            row.prints.append(fingerprint(row.prints[-1], -1 if token is None else token))

    def _enter(self, row: Row, work: RowWork) -> None:
        """The last tokens of the work replace the row's tokens from that position on."""
        assert row.num_computed is not None and not work.draft_token_ids
        first = work.start + work.num_tokens - len(work.entered_token_ids)
        assert first <= len(row.prints) and work.start <= row.num_computed
        if not self.knows_all_tokens:
            row.num_computed = work.start
        del row.prints[first:]
        for token in work.entered_token_ids:
            row.prints.append(fingerprint(row.prints[-1], token))


def allowed_by(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(VOCAB) if bits >> token & 1]


def takes(matcher: DigitMatcher, token: int) -> bool:
    """Whether the matcher can continue after this token."""
    matcher.accept(token)
    if matcher.is_complete:
        return True
    try:
        matcher.mask()
    except ValueError:
        return False
    return True


@dataclass
class Outcome:
    """The engine's updates about one request, combined."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)
    is_whole: bool = False

    def take(self, update: RequestUpdate) -> None:
        assert self.finish_reason is None, "an update about a finished request"
        self.tokens.extend(update.new_token_ids)
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason
        self.error = update.error
        self.is_whole = update.is_whole
        self.scores += update.prompt_logprobs


def run(core: EngineCore) -> dict[str, Outcome]:
    """Step until all requests are done, checking invariants; nothing may be in use at the end."""
    outcomes: dict[str, Outcome] = {}
    while core.has_work:
        for update in core.step():
            outcomes.setdefault(update.request_id, Outcome()).take(update)
        core.check()
    assert core.stats().num_free_blocks == core.stats().num_blocks
    return outcomes


def run_alone(message: AddRequest, seed: int, room: int, nan: bool = False) -> Outcome:
    """The expected result of a request: an independent implementation of model and stop rules.

    `room` is the maximum number of tokens in total, including the prompt.
    """
    sampling, outcome = message.sampling, Outcome()
    prints = history(message.prompt_token_ids)
    last = prints[-1]
    spec = sampling.structured_outputs if sampling.max_tokens != 0 else None
    matcher = None if spec is None else DigitMatcher(spec.text)
    eos = set() if sampling.ignore_eos and spec is None else {EOS}
    stop = eos | set(sampling.stop_token_ids or ())
    limit = sampling.max_tokens
    if limit is None:
        limit = room - len(message.prompt_token_ids)
    while outcome.finish_reason is None:
        allowed = range(VOCAB) if matcher is None else matcher.allowed
        drawn = draw(
            last, seed, len(outcome.tokens), sampling.min_tokens, sorted(stop), nan, allowed
        )
        if drawn is None or (matcher is not None and not takes(matcher, drawn)):
            outcome.finish_reason = "error"
            break
        if sampling.prompt_logprobs is not None and not outcome.tokens:
            given = zip(prints, message.prompt_token_ids[1:], strict=False)
            outcome.scores = [score(before, token) for before, token in given]
        if limit == 0:  # only the prompt is computed
            outcome.finish_reason = "length"
            break
        outcome.tokens.append(drawn)
        last = fingerprint(last, drawn)
        if drawn in stop and len(outcome.tokens) > sampling.min_tokens:
            outcome.finish_reason = "stop"
            outcome.stop_reason = None if drawn in eos else drawn
        elif matcher is not None and matcher.is_complete:
            outcome.finish_reason, outcome.is_whole = "stop", True
        elif len(outcome.tokens) >= limit:
            outcome.finish_reason = "length"
    return outcome
