"""ReadPace: whether it pays that the draft model reads a text, so as to guess how it goes on."""

from __future__ import annotations

from collections.abc import Callable

_FIRST_ANSWER = 128.0  # tokens
_MEMORY = 0.9
_FIRST_COST = 0.1  # of a token that is read along with others, as a share of a step
_TRIAL_SHARE = 0.01  # of the time that may go into texts which do not seem worth it


class ReadPace:
    """Measured while serving: what a token costs to read, and how long answers are.

    `step_seconds` are those of a draft step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds_per_token: float | None = None
        self._answer = _FIRST_ANSWER
        self._last_read = clock()

    def pays(self, num_tokens: int, num_left: int, saved: float, step_seconds: float) -> bool:
        """Whether to read `num_tokens` for an answer of up to `num_left` more tokens, each of
        which would take `saved` seconds less."""
        return min(num_left, self._answer) * saved > self._cost(num_tokens, step_seconds)

    def may_try(self, num_tokens: int, step_seconds: float) -> bool:
        """Whether so much time has passed that reading these even in vain would not matter."""
        elapsed = self._clock() - self._last_read
        return elapsed * _TRIAL_SHARE >= self._cost(num_tokens, step_seconds)

    def _cost(self, num_tokens: int, step_seconds: float) -> float:
        if self._seconds_per_token is None:
            return num_tokens * step_seconds * _FIRST_COST
        return num_tokens * self._seconds_per_token

    def took(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._seconds_per_token = seconds / num_tokens
            self._last_read = self._clock()

    def saw_answer(self, num_tokens: int) -> None:
        """A request ended with so many tokens."""
        self._answer = _MEMORY * self._answer + (1.0 - _MEMORY) * num_tokens
