"""Speculation that knows the tokens that will be sampled, and is often right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from fake_runner import VOCAB, draw, history

from llmc.engine.request import Request
from llmc.engine.spec_decode.policy import SpeculationPolicy
from llmc.engine.spec_decode.speculation import Drafter, Speculation
from llmc.speculative_config import SpeculativeConfig

CONFIG = SpeculativeConfig(num_speculative_tokens=6)


class AlwaysOn(SpeculationPolicy):
    """Drafts from the first step on, regardless of the cost."""

    def is_on(self, num_rows: int) -> bool:
        return True


class Oracle(Speculation):
    """Up to 6 draft tokens, each wrong with probability `error_rate`. Randomly waits."""

    def __init__(self, rng: random.Random, *, nan: bool = False, error_rate: float = 0.2) -> None:
        super().__init__(CONFIG, AlwaysOn())
        self.rng, self.nan, self.error_rate = rng, nan, error_rate

    def drafter(self, request: Request) -> Drafter:
        return OracleDrafter(self)


class OracleDrafter(Drafter):
    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self._oracle = oracle

    def expects_draft(self, request: Request) -> bool:
        return self._oracle.rng.random() < 0.5

    def propose(self, request: Request, most: int) -> Sequence[int]:
        assert request.num_in_flight == 0 and request.num_tokens == len(request.token_ids)
        rng, tokens = self._oracle.rng, list(request.token_ids)
        if rng.random() < 0.2:
            return ()
        for _ in range(min(most, rng.randint(1, 6))):
            num_output = len(tokens) - request.num_prompt_tokens
            stop = sorted(request.stop_token_ids)
            last, min_tokens = history(tokens)[-1], request.sampling.min_tokens
            token = draw(last, request.seed, num_output, min_tokens, stop, self._oracle.nan)
            is_wrong = token is None or rng.random() < self._oracle.error_rate
            tokens.append(rng.randrange(VOCAB) if is_wrong or token is None else token)
        return tokens[len(request.token_ids) :]


class Replay(Speculation):
    """Proposes the next tokens of `answers`, by request, with random errors."""

    def __init__(
        self,
        answers: Mapping[str, Sequence[int]],
        rng: random.Random,
        *,
        error_rate: float = 0.2,
        fewest: int = 0,
    ) -> None:
        super().__init__(CONFIG, AlwaysOn())
        self.answers, self.rng = answers, rng
        self.error_rate, self.fewest = error_rate, fewest

    def drafter(self, request: Request) -> Drafter:
        return ReplayDrafter(self)


class ReplayDrafter(Drafter):
    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._replay = replay

    def expects_draft(self, request: Request) -> bool:
        return self._replay.rng.random() < 0.5

    def propose(self, request: Request, most: int) -> Sequence[int]:
        first, rng = request.num_output_tokens, self._replay.rng
        most = min(most, rng.randint(self._replay.fewest, 6))
        right = self._replay.answers.get(request.request_id, ())[first : first + most]
        return [t if rng.random() >= self._replay.error_rate else (t + 1) % 90 for t in right]
