"""DraftSequence: the draft model's progress on one request, and the work to send to its runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from llmc.engine.plan import RowWork
from llmc.engine.request import BlockTable, Request
from llmc.engine.spec_decode.speculation import Drafter, Speculation

NEAR = 8  # tokens: sequences no further behind catch up in their first draft step


class DraftSequence(Drafter):
    """The draft model's progress on one request, and the draft tokens that it proposed last.

    tokens known   a b c            computed a b c, then d e speculatively; proposed d e f
    known later    a b c d x        settled: computed a b c d, and x is to be entered in place of e

    `target` is the request being served. `request` is its counterpart here, with its own row,
    blocks and number of computed tokens. It shares the target's list of tokens, except that a head
    has its own. `on_end` is called with the sequence when its target has finished.
    """

    def __init__(
        self,
        speculation: Speculation,
        target: Request,
        request: Request,
        *,
        is_head: bool,
        on_end: Callable[[DraftSequence], None],
    ) -> None:
        super().__init__(speculation)
        self.target = target
        self.request = request
        self._is_head = is_head
        self._on_end = on_end
        self.num_wanted = 0  # draft tokens in the step that is being planned
        self.num_entered = 0  # leading tokens of its row that are correct in the runner
        self.num_sent_blocks = 0  # blocks that the runner knows of; 0: the row is not sent either
        self.num_known = 0  # tokens that the draft tokens follow
        self.tokens: list[int] = []  # the draft tokens
        self.is_at_end = False  # no draft token can follow these
        self._their_table: BlockTable | None = None  # the target's
        self._sent_theirs = 0  # the target's blocks that the runner knows of

    def expects_draft(self, request: Request) -> bool:
        return self.num_wanted > 0 and (self.is_near or self._is_head)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return self.tokens[:most] if self.num_known == self.num_target_tokens else ()

    def on_finish(self, request: Request, error: str | None) -> None:
        self._on_end(self)

    @property
    def num_behind(self) -> int:
        """Tokens before the newest that have not been computed."""
        return max(0, self.num_target_tokens - 1 - self.request.num_computed)

    @property
    def num_target_tokens(self) -> int:
        """Number of the target's tokens that have a position here."""
        return len(self.target.token_ids) - self._is_head

    @property
    def is_near(self) -> bool:
        return self.num_behind <= NEAR

    def settle(self) -> None:
        """Keep accepted draft tokens as computed, except a head's; the others are overwritten."""
        tokens, place = self.request.token_ids, self.num_known
        if self._is_head:
            tokens += self.target.token_ids[len(tokens) + 1 :]
        for token in () if self._is_head else self.tokens:
            if place == len(tokens) or tokens[place] != token:
                break
            place += 1
        if self.num_known:
            self.request.num_computed = min(self.request.num_computed, place)
            self.num_entered = min(self.num_entered, place)
        self._drop_tokens()

    def begin_draft(self, budget: int) -> int:
        """Number of tokens to compute for the first draft token; 0 if they exceed the budget.

        At least the newest token is computed and entered again, because the draft model may have
        drawn another one in its place.
        """
        num_known = len(self.request.token_ids)
        start = min(self.request.num_computed, num_known - 1)
        if num_known - start > budget:
            return 0
        self.request.num_computed, self.num_known = start, num_known
        self.num_entered = min(self.num_entered, num_known - 1)
        return num_known - start

    def plan(self, num_tokens: int, *, sample: bool) -> RowWork:
        """Plan work on the next tokens, including tokens and blocks unknown to the runner."""
        request = self.request
        assert request.row is not None
        start = request.num_computed
        end = request.num_computed = start + num_tokens
        work = RowWork(
            row=request.row,
            start=start,
            num_tokens=num_tokens,
            sample=sample,
            entered_token_ids=request.token_ids[self.num_entered : end],
        )
        self._send_blocks(work)
        self.num_entered = max(self.num_entered, end)
        return work

    def _send_blocks(self, work: RowWork) -> None:
        """Add the blocks that the runner does not know. For a head, each block is followed by the
        target's, or 0 if the target has none yet. They are sent again when the target has it, or
        after the target was preempted."""
        own, theirs = self.request.table.blocks, self.target.table
        if not self._is_head:
            work.new_blocks = own[self.num_sent_blocks :]
        else:
            num_theirs = min(len(own), len(theirs.blocks))
            sent = self._sent_theirs if theirs is self._their_table else 0
            if (len(own), num_theirs) != (self.num_sent_blocks, sent):
                first = min(self.num_sent_blocks, sent)
                pairs = zip_longest(own[first:], theirs.blocks[first:num_theirs], fillvalue=0)
                work.new_blocks = [block for pair in pairs for block in pair]
                work.kept_blocks = 2 * first
            self._their_table, self._sent_theirs = theirs, num_theirs
        self.num_sent_blocks = len(own)

    def forget(self) -> None:
        """Discard all progress after the row was freed."""
        self._drop_tokens()
        self.request.num_computed = self.num_entered = 0
        self.num_sent_blocks = self._sent_theirs = 0

    def _drop_tokens(self) -> None:
        self.tokens, self.num_known, self.is_at_end = [], 0, False
