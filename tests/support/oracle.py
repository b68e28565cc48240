"""Speculation that knows what will be drawn, and is often right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from fake_runner import VOCAB, draw, history

from llmc.engine.request import Request
from llmc.engine.spec_decode.speculation import Speculation
from llmc.speculative_config import SpeculativeConfig


class Oracle(Speculation):
    """Guesses up to 6 tokens, each wrong with probability `error_rate`. Waits by chance."""

    def __init__(self, rng: random.Random, *, nan: bool = False, error_rate: float = 0.2) -> None:
        super().__init__(SpeculativeConfig())
        self._rng, self._nan, self._error_rate = rng, nan, error_rate

    def is_hopeful(self, request: Request, num_rows: int) -> bool:
        return self._rng.random() < 0.5

    def guess(self, request: Request, most: int, num_rows: int) -> Sequence[int]:
        assert request.num_in_flight == 0 and request.num_tokens == len(request.token_ids)
        rng, tokens = self._rng, list(request.token_ids)
        if rng.random() < 0.2:
            return ()
        for _ in range(min(most, rng.randint(1, 6))):
            num_output = len(tokens) - request.num_prompt_tokens
            stop = sorted(request.stop_token_ids)
            last, min_tokens = history(tokens)[-1], request.sampling.min_tokens
            token = draw(last, request.seed, num_output, min_tokens, stop, self._nan)
            is_wrong = token is None or rng.random() < self._error_rate
            tokens.append(rng.randrange(VOCAB) if is_wrong or token is None else token)
        return tokens[len(request.token_ids) :]


class Replay(Speculation):
    """Guesses what `answers`, by request, say comes next; each with an error by chance."""

    def __init__(
        self,
        answers: Mapping[str, Sequence[int]],
        rng: random.Random,
        *,
        error_rate: float = 0.2,
        fewest: int = 0,
    ) -> None:
        super().__init__(SpeculativeConfig())
        self._answers, self._rng = answers, rng
        self._error_rate, self._fewest = error_rate, fewest

    def is_hopeful(self, request: Request, num_rows: int) -> bool:
        return self._rng.random() < 0.5

    def guess(self, request: Request, most: int, num_rows: int) -> Sequence[int]:
        first, rng = request.num_output_tokens, self._rng
        most = min(most, rng.randint(self._fewest, 6))
        right = self._answers.get(request.request_id, ())[first : first + most]
        return [t if rng.random() >= self._error_rate else (t + 1) % 90 for t in right]
