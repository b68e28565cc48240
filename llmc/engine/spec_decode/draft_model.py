"""Draft-model speculation: a smaller model with the same vocabulary proposes the draft tokens.

    tokens known   ... a b c        the target's next step computes c
    catch up       ... a b          what the draft model has not computed yet, in chunks
    draft steps            c -> d   one token for all requests at once, and again
                           d -> e
    known later    ... a b c d x    d was accepted and stays computed; x replaces e

The draft model has its own runner, rows, blocks and prefix cache, so preemption in the target's
engine does not affect what it has computed. It samples as the target does, with the request's
parameters, seed and positions: given the same noise, two models that nearly agree mostly draw the
same token.

A draft *head* reads hidden states of the target, which keeps them next to its keys and values.
Position i of the head's rows has token i + 1, and the target's hidden state at position i:

    target   a b c d        computed a b c; drew d
    head     b c d          for d it reads the target's hidden state of c, and draws e;
                   e        the target has not computed d yet: for e it reads its own state of d

So everything that it drafts is recomputed once the target's hidden states are available.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.row_table import RowTable, new_row
from llmc.engine.options import EngineLimits
from llmc.engine.plan import PendingStep, Runner, StepPlan
from llmc.engine.request import BlockTable, Request, RequestState
from llmc.engine.spec_decode.draft_sequence import DraftSequence
from llmc.engine.spec_decode.policy import SpeculationPolicy
from llmc.engine.spec_decode.speculation import Drafter, Speculation
from llmc.pooling import DRAFTED
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3  # then the draft model is switched off for good


class DraftModel:
    """Rows and blocks of the draft model, or draft head, and the runner that computes them.

    `target_vocab_size` is the width of the target's logits, which can differ from the draft
    model's: the two may have different numbers of padding tokens at the end of the vocabulary.
    """

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        *,
        target_vocab_size: int,
        is_head: bool = False,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.runner = runner
        self.is_head = is_head
        self.pool = BlockPool(limits.num_blocks, limits.block_size, enable_prefix_caching)
        self._limits = limits
        self._target_vocab_size = target_vocab_size
        self._rows = RowTable(limits.max_num_seqs, self.pool)
        self._sequences: dict[int, DraftSequence] = {}  # by row
        self._in_flight: deque[tuple[list[DraftSequence], PendingStep]] = deque()
        self._num_steps = 0

    def add(self, target: Request, speculation: Speculation) -> DraftSequence:
        """Track a new request. It gets a row when it is first computed."""
        request = Request(
            request_id=target.request_id,
            token_ids=target.token_ids[1:] if self.is_head else target.token_ids,
            num_prompt_tokens=target.num_prompt_tokens - self.is_head,
            sampling=self._sampling(target.sampling),
            seed=target.seed,
            max_total_tokens=target.max_total_tokens,
            stop_token_ids=target.stop_token_ids,
            cache_salt=self._salt(target),
            row_state=target.row_state if self._has_all_tokens else {},
            # a head's differ, as its tokens are shifted by one
            table=BlockTable(digests=[] if self.is_head else target.table.digests),
        )
        return DraftSequence(speculation, target, request, is_head=self.is_head, on_end=self.remove)

    def _salt(self, target: Request) -> bytes:
        """Whatever determines the keys and values besides the tokens in the rows."""
        if not self.is_head:
            return target.cache_salt
        images = b"".join(image.digest for image in target.images)
        return b"%d %s %s" % (target.token_ids[0], images, target.cache_salt)

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters that a draft token depends on, without ids that a draft model with fewer
        tokens may not have."""
        sampling = dataclasses.replace(sampling, logprobs=None, prompt_logprobs=None)
        if self._has_all_tokens:
            return sampling
        return dataclasses.replace(
            sampling,
            logit_bias=None,
            allowed_token_ids=None,
            bad_words=None,
            bad_words_token_ids=None,
            min_tokens=0,
        )

    @property
    def _has_all_tokens(self) -> bool:
        return self._limits.vocab_size >= self._target_vocab_size

    def remove(self, sequence: DraftSequence) -> None:
        """Free what is kept for a finished request."""
        if sequence.request.row is not None:
            self._free(sequence)

    def max_draft_tokens(self, sequence: DraftSequence) -> int:
        """How many draft tokens the draft model's context and vocabulary allow now."""
        sequence.settle()
        tokens = sequence.request.token_ids
        if not tokens:
            return 0
        if not self._has_all_tokens and any(
            token >= self._limits.vocab_size for token in tokens[sequence.num_entered :]
        ):
            return 0
        return self._limits.max_model_len - len(tokens)

    def catch_up(self, sequences: Iterable[DraftSequence]) -> None:
        """Compute a chunk of the tokens that these have yet to compute, in order, in one step.

        Of several sequences with one prompt, the first computes it; the others find it in the
        prefix cache.
        """
        budget = self._limits.max_num_batched_tokens
        chosen: list[tuple[DraftSequence, int]] = []
        prompts: set[tuple[int, ...]] = set()
        for sequence in sequences:
            request = sequence.request
            prompt = tuple(request.token_ids[: request.num_prompt_tokens])
            if budget == 0 or prompt in prompts or not self._allocate(sequence):
                continue
            prompts.add(prompt)
            num_tokens = min(budget, sequence.num_behind)
            if num_tokens:
                budget -= num_tokens
                chosen.append((sequence, num_tokens))
        if chosen:
            self._submit(chosen, sample=False)
            self._collect()
        for sequence, _ in chosen:
            self._rows.publish(sequence.request, sequence.request.num_computed)

    def draft(self, sequences: Iterable[DraftSequence]) -> None:
        """Draw `num_wanted` tokens for each, batching all requests."""
        budget = self._limits.max_num_batched_tokens
        chosen: list[tuple[DraftSequence, int]] = []  # and how many tokens it gets
        drawing: list[tuple[DraftSequence, int]] = []  # in the next step, and its tokens
        for sequence in sequences:
            if not (self._allocate(sequence, sequence.num_wanted - 1) and sequence.is_near):
                continue
            if num_first := sequence.begin_draft(budget):
                budget -= num_first
                drawing.append((sequence, num_first))
                most = sequence.request.table.capacity - sequence.num_known + 1
                chosen.append((sequence, min(sequence.num_wanted, most)))
        num_drawn = 0
        while drawing:
            self._submit(drawing, sample=True)
            num_drawn += 1
            drawing = [(sequence, 1) for sequence, length in chosen if length > num_drawn]
        while self._in_flight:
            self._collect()
        for sequence, _ in chosen:
            self._rows.publish(sequence.request, sequence.num_known - 1)

    def reset(self) -> None:
        """After a failed step, wait for the steps in flight and discard everything."""
        while self._in_flight:
            with contextlib.suppress(Exception):  # the results are void
                self._in_flight.popleft()[1].result()
        for sequence in list(self._sequences.values()):
            self._free(sequence)

    # Steps

    def _submit(self, chosen: Sequence[tuple[DraftSequence, int]], *, sample: bool) -> None:
        """Start a step over the given number of next tokens of each."""
        if len(self._in_flight) == self.runner.max_in_flight:
            self._collect()
        new_rows = []
        for sequence, _ in chosen:
            if not sequence.num_sent_blocks:
                new_rows.append(new_row(sequence.request))
                sequence.num_entered = len(sequence.request.token_ids)
        plan = StepPlan(
            step=self._num_steps,
            work=[sequence.plan(num_tokens, sample=sample) for sequence, num_tokens in chosen],
            new_rows=new_rows,
            released_rows=self._rows.pop_released(),
        )
        self._num_steps += 1
        drawing = [sequence for sequence, _ in chosen] if sample else []
        self._in_flight.append((drawing, self.runner.submit(plan)))

    def _collect(self) -> None:
        """Append the tokens that the oldest step drew. A draft ends where no token was drawn, or
        one outside the target's vocabulary."""
        drawing, step = self._in_flight.popleft()
        for sequence, token in zip(drawing, step.result().token_ids, strict=True):
            token = None if token is None else token & (DRAFTED - 1)
            if token is None or token >= self._target_vocab_size:
                sequence.is_at_end = True
            elif not sequence.is_at_end:
                sequence.tokens.append(token)

    # Rows and blocks

    def _allocate(self, sequence: DraftSequence, num_more: int = 0) -> bool:
        """Give a sequence a row, blocks for its tokens and, if available, for `num_more`."""
        sequence.settle()
        request, num_known = sequence.request, len(sequence.request.token_ids)
        if request.row is None:
            request.num_tokens = num_known
            if not (self._has_row(request) or (self._make_room() and self._has_row(request))):
                return False
            assert request.row is not None
            self._sequences[request.row] = sequence
        while request.table.capacity < num_known + num_more and (
            self.pool.num_free or self._make_room()
        ):
            self._rows.grow(request)
        return request.table.capacity >= num_known

    def _has_row(self, request: Request) -> bool:
        return self._rows.num_free_rows > 0 and self._rows.allocate(request, 0)

    def _make_room(self) -> bool:
        """Free the rows of requests that don't run; they keep them until others need them."""
        idle = [s for s in self._sequences.values() if s.target.state is not RequestState.RUNNING]
        for sequence in idle:
            self._free(sequence)
        return bool(idle)

    def _free(self, sequence: DraftSequence) -> None:
        row = sequence.request.row
        assert row is not None
        del self._sequences[row]
        self._rows.free(sequence.request)
        sequence.forget()

    def check(self, request_ids: Collection[str]) -> None:
        """Raise AssertionError if a row or block was leaked, or is kept for any other request."""
        self.pool.check(s.request.table.blocks for s in self._sequences.values())
        owners = {row: one for row, one in enumerate(self._rows.owners) if one is not None}
        if owners != {row: sequence.request for row, sequence in self._sequences.items()}:
            raise AssertionError("the draft model's rows are not those of its sequences")
        gone = {one.request_id for one in owners.values()} - set(request_ids)
        if gone:
            raise AssertionError(f"the draft model keeps rows of finished requests: {gone}")


class DraftModelSpeculation(Speculation):
    """Drafts with the draft model, as a batch of all decoding requests, before each step."""

    def __init__(
        self,
        config: SpeculativeConfig,
        model: DraftModel,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        super().__init__(config, policy)
        self.model = model
        self.num_failures = 0

    def drafter(self, request: Request) -> Drafter:
        return self.model.add(request, self)

    def begin_step(self, running: Collection[Request]) -> None:
        super().begin_step(running)
        if self.num_failures == _MAX_FAILURES:
            self.is_on = False
        if not self.is_on:
            return
        wanted = []
        for request in running:
            sequence = request.extension
            if isinstance(sequence, DraftSequence):
                sequence.num_wanted = self._num_wanted(sequence)
                if sequence.num_wanted:
                    wanted.append(sequence)
        if not wanted:
            return
        start = self.policy.clock()
        try:
            behind = [sequence for sequence in wanted if not sequence.is_near]
            if self.model.is_head:  # a step in flight may be computing the states that it reads
                behind = [sequence for sequence in behind if not sequence.target.num_in_flight]
            if behind:
                self.model.catch_up(behind)
            self.model.draft(s for s in wanted if s.is_near and not s.target.num_in_flight)
        except Exception:  # any failure costs draft tokens and no request
            self.num_failures += 1
            is_last = self.num_failures == _MAX_FAILURES
            logger.exception(
                "the draft model failed; %s", "switching it off" if is_last else "restarting it"
            )
            self.is_on = False
            self.model.reset()
            self.policy.pause()
        self.draft_seconds += self.policy.clock() - start

    def use_idle_time(self, *, has_work: bool) -> bool:
        return self.model.runner.use_idle_time(has_work=has_work)

    def release_caches(self) -> int:
        given = self.model.runner.release_caches()
        self.model.pool.reset_prefix_cache()
        return given

    def _num_wanted(self, sequence: DraftSequence) -> int:
        """Number of draft tokens for a request: 0 unless it decodes."""
        request = sequence.target
        is_decode = request.num_tokens - request.num_computed == 1
        if not is_decode or sequence.is_verifying(request) or request.needs_scores:
            return 0
        num_left = request.max_total_tokens - request.num_tokens - 1
        most = min(self.config.num_speculative_tokens, num_left)
        return max(min(most, self.model.max_draft_tokens(sequence)), 0)

    def check(self, request_ids: Collection[str]) -> None:
        self.model.check(request_ids)
