"""BeamSearch: several sequences of one prompt that go on from the likeliest of all continuations.

    prompt, computed once (forks.py)
      |- beam 0  ... a      each beam's step tells its likeliest next tokens (`told`)
      |- beam 1  ... b      when all have told: advance() ranks the continuations of all beams
      '- beam 2  ... c

                a x         stays in its row: its newest token is sent with its next step
                a y         takes the place of beam 2: gives its blocks back, then forks from a
                b z         stays

A beam is a request like any other, which waits when it has told until the others have. It may be
preempted meanwhile; what it told stands. A fork shares the full blocks of the beam that it goes
on from and gets a copy of the last, partial one.

The rules (scores, end tokens, when to stop) are those of `generate(num_beams=...)` in transformers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from llmc.engine.plan import TokenLogprobs
from llmc.engine.request import Request
from llmc.outputs import FinishReason
from llmc.sampling_params import BeamSearchParams

_NO_BEAM = -1e9  # the score of all but one at first: they would only say the same


@dataclass(slots=True)
class Beam:
    """What a request knows as a beam."""

    search: BeamSearch
    score: float  # sum of the log-probabilities of its tokens
    told: TokenLogprobs | None = None  # what may follow them
    parent: Request | None = None  # has all of its tokens but the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A finished sequence. `token_ids` are those after the prompt, an end token among them."""

    token_ids: Sequence[int]
    cum_logprob: float
    score: float  # with the length penalty
    finish_reason: FinishReason


class BeamSearch:
    """`finished` are the best so far, best first, and the result once `is_over`."""

    def __init__(self, params: BeamSearchParams, members: Sequence[Request]) -> None:
        self.members = tuple(members)
        self.finished: list[Hypothesis] = []
        self.is_over = False
        self.error: str | None = None
        self._params = params
        first = self.members[0]
        self._eos = first.eos_token_ids
        self._max_tokens = first.max_total_tokens - first.num_prompt_tokens
        for member in self.members:
            member.beam = Beam(self, 0.0 if member is first else _NO_BEAM)
            member.needs_known_token = True

    @property
    def request_id(self) -> str:
        """By which it can be aborted."""
        return self.members[0].request_id

    @property
    def num_cached_tokens(self) -> int:
        return self.members[0].num_cached_tokens

    @property
    def num_candidates(self) -> int:
        """How many continuations are ranked: so many that a full set of them has not ended."""
        return max(2, 1 + len(self._eos)) * len(self.members)

    @property
    def all_told(self) -> bool:
        return all(beam_of(member).told is not None for member in self.members)

    def advance(self) -> list[Request]:
        """All beams have told: choose who goes on. -> those that do so from another one's tokens.

        They have these tokens by then, and must give up what they computed. `is_over` is set when
        nothing needs to go on.
        """
        width, params = len(self.members), self._params
        length = self.members[0].num_output_tokens + 1
        candidates = [
            (beam.score + logprob, member, token)
            for member in self.members
            for beam in [beam_of(member)]
            if beam.told is not None
            for token, logprob in zip(beam.told.top_token_ids, beam.told.top_logprobs, strict=True)
        ]
        best = heapq.nlargest(self.num_candidates, candidates, key=itemgetter(0))
        going_on = []
        for place, (score, parent, token) in enumerate(best):
            if token not in self._eos and length < self._max_tokens:
                going_on.append((score, parent, token))
            elif place < width:  # those behind are there to go on, not to end
                self.finished.append(
                    Hypothesis(
                        token_ids=(*parent.token_ids[parent.num_prompt_tokens :], token),
                        cum_logprob=score,
                        score=score / math.pow(length, params.length_penalty),
                        finish_reason="stop" if token in self._eos else "length",
                    )
                )
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[width:]
        if not going_on or self._is_decided(going_on[0][0], length):
            self.is_over = True
            return []
        return self._assign(going_on[:width])

    def _is_decided(self, best_score: float, length: int) -> bool:
        """No beam can become better than what is finished, or nobody waits to see it."""
        params = self._params
        if len(self.finished) < len(self.members):
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        return best_score / math.pow(length, params.length_penalty) <= self.finished[-1].score

    def _assign(self, chosen: Sequence[tuple[float, Request, int]]) -> list[Request]:
        """The first that goes on from a beam stays in its row; others take those that are left."""
        assert len(chosen) == len(self.members), "too few candidates"
        staying: dict[str, tuple[float, Request, int]] = {}
        forking = []
        for one in chosen:
            if staying.setdefault(one[1].request_id, one) is not one:
                forking.append(one)
        leaving = [member for member in self.members if member.request_id not in staying]
        for (score, parent, token), member in zip(forking, leaving, strict=True):
            member.token_ids = [*parent.token_ids, token]
            member.num_tokens = len(member.token_ids)
            member.digests = parent.digests[:]
            member.beam = Beam(self, score, parent=parent)
        for score, member, token in staying.values():
            member.token_ids.append(token)
            member.beam = Beam(self, score)
        return leaving


def beam_of(request: Request) -> Beam:
    assert request.beam is not None, f"{request.request_id!r} is no beam"
    return request.beam
