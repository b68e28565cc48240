"""Random traces through the scheduler against a runner that believes nothing.

The fake runner keeps what a real one keeps: rows, block tables and a memory of blocks. Each slot of
that memory holds a fingerprint of all tokens up to it, so a block that is stale, shared by writers
or taken from the wrong prefix shows when it is read. The token it draws is a pure function of the
history: whatever was batched, preempted, cached or aborted around it, a request must end exactly
as it does alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.engine.plan import NewRow, RowWork, StepPlan, StepResult
from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams

VOCAB = 9
EOS = 0
NUM_TRACES = 1500  # for each of 12 batches


class InjectedFault(RuntimeError):
    pass


def fingerprint(before: int, token: int) -> int:
    return ((before * 1000003) ^ ((token + 1) * 0x9E3779B1)) & 0xFFFFFFFFFFFF


def draw(last: int, num_output: int, min_tokens: int, stop: Sequence[int], nan: bool) -> int | None:
    """The 'model': next token from the fingerprint of the history, stop tokens banned at first."""
    if nan and last % 29 == 0:
        return None
    token = (last >> 5) % VOCAB
    while num_output < min_tokens and token in stop:
        token = (token + 1) % VOCAB
    return token


@dataclass
class Row:
    request_id: str
    prints: list[int]
    num_prompt: int
    sampling: SamplingParams
    stop: Sequence[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int | None = None  # None until its first work says what was cached
    broken: bool = False  # was in a failed step: whatever is said of it now is dropped


class FakeRunner:
    def __init__(
        self, rng: random.Random, num_blocks: int, block_size: int, max_tokens: int, max_rows: int
    ) -> None:
        self.rng = rng
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.memory = [-1] * (num_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.holders: Counter[int] = Counter()
        self.first_scheduled: list[str] = []
        self.restarts = 0
        self.in_flight: list[StepPlan] = []  # kept by whoever drives
        self.fault_rate = 0.0
        self.nan = False
        self.unheard: set[int] = set()  # rows released by a plan that failed
        self.faults = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.check_shape(plan)
        fault = self.rng.random() < self.fault_rate
        if fault and self.rng.random() < 0.5:
            for row in plan.released_rows:  # it does not hear of them, but their blocks are free
                self.unheard.add(row)
                if row in self.rows:
                    self.holders.subtract(self.rows[row].blocks)
                    self.rows[row].blocks = []
            self.break_rows(plan)
            raise InjectedFault("at the start")
        self.release(plan)
        self.fill(plan)
        stop_at = self.rng.randrange(len(plan.work)) if fault else -1
        tokens: list[int | None] = []
        for index, work in enumerate(plan.work):
            if index == stop_at:
                self.break_rows(plan)
                raise InjectedFault("midway")
            self.compute(self.rows[work.row], work, tokens)
        return StepResult(token_ids=tokens)

    def check_shape(self, plan: StepPlan) -> None:
        rows = [work.row for work in plan.work]
        assert rows and len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_rows for row in rows)
        assert 0 < plan.num_tokens <= self.max_tokens
        assert all(work.num_tokens > 0 for work in plan.work)
        assert {new.row for new in plan.new_rows} <= set(rows)
        busy = {work.row for flying in self.in_flight for work in flying.work}
        assert not busy & set(plan.released_rows), "released a row that a step in flight uses"
        assert not busy & {new.row for new in plan.new_rows}, "reused a row too early"

    def break_rows(self, plan: StepPlan) -> None:
        self.faults += 1
        for new in plan.new_rows:
            if new.row not in self.rows or new.row in self.unheard:
                self.drop(new.row)
                self.add_row(new)
        for work in plan.work:
            self.rows[work.row].broken = True

    def release(self, plan: StepPlan) -> None:
        for row in plan.released_rows:
            assert row in self.rows or self.faults, "released a row that was never filled"
            self.drop(row)

    def fill(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            if new.row in self.unheard:
                self.drop(new.row)
            assert new.row not in self.rows, "filled a row that is taken"
            self.add_row(new)

    def drop(self, row: int) -> None:
        self.unheard.discard(row)
        if row in self.rows:
            self.holders.subtract(self.rows.pop(row).blocks)

    def add_row(self, new: NewRow) -> None:
        if new.request_id in self.first_scheduled:
            self.restarts += 1
        else:
            self.first_scheduled.append(new.request_id)
        prints, last = [], 0
        for token in new.token_ids:
            last = fingerprint(last, token)
            prints.append(last)
        self.rows[new.row] = Row(
            new.request_id, prints, new.num_prompt_tokens, new.sampling, new.stop_token_ids
        )

    def compute(self, row: Row, work: RowWork, tokens: list[int | None]) -> None:
        if row.broken:
            if work.sample:
                tokens.append(EOS)
            return
        size = self.block_size
        row.blocks.extend(work.new_blocks)
        self.holders.update(work.new_blocks)
        if row.num_computed is None:
            assert work.start % size == 0
            row.num_computed = work.start
        end = work.start + work.num_tokens
        assert end < row.num_prompt + (row.sampling.max_tokens or end), "work that no one needs"
        assert work.start == row.num_computed, "positions are not contiguous"
        assert end <= len(row.prints) and end <= len(row.blocks) * size
        assert work.sample == (end == len(row.prints))
        for position in range(work.start, end):
            block = row.blocks[position // size]
            assert self.holders[block] == 1, "wrote to a block that another row holds"
            self.memory[block * size + position % size] = row.prints[position]
        for index, block in enumerate(row.blocks[: -(-end // size)]):
            known = row.prints[index * size : min((index + 1) * size, end)]
            assert self.memory[block * size : block * size + len(known)] == known
        row.num_computed = end
        if work.sample:
            num_output = end - row.num_prompt
            sampling = row.sampling
            token = draw(row.prints[-1], num_output, sampling.min_tokens, row.stop, self.nan)
            tokens.append(token)
            row.prints.append(fingerprint(row.prints[-1], -1 if token is None else token))


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None

    def take(self, update: RequestUpdate) -> None:
        assert self.finish_reason is None, "news of a request that has ended"
        self.tokens.extend(update.new_token_ids)
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason
        self.error = update.error


def run_alone(message: AddRequest, context: int, pool_tokens: int, nan: bool) -> Outcome:
    """What this request must give: the model and the stop rules, written down once more."""
    sampling, outcome, last = message.sampling, Outcome(), 0
    for token in message.prompt_token_ids:
        last = fingerprint(last, token)
    eos = set() if sampling.ignore_eos else {EOS}
    stop = eos | set(sampling.stop_token_ids or ())
    room = min(context, pool_tokens) - len(message.prompt_token_ids)
    limit = room if sampling.max_tokens is None else sampling.max_tokens
    while outcome.finish_reason is None:
        drawn = draw(last, len(outcome.tokens), sampling.min_tokens, sorted(stop), nan)
        if drawn is None:
            outcome.finish_reason = "error"
            break
        outcome.tokens.append(drawn)
        last = fingerprint(last, drawn)
        if drawn in stop and len(outcome.tokens) > sampling.min_tokens:
            outcome.finish_reason = "stop"
            outcome.stop_reason = None if drawn in eos else drawn
        elif len(outcome.tokens) >= limit:
            outcome.finish_reason = "length"
    return outcome


class Driver:
    """Steps an engine with `depth` steps in flight: 1 is EngineCore.step itself."""

    def __init__(self, core: EngineCore, runner: FakeRunner, depth: int) -> None:
        self.core, self.runner, self.depth = core, runner, depth
        self.pending: deque[tuple[StepPlan, StepResult | InjectedFault]] = deque()

    def step(self) -> list[RequestUpdate]:
        if self.depth == 1:
            return self.core.step()
        scheduler = self.core._scheduler
        plan = scheduler.schedule()
        if plan is not None:
            self.runner.in_flight = [flying for flying, _ in self.pending]
            outcome: StepResult | InjectedFault
            try:
                outcome = self.runner.execute(plan)
            except InjectedFault as fault:
                outcome = fault
            self.pending.append((plan, outcome))
        elif not self.pending:
            assert not self.core.has_work, "nothing planned, nothing in flight, work left"
            return []
        if plan is not None and len(self.pending) < self.depth:
            return []
        oldest, outcome = self.pending.popleft()
        if isinstance(outcome, InjectedFault):
            return scheduler.fail(oldest, str(outcome))
        return scheduler.update(oldest, outcome)


def random_request(rng: random.Random, index: int, context: int, crowd: bool) -> AddRequest:
    """A crowd is many short prompts with long answers: they fit at first, and then they don't."""
    shared = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    prompt = shared[: rng.randrange(context)] if rng.random() < 0.6 and not crowd else []
    prompt += [rng.randrange(1, 4) for _ in range(rng.randrange(4))]
    prompt = prompt[: context + 1] or [rng.randrange(VOCAB)]
    max_tokens = None if crowd else rng.choice([None, 1, 2, 5, rng.randint(1, context)])
    return AddRequest(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randrange(min(max_tokens or 6, 6) + 1) if rng.random() < 0.3 else 0,
            ignore_eos=rng.random() < (0.9 if crowd else 0.4),
            stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.2 else None,
        ),
    )


@dataclass
class Trace:
    """One random engine, its requests and what came of them."""

    seed: int
    depth: int
    faults: bool
    aborts: bool = True
    messages: dict[str, AddRequest] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self) -> EngineCore:
        rng = self.rng = random.Random(self.seed)
        self.block_size, self.num_blocks = rng.choice([1, 2, 2, 3, 4, 8]), rng.randint(2, 14)
        self.context = rng.randint(4, 24)
        budget = rng.choice([1, 2, 3, 5, 8, 32])
        rows = rng.randint(1, 6)
        self.crowd = rng.random() < 0.3
        self.runner = FakeRunner(rng, self.num_blocks, self.block_size, budget, rows)
        self.core = EngineCore(
            self.runner,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=self.context,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            enable_prefix_caching=rng.random() < 0.7,
        )
        self.runner.nan = rng.random() < 0.3
        self.driver = Driver(self.core, self.runner, self.depth)
        self.play(rng)
        return self.core

    def play(self, rng: random.Random) -> None:
        num_requests, next_index, steps = rng.randint(2, 8), 0, 0
        arrival_rate, check_all = rng.choice([0.2, 0.5, 1.0]), rng.random() < 0.25
        while next_index < num_requests or self.core.has_work:
            while next_index < num_requests and rng.random() < arrival_rate:
                self.add(random_request(rng, next_index, self.context, self.crowd))
                next_index += 1
                if rng.random() < 0.3:
                    break
            if self.aborts and self.messages and rng.random() < 0.04:
                self.abort(rng.choice(list(self.messages)))
            # Faults come for a while only, so that requests get through as well.
            self.runner.fault_rate = 0.08 if self.faults and steps < 40 else 0.0
            for update in self.driver.step():
                self.outcomes[update.request_id].take(update)
            if check_all:
                self.core.check()
            steps += 1
            assert steps < 20000, "the trace does not end"

    def add(self, message: AddRequest) -> None:
        total = len(message.prompt_token_ids) + (message.sampling.max_tokens or 1)
        fits = total <= min(self.context, self.num_blocks * self.block_size)
        try:
            self.core.add(message)
        except InvalidRequestError:
            assert not fits, "refused a request that fits"
            return
        assert fits, "let in a request that does not fit"
        self.messages[message.request_id] = message
        self.outcomes[message.request_id] = Outcome()

    def abort(self, request_id: str) -> None:
        update = self.core.abort(request_id)
        assert (update is None) == (self.outcomes[request_id].finish_reason is not None)
        if update is not None:
            self.outcomes[request_id].take(update)

    def verify(self) -> None:
        for request_id, message in self.messages.items():
            pool_tokens = self.num_blocks * self.block_size
            alone = run_alone(message, self.context, pool_tokens, self.runner.nan)
            got = self.outcomes[request_id]
            fault = got.error is not None and "finite" not in got.error
            if got.finish_reason == "abort" or fault:
                assert got.tokens == alone.tokens[: len(got.tokens)]
                assert not fault or self.faults
                continue
            assert got.tokens == alone.tokens
            assert (got.finish_reason, got.stop_reason) == (alone.finish_reason, alone.stop_reason)
        arrivals = [int(request_id[1:]) for request_id in self.runner.first_scheduled]
        assert arrivals == sorted(arrivals), "not first come, first served"
        self.core.check()
        stats = self.core.stats()
        assert stats.num_free_blocks == stats.num_blocks, "a block leaked"
        assert stats.num_finished == len(self.messages)
        assert stats.num_running == stats.num_waiting == 0
        told = set(self.core._scheduler.rows.pop_released())
        assert set(self.runner.rows) <= told, "a row leaked in the runner"


@pytest.mark.parametrize("faults", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("depth", [1, 2, 3], ids=["sync", "async2", "async3"])
@pytest.mark.parametrize("batch", range(2))
def test_every_request_ends_as_it_does_alone(batch: int, depth: int, faults: bool) -> None:
    totals: Counter[str] = Counter()
    for index in range(NUM_TRACES):
        trace = Trace(seed=hash((batch, depth, faults, index)), depth=depth, faults=faults)
        try:
            stats = trace.run().stats()
            trace.verify()
        except Exception as error:
            error.add_note(f"trace: {trace.seed=} {depth=} {faults=}")
            raise
        totals["preempted"] += stats.num_preemptions
        totals["cache hits"] += stats.prefix_cache_hits
        totals["restarts"] += trace.runner.restarts
        totals["faults"] += trace.runner.faults
        for outcome in trace.outcomes.values():
            totals[outcome.finish_reason or "none"] += 1
    # The traces must have met what they are about.
    for event in ("preempted", "cache hits", "restarts", "stop", "length", "abort", "error"):
        assert totals[event] > NUM_TRACES // 50, f"{event}: {totals}"
    assert (totals["faults"] > 0) == faults
