"""Random traces through the engine: each request ends as it does alone (support/fake_runner)."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from fake_draft import UnsureRunner, speculate
from fake_runner import EOS, VOCAB, DigitGrammars, FakeRunner, Outcome, run_alone
from oracle import Oracle
from tiers import tiered

from llmc.engine.admission import Limits, check_request
from llmc.engine.core import EngineCore
from llmc.engine.kv import snapshots
from llmc.engine.kv.layout import WHOLE, AttentionWindow, CacheLayout
from llmc.engine.kv.swap import SwapConfig, SwapCost
from llmc.engine.messages import AddRequest, EngineStats
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.spec_decode.draft_model import DraftModelSpeculation
from llmc.engine.spec_decode.speculation import Speculation
from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams

NUM_TRACES = 600  # for each of 18 batches


def random_request(rng: random.Random, index: int, context: int, crowd: bool) -> AddRequest:
    """A crowd is many short prompts with long answers: they fit at first, and then they don't."""
    shared = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    prompt = shared[: rng.randrange(context)] if rng.random() < 0.6 and not crowd else []
    prompt += [rng.randrange(1, 4) for _ in range(rng.randrange(4))]
    prompt = prompt[: context + 1] or [rng.randrange(VOCAB)]
    wanted = [None, 1, 2, 5, rng.randint(1, context)]
    max_tokens = None if crowd else rng.choice([0, *wanted, *wanted])
    return AddRequest(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randrange(min(6 if max_tokens is None else max_tokens, 6) + 1)
            if rng.random() < 0.3
            else 0,
            ignore_eos=rng.random() < (0.9 if crowd else 0.4),
            stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.2 else None,
            seed=rng.choice([0, 0, 1, 2]),
            prompt_logprobs=0 if rng.random() < 0.2 else None,
            structured_outputs=random_grammar(rng) if rng.random() < 0.2 else None,
        ),
        priority=rng.randrange(3),
    )


def random_grammar(rng: random.Random) -> StructuredOutputsParams:
    ending = "!" if rng.random() < 0.1 else ""
    return StructuredOutputsParams(regex=f"{rng.randint(1, 12)}{ending}")


def random_windows(rng: random.Random) -> tuple[AttentionWindow, ...]:
    """Most engines have layers that see all; the others windows, chunks, or several groups."""
    if rng.random() < 0.7:
        return (WHOLE,)
    limited = [AttentionWindow(window=rng.randint(1, 9)), AttentionWindow(chunk=rng.randint(1, 9))]
    return tuple(rng.choice([WHOLE, *limited]) for _ in range(rng.randint(1, 3)))


@dataclass
class Trace:
    """One random engine, its requests and what came of them.

    `faults`: "none", "random" (steps raise by chance) or "poison" (some requests make the steps
    raise that compute one position of theirs).
    """

    seed: int
    depth: int
    faults: str
    aborts: bool = True
    has_states: bool = False
    draft: UnsureRunner | None = None  # of a draft model
    speculation: Speculation | None = None
    messages: dict[str, AddRequest] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self) -> EngineCore:
        rng = self.rng = random.Random(self.seed)
        self.block_size, self.num_blocks = rng.choice([1, 2, 2, 3, 4, 8]), rng.randint(2, 14)
        windows = random_windows(rng)
        self.num_blocks *= len(windows)
        self.context = rng.randint(4, 24)
        budget = rng.choice([1, 2, 3, 5, 8, 32])
        rows = rng.randint(1, 6)
        self.crowd = rng.random() < 0.3
        self.caching = rng.random() < 0.7
        self.sibling_rate = rng.choice([0.0, 0.0, 0.5])
        self.is_shared = self.caching or self.sibling_rate > 0
        self.priorities = rng.random() < 0.3
        layout = CacheLayout(block_size=self.block_size, step_tokens=budget, windows=windows)
        self.room = min(self.context, layout.longest(self.num_blocks))
        self.limits = Limits(
            vocab_size=VOCAB,
            max_model_len=self.context,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            pool_tokens=layout.longest(self.num_blocks),
            eos_token_ids=frozenset({EOS}),
        )
        self.runner = FakeRunner(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_tokens=budget,
            max_rows=rows,
            max_in_flight=self.depth,
            rng=rng,
            layout=layout,
            has_states=self.has_states,
        )
        self.runner.nan = rng.random() < 0.3
        if self.seed % 4 == 3:
            self.runner.long_context_from = 1 + self.seed // 4 % (self.context - 1)
        if self.has_states:
            self.caching = True
        elif self.seed % 5 < 2:
            self.speculation = Oracle(random.Random(self.seed), nan=self.runner.nan)
        elif self.seed % 5 == 2:
            self.speculation = self.draft_model(rng, budget, rows)
        self.core = EngineCore(
            self.runner,
            EngineLimits(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_num_seqs=rows,
                max_num_batched_tokens=budget,
                max_model_len=self.context,
                vocab_size=VOCAB,
            ),
            EngineFeatures(
                eos_token_ids=[EOS],
                enable_prefix_caching=self.caching,
                scheduling_policy="priority" if self.priorities else "fcfs",
                swap_config=(
                    self.swap_config(rng) if rng.random() < 0.7 and not self.has_states else None
                ),
                share_prompts=not self.has_states,
                num_snapshots=rng.choice([1, 2, 4, 30]) if self.has_states else 0,
                grammars=DigitGrammars(),
                windows=windows,
                long_context_from=self.runner.long_context_from,
                speculation=self.speculation,
            ),
        )
        if self.faults == "poison":
            culprits = rng.sample(range(8), 2)
            self.runner.poison = {f"r{i}": rng.randrange(self.context) for i in culprits}
        self.play(rng)
        return self.core

    def draft_model(self, rng: random.Random, budget: int, rows: int) -> DraftModelSpeculation:
        """One whose cache may be small and whose steps may fail."""
        speculation, self.draft = speculate(
            random.Random(self.seed),
            num_blocks=rng.choice([self.num_blocks, 4]),
            block_size=self.block_size,
            max_tokens=budget,
            max_rows=rows,
            max_model_len=self.context,
            caching=self.caching,
            is_eager=True,
        )
        self.draft.nan = self.runner.nan
        self.draft.fault_rate = 0.02 if self.faults == "random" else 0.0
        return speculation

    @staticmethod
    def swap_config(rng: random.Random) -> SwapConfig:
        cost = SwapCost(
            prefill_seconds_per_token=rng.choice([1.0, 4.0]),
            block_bytes=1,
            copy_bytes_per_second=1.0,
        )
        return SwapConfig(rng.randint(1, 14), cost)

    def play(self, rng: random.Random) -> None:
        num_requests, next_index, steps = rng.randint(2, 8), 0, 0
        arrival_rate, check_all = rng.choice([0.2, 0.5, 1.0]), rng.random() < 0.25
        while next_index < num_requests or self.core.has_work:
            while next_index < num_requests and rng.random() < arrival_rate:
                message = random_request(rng, next_index, self.context, self.crowd)
                self.add(message)
                next_index += 1
                if rng.random() < self.sibling_rate:
                    next_index = self.add_siblings(message, next_index)
                if rng.random() < 0.3:
                    break
            if self.aborts and self.messages and rng.random() < 0.04:
                self.abort(rng.choice(list(self.messages)))
            # Faults come for a while only, so that requests get through as well.
            self.runner.fault_rate = 0.08 if self.faults == "random" and steps < 40 else 0.0
            for update in self.core.step():
                self.outcomes[update.request_id].take(update)
            if check_all:
                self.core.check()
            steps += 1
            assert steps < 20000, "the trace does not end"

    def add(self, message: AddRequest) -> None:
        sampling, num_prompt = message.sampling, len(message.prompt_token_ids)
        wanted = sampling.max_tokens
        if wanted is None:
            wanted = max(1, sampling.min_tokens)
        fills_pool = wanted == 0 and num_prompt >= self.limits.pool_tokens
        if num_prompt + wanted > self.room or fills_pool:
            with pytest.raises(InvalidRequestError):
                check_request(message.prompt_token_ids, message.sampling, self.limits)
            return
        check_request(message.prompt_token_ids, message.sampling, self.limits)
        self.core.add(message)
        self.messages[message.request_id] = message
        self.outcomes[message.request_id] = Outcome()

    def add_siblings(self, first: AddRequest, next_index: int) -> int:
        """Others of the same prompt, some of which name one that was refused or has ended."""
        for seed in range(3, 3 + self.rng.randint(1, 4)):
            sampling = dataclasses.replace(first.sampling, seed=seed)
            request_id, fork_of = f"r{next_index}", self.rng.choice(["r0", first.request_id])
            if fork_of in self.messages and (
                self.messages[fork_of].prompt_token_ids != first.prompt_token_ids
            ):
                fork_of = first.request_id
            self.add(
                dataclasses.replace(
                    first, request_id=request_id, sampling=sampling, fork_of=fork_of
                )
            )
            next_index += 1
        return next_index

    def abort(self, request_id: str) -> None:
        update = self.core.abort(request_id)
        assert (update is None) == (self.outcomes[request_id].finish_reason is not None)
        if update is not None:
            self.outcomes[request_id].take(update)

    def verify(self) -> None:
        for request_id in self.messages:
            self.verify_request(request_id)
        arrivals = [int(request_id[1:]) for request_id in self.runner.first_scheduled]
        in_order = not self.priorities and not self.sibling_rate
        assert not in_order or arrivals == sorted(arrivals), "not first come, first served"
        self.verify_books()

    def verify_request(self, request_id: str) -> None:
        message, got = self.messages[request_id], self.outcomes[request_id]
        alone = run_alone(message, message.sampling.seed or 0, self.room, self.runner.nan)
        if got.error is not None and not ("finite" in got.error or "it broke" in got.error):
            assert got.error == "the step failed: InjectedFault: midway" or self.faults == "random"
            assert got.tokens == alone.tokens[: len(got.tokens)]
            if (
                self.faults == "poison"
            ):  # it ends where its own poison is, and no other request does
                num_known = self.runner.poison[request_id] + 1
                num_tokens = max(0, num_known - len(message.prompt_token_ids))
                # shared blocks may have spared it, until it was recomputed
                assert len(got.tokens) == num_tokens or (
                    self.is_shared and len(got.tokens) > num_tokens
                )
        elif got.finish_reason == "abort":
            assert got.tokens == alone.tokens[: len(got.tokens)]
        else:
            assert got.tokens == alone.tokens
            assert (got.finish_reason, got.stop_reason) == (alone.finish_reason, alone.stop_reason)
            assert (got.scores, got.is_whole) == (alone.scores, alone.is_whole)

    def verify_books(self) -> None:
        self.core.check()
        stats = self.core.stats()
        assert stats.num_free_blocks == stats.num_blocks, "a block leaked"
        assert stats.num_finished == len(self.messages)
        assert stats.num_running == stats.num_waiting == 0
        if self.draft is not None:
            assert isinstance(self.speculation, DraftModelSpeculation)
            self.speculation.check(())
            assert self.speculation.num_failures == min(self.draft.faults, 3)
        released = set(self.core.scheduler.rows.pop_released())
        assert set(self.runner.rows) <= released, "a row leaked in the runner"


def verified(trace: Trace) -> EngineStats:
    """What a trace counted, once it ended as it should; an error says which trace it was."""
    try:
        stats = trace.run().stats()
        trace.verify()
    except Exception as error:
        error.add_note(f"trace: {trace.seed=} {trace.depth=} {trace.faults=}")
        raise
    return stats


@pytest.mark.parametrize("faults", ["none", "random", "poison"])
@pytest.mark.parametrize("depth", [1, 2, 3], ids=["sync", "async2", "async3"])
@pytest.mark.parametrize("batch", tiered(range(2), 0))
def test_every_request_ends_as_it_does_alone(
    batch: int, depth: int, faults: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "llmc.engine")
    totals: Counter[str] = Counter()
    for index in range(NUM_TRACES):
        # not hash(): that of a string differs from run to run
        seed = ((batch * 10 + depth) * 10 + len(faults)) * NUM_TRACES + index
        trace = Trace(seed=seed, depth=depth, faults=faults)
        stats = verified(trace)
        totals["preempted"] += stats.num_preemptions
        totals["cache hits"] += stats.prefix_cache_hits
        totals["swaps"] += stats.num_swaps
        totals["swapped in"] += trace.runner.num_swapped_in
        totals["copies"] += trace.runner.num_copies
        totals["left behind"] += trace.runner.num_left
        totals["wasted"] += stats.num_wasted_row_steps
        totals["restarts"] += trace.runner.restarts
        totals["as long texts"] += trace.runner.num_long
        totals["faults"] += trace.runner.faults
        totals["scored"] += trace.runner.num_scored
        totals["rejected"] += trace.runner.num_drafted - trace.runner.num_accepted
        totals["accepted"] += stats.num_accepted_tokens
        if trace.draft is not None:
            totals["accepted of a draft model"] += stats.num_accepted_tokens
            totals["draft faults"] += trace.draft.faults
        assert stats.num_failed_steps == trace.runner.faults
        for outcome in trace.outcomes.values():
            totals[outcome.finish_reason or "none"] += 1
            totals["whole"] += outcome.is_whole
            totals["broke"] += "it broke" in (outcome.error or "")
    # The traces must have met what they are about.
    for event in (
        "preempted",
        "swaps",
        "swapped in",
        "copies",
        "left behind",
        "cache hits",
        "restarts",
        "as long texts",
        "stop",
        "length",
        "abort",
        "error",
        "scored",
        "whole",
        "accepted",
        "rejected",
        "accepted of a draft model",
    ):
        assert totals[event] > NUM_TRACES // 50, f"{event}: {totals}"
    assert (totals["faults"] > 0) == (faults != "none")
    assert (totals["wasted"] > 0) == (depth > 1)


@pytest.mark.parametrize("faults", ["none", "random", "poison"])
@pytest.mark.parametrize("depth", [1, 2, 3], ids=["sync", "async2", "async3"])
def test_requests_with_recurrent_states_end_as_they_do_alone(
    depth: int, faults: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes are found where snapshots of the state are, which are few and change hands."""
    caplog.set_level(logging.CRITICAL, "llmc.engine")
    totals: Counter[str] = Counter()
    for index in range(NUM_TRACES // 2):
        monkeypatch.setattr(snapshots, "LEAST_BLOCKS", index % 3)
        seed = (depth * 10 + len(faults)) * NUM_TRACES + index
        trace = Trace(seed=seed, depth=depth, faults=faults, has_states=True)
        stats = verified(trace)
        totals["preempted"] += stats.num_preemptions
        totals["cache hits"] += stats.prefix_cache_hits
        totals["loaded"] += trace.runner.num_loaded
        totals["as long texts"] += trace.runner.num_long
        totals["left behind"] += trace.runner.num_left
        assert stats.num_failed_steps == trace.runner.faults
    for event, count in totals.items():
        assert count > NUM_TRACES // 50, f"{event}: {totals}"
