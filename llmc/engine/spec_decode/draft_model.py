"""DraftModel: a smaller model reads along with the running requests and says how they go on.

    tokens known   ... a b c        the target's next step computes c
    read           ... a b          what it has not seen yet, in chunks
    steps                  c -> d   one token of all requests at once, and again
                           d -> e
    known later    ... a b c d x    d was right and stays computed; x takes the place of e

It has a runner, rows, blocks and a prefix cache of its own, so that nothing that happens to a
request in the target's engine touches what has been read of it. It draws as the target does, with
the request's parameters, seed and positions: with the same noise two models that nearly agree
mostly draw the same token. What is drawn here is only ever a guess.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.row_table import RowTable, new_row
from llmc.engine.plan import PendingStep, Runner, StepPlan
from llmc.engine.request import Request, RequestState
from llmc.engine.spec_decode.draft_sequence import Follower
from llmc.sampling_params import SamplingParams


class DraftModel:
    """Over a runner that has `max_num_seqs` rows of `max_model_len` tokens and `num_blocks` blocks.

    `vocab_size` is the width of its logits, `target_vocab_size` that of the target's: of the
    tokens at their ends, which pad, one may have more than the other.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        target_vocab_size: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._runner = runner
        self._pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self._rows = RowTable(max_num_seqs, self._pool)
        self._max_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._target_vocab_size = target_vocab_size
        self._seated: dict[int, Follower] = {}  # by row
        self._in_flight: deque[tuple[list[Follower], PendingStep]] = deque()
        self._num_steps = 0

    def follow(self, request: Request) -> Follower:
        """A request that comes. It gets a row when it is first read."""
        seat = Request(
            request_id=request.request_id,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=self._sampling(request.sampling),
            seed=request.seed,
            max_total_tokens=request.max_total_tokens,
            stop_token_ids=request.stop_token_ids,
            cache_salt=request.cache_salt,
            row_state=request.row_state if self._is_as_wide else {},
            arrival=request.arrival,
            digests=request.digests,  # of the same tokens: whoever needs one first computes it
        )
        return Follower(request, seat)

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        """What a guess depends on; without the ids that a narrower model may not have."""
        sampling = dataclasses.replace(sampling, logprobs=None, prompt_logprobs=None)
        if self._is_as_wide:
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
    def _is_as_wide(self) -> bool:
        return self._vocab_size >= self._target_vocab_size

    def leave(self, follower: Follower) -> None:
        """The request is over."""
        if follower.seat.row is not None:
            self._free(follower)

    def most(self, follower: Follower) -> int:
        """How many tokens can be guessed for a request now, as far as the draft model goes."""
        tokens = follower.request.token_ids
        follower.settle()
        if not self._is_as_wide and any(
            token >= self._vocab_size for token in tokens[follower.num_entered :]
        ):
            return 0
        return self._max_model_len - len(tokens)

    def read(self, followers: Iterable[Follower]) -> int:
        """A chunk of what these have not read yet, in their order, in one step -> its tokens.

        Of the sequences of one prompt the first reads it, and the others find it afterwards.
        """
        budget, families = self._max_tokens, set[int]()
        chosen: list[tuple[Follower, int]] = []
        for follower in followers:
            group = follower.request.group
            if budget == 0 or id(group) in families or not self._take_seat(follower):
                continue
            if group is not None:
                families.add(id(group))
            num_tokens = min(budget, follower.num_behind)
            if num_tokens:
                budget -= num_tokens
                chosen.append((follower, num_tokens))
        if chosen:
            self._submit(chosen, sample=False)
            self._collect()
        for follower, _ in chosen:
            self._rows.publish(follower.seat, follower.seat.num_computed)
        return self._max_tokens - budget

    def guess(self, wanted: Iterable[tuple[Follower, int]]) -> int:
        """Draw so many tokens for each, all requests side by side -> the steps that it took."""
        budget = self._max_tokens
        chosen: list[tuple[Follower, int]] = []  # and the guesses of each
        drawing: list[tuple[Follower, int]] = []  # in the next step, and its tokens
        for follower, length in wanted:
            if not (self._take_seat(follower, length - 1) and follower.is_ready()):
                continue
            if num_first := follower.begin(budget):
                budget -= num_first
                drawing.append((follower, num_first))
                most = follower.seat.capacity - follower.num_known + 1
                chosen.append((follower, min(length, most)))
        turn = 0
        while drawing:
            turn += 1
            self._submit(drawing, sample=True)
            drawing = [(follower, 1) for follower, length in chosen if length > turn]
        while self._in_flight:
            self._collect()
        for follower, _ in chosen:
            self._rows.publish(follower.seat, follower.num_known - 1)
        return turn

    def start_over(self) -> None:
        """A step failed: whatever runs ends, and everything is read again."""
        while self._in_flight:
            with contextlib.suppress(Exception):  # it means nothing any more
                self._in_flight.popleft()[1].result()
        for follower in list(self._seated.values()):
            self._free(follower)

    # Steps

    def _submit(self, chosen: Sequence[tuple[Follower, int]], *, sample: bool) -> None:
        """Start a step over the next so many tokens of each."""
        if len(self._in_flight) == self._runner.max_in_flight:
            self._collect()
        new_rows = []
        for follower, _ in chosen:
            if not follower.num_blocks_told:
                new_rows.append(new_row(follower.seat))
                follower.num_entered = len(follower.request.token_ids)
        plan = StepPlan(
            step=self._num_steps,
            work=[follower.plan(num_tokens, sample=sample) for follower, num_tokens in chosen],
            new_rows=new_rows,
            released_rows=self._rows.pop_released(),
        )
        self._num_steps += 1
        drawing = [follower for follower, _ in chosen] if sample else []
        self._in_flight.append((drawing, self._runner.submit(plan)))

    def _collect(self) -> None:
        """What the oldest step drew. Guesses end where nothing, or no token of the target's, was
        drawn: nothing stands behind it."""
        drawing, step = self._in_flight.popleft()
        for follower, token in zip(drawing, step.result().token_ids, strict=True):
            if token is None or token >= self._target_vocab_size:
                follower.is_at_end = True
            elif not follower.is_at_end:
                follower.guesses.append(token)

    # Queues

    def _take_seat(self, follower: Follower, num_more: int = 0) -> bool:
        """See that a request has a row, and blocks for its tokens and if possible some more."""
        follower.settle()
        seat, num_known = follower.seat, len(follower.request.token_ids)
        if seat.row is None:
            seat.num_tokens = num_known
            if not (self._seat(seat) or (self._make_room() and self._seat(seat))):
                return False
            assert seat.row is not None
            self._seated[seat.row] = follower
        while seat.capacity < num_known + num_more and (self._pool.num_free or self._make_room()):
            self._rows.grow(seat)
        return seat.capacity >= num_known

    def _seat(self, seat: Request) -> bool:
        return self._rows.num_free_rows > 0 and self._rows.allocate(seat, 0)

    def _make_room(self) -> bool:
        """Those who don't run keep what has been read of them until somebody needs their place."""
        idle = [f for f in self._seated.values() if f.request.state is not RequestState.RUNNING]
        for follower in idle:
            self._free(follower)
        return bool(idle)

    def _free(self, follower: Follower) -> None:
        row = follower.seat.row
        assert row is not None
        del self._seated[row]
        self._rows.free(follower.seat)
        follower.forget()

    def check(self, requests: Collection[str]) -> None:
        """Raise AssertionError where a row or block is lost, or kept for none of these requests."""
        self._pool.check(follower.seat.blocks for follower in self._seated.values())
        owners = {row: seat for row, seat in enumerate(self._rows.owners) if seat is not None}
        if owners != {row: follower.seat for row, follower in self._seated.items()}:
            raise AssertionError("the draft model's rows are not those of its requests")
        gone = {f.request.request_id for f in self._seated.values()} - set(requests)
        if gone:
            raise AssertionError(f"the draft model keeps rows of requests that are gone: {gone}")
