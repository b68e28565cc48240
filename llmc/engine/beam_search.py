"""BeamSearch: sequences of one prompt that continue the most likely of all their candidates.

    prompt, computed once (parallel_sampling.py)
      |- beam 0  ... a      each beam's step reports its likeliest next tokens (`candidates`)
      |- beam 1  ... b      once all have: the continuations of all beams are ranked
      '- beam 2  ... c

                a x         stays in its row: its newest token is sent with its next step
                a y         replaces beam 2, which frees its blocks and forks from a
                b z         stays

A beam is an ordinary request, except that it waits for the other beams' candidates once its own are
known. It can be preempted while it waits; its candidates stay valid. A fork shares the full blocks
of its parent and gets a copy of the last, partial one.

The rules (scores, end tokens, when to stop) are those of `generate(num_beams=...)` in transformers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from llmc.engine.plan import RowMask, RowWork, TokenLogprobs
from llmc.engine.request import Extension, Request
from llmc.outputs import FinishReason
from llmc.sampling_params import BeamSearchParams

_NO_BEAM = -1e9  # initial score of all beams but one, which would otherwise duplicate it


class Lifecycle(Protocol):
    """The part of the scheduler that a search uses."""

    def requeue(self, request: Request, /) -> None:
        """Free the row and blocks of a running request and queue it again."""

    def finish(self, request: Request, /) -> None:
        """End a request."""


class Beam(Extension):
    """One beam. `score` is the sum of the log-probabilities of its tokens."""

    def __init__(self, search: BeamSearch, score: float) -> None:
        self.score = score
        self.candidates: TokenLogprobs | None = None  # the most likely next tokens
        self._search = search
        self._must_send_token = False  # the newest token is not in the runner's row
        self.num_candidates = search.num_candidates

    def is_ready(self, request: Request) -> bool:
        return self.candidates is None and request.num_tokens == len(request.token_ids)

    def on_draw(self, request: Request, work: RowWork, masks: list[RowMask]) -> None:
        if self._must_send_token:
            work.entered_token_ids = request.token_ids[-1:]
            self._must_send_token = False

    def on_token(self, request: Request, token: int, logprob: TokenLogprobs | None) -> None:
        self.candidates = logprob
        self._search.on_candidates()

    def on_finish(self, request: Request, error: str | None) -> None:
        self._search.on_finish(error)

    def stay(self, request: Request, token: int, score: float) -> None:
        """Continue with one more token in the same row."""
        request.token_ids.append(token)
        self.parent, self.candidates, self.score = None, None, score
        self._must_send_token = True

    def fork(self, request: Request, parent: Request, token: int, score: float) -> None:
        """Continue from another beam's tokens, discarding what this beam has computed."""
        request.fork_from(parent, token)
        self.parent, self.candidates, self.score = parent, None, score
        self._must_send_token = False  # its row is refilled with all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A finished sequence. `token_ids` are the tokens after the prompt, with the end token."""

    token_ids: Sequence[int]
    cum_logprob: float
    score: float  # with the length penalty
    finish_reason: FinishReason


_Candidate = tuple[float, Request, int]  # score, parent, token


class BeamSearch:
    """One beam search. `finished` has the best hypotheses so far, best first; once `is_over`, they
    are the result."""

    def __init__(
        self, params: BeamSearchParams, members: Sequence[Request], lifecycle: Lifecycle
    ) -> None:
        self.members = tuple(members)
        self.finished: list[Hypothesis] = []
        self.is_over = False
        self.error: str | None = None
        self._params = params
        self._lifecycle = lifecycle
        first = self.members[0]
        self._eos = first.eos_token_ids
        self._max_tokens = first.max_total_tokens - first.num_prompt_tokens
        self._beams: dict[str, Beam] = {}
        for member in self.members:
            beam = Beam(self, 0.0 if member is first else _NO_BEAM)
            member.extension = self._beams[member.request_id] = beam

    @property
    def request_id(self) -> str:
        """The id to pass to `EngineCore.abort` to end the search."""
        return self.members[0].request_id

    @property
    def num_cached_tokens(self) -> int:
        return self.members[0].num_cached_tokens or 0

    @property
    def num_candidates(self) -> int:
        """How many continuations are ranked: enough that a full set of beams has not ended."""
        return max(2, 1 + len(self._eos)) * len(self.members)

    def on_candidates(self) -> None:
        """Once the candidates of all beams are known, choose the continuations to keep."""
        if any(beam.candidates is None for beam in self._beams.values()):
            return
        going_on = self._rank()
        length = self.members[0].num_output_tokens + 1
        if not going_on or self._is_decided(going_on[0][0], length):
            self._lifecycle.finish(self.members[0])
        else:
            self._assign(going_on[: len(self.members)])

    def on_finish(self, error: str | None) -> None:
        """One member has ended: end the others."""
        self.is_over = True
        self.error = self.error or error
        for member in self.members:
            if not member.is_finished:
                self._lifecycle.finish(member)

    def _rank(self) -> list[_Candidate]:
        """The best continuations that have not ended, best first. Ended ones go to `finished`."""
        width = len(self.members)
        length = self.members[0].num_output_tokens + 1
        candidates: list[_Candidate] = []
        for member in self.members:
            beam = self._beams[member.request_id]
            assert beam.candidates is not None
            top = beam.candidates
            for token, logprob in zip(top.top_token_ids, top.top_logprobs, strict=True):
                candidates.append((beam.score + logprob, member, token))
        going_on = []
        best = heapq.nlargest(self.num_candidates, candidates, key=itemgetter(0))
        for place, (score, parent, token) in enumerate(best):
            if token not in self._eos and length < self._max_tokens:
                going_on.append((score, parent, token))
            elif place < width:  # lower-ranked candidates only replace ended ones
                self.finished.append(
                    Hypothesis(
                        token_ids=(*parent.token_ids[parent.num_prompt_tokens :], token),
                        cum_logprob=score,
                        score=score / math.pow(length, self._params.length_penalty),
                        finish_reason="stop" if token in self._eos else "length",
                    )
                )
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[width:]
        return going_on

    def _is_decided(self, best_score: float, length: int) -> bool:
        """Whether no beam can beat the finished ones, or early stopping makes that irrelevant."""
        params = self._params
        if len(self.finished) < len(self.members):
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        return best_score / math.pow(length, params.length_penalty) <= self.finished[-1].score

    def _assign(self, chosen: Sequence[_Candidate]) -> None:
        """Keep the best continuation of each beam in its row; fork the others into free rows."""
        assert len(chosen) == len(self.members), "too few candidates"
        staying: dict[str, _Candidate] = {}
        forking = []
        for one in chosen:
            if staying.setdefault(one[1].request_id, one) is not one:
                forking.append(one)
        leaving = [member for member in self.members if member.request_id not in staying]
        for (score, parent, token), member in zip(forking, leaving, strict=True):
            self._beams[member.request_id].fork(member, parent, token, score)
        for score, member, token in staying.values():
            self._beams[member.request_id].stay(member, token, score)
        for member in leaving:
            self._lifecycle.requeue(member)
