"""Follower: how far the draft model is with one request, and what it guessed of it last.

tokens known   a b c            computed a b c, then d e on trust; guessed d e f
known later    a b c d x        settled: computed a b c d, and x is to be entered where e was
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc.engine.plan import RowWork
from llmc.engine.request import Request

NEAR = 8  # tokens: who is behind by no more needs no step for it, the first guess reads them


@dataclass(slots=True, eq=False)
class Follower:
    """A request as the draft model has it. `seat` is its twin here: row, blocks, and how many
    tokens are computed; the tokens themselves are the request's own list."""

    request: Request
    seat: Request
    num_entered: int = 0  # tokens that its row in the runner holds rightly
    num_blocks_told: int = 0  # that the runner knows of; 0: it knows nothing of this request
    num_known: int = 0  # tokens that the guesses follow
    guesses: list[int] = field(default_factory=list)
    is_at_end: bool = False  # no guess can follow those

    @property
    def num_behind(self) -> int:
        """Tokens before the newest that have not been read."""
        return max(0, len(self.request.token_ids) - 1 - self.seat.num_computed)

    def is_ready(self) -> bool:
        return self.num_behind <= NEAR

    def guess(self, most: int) -> Sequence[int]:
        """What was drawn for the tokens as they are, if anything was."""
        is_current = self.num_known == len(self.request.token_ids)
        return self.guesses[:most] if is_current else ()

    def settle(self) -> None:
        """What was guessed right stays computed; the rest will be overwritten."""
        tokens, place = self.request.token_ids, self.num_known
        for guess in self.guesses:
            if place == len(tokens) or tokens[place] != guess:
                break
            place += 1
        if self.num_known:
            self.seat.num_computed = min(self.seat.num_computed, place)
            self.num_entered = min(self.num_entered, place)
        self._drop_guesses()

    def begin(self, num_left: int) -> int:
        """Guesses are about to be drawn, of up to `num_left` tokens computed for the first.

        -> how many are needed for it, 0 where that is too many. The newest token, if nothing
        else, is computed, and entered, again: what was drawn in its place may differ.
        """
        num_known = len(self.request.token_ids)
        start = min(self.seat.num_computed, num_known - 1)
        if num_known - start > num_left:
            return 0
        self.seat.num_computed, self.num_known = start, num_known
        self.num_entered = min(self.num_entered, num_known - 1)
        return num_known - start

    def plan(self, num_tokens: int, *, sample: bool) -> RowWork:
        """Work on the next tokens. What the runner must hear of them comes with it."""
        seat = self.seat
        assert seat.row is not None
        start = seat.num_computed
        end = seat.num_computed = start + num_tokens
        work = RowWork(
            row=seat.row,
            start=start,
            num_tokens=num_tokens,
            sample=sample,
            new_blocks=seat.blocks[self.num_blocks_told :],
            entered_token_ids=self.request.token_ids[self.num_entered : end],
        )
        self.num_blocks_told = len(seat.blocks)
        self.num_entered = max(self.num_entered, end)
        return work

    def forget(self) -> None:
        """It has lost its row, and what had been read with it."""
        self._drop_guesses()
        self.seat.num_computed = self.num_entered = self.num_blocks_told = 0

    def _drop_guesses(self) -> None:
        self.guesses, self.num_known, self.is_at_end = [], 0, False
