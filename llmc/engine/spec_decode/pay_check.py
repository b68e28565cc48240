"""PayCheck: whether steps with guesses were in fact faster. Estimates propose, the clock decides.

What a guess costs is estimated from single steps (draft_pace.py), which a busy machine, or one
whose steps take now short and now long, can make look too good. So the time of guesses and all is
added up, and held against what plain steps would have taken for as many tokens; where it was
longer, nothing is guessed for a while.
"""

from __future__ import annotations

_TRIAL = 16  # steps with guesses, after which they are judged
_SHORTEST_PAUSE, _LONGEST_PAUSE = 256, 4096  # plain steps
_MEMORY = 0.95  # of the mean time of a plain step, after the next


class PayCheck:
    """Of one engine. Steps are compared with plain ones of about as many rows."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # mean seconds, by the binary order of the rows
        self._num_steps = 0  # with guesses, since they were judged
        self._seconds = 0.0  # that these took
        self._worth = 0.0  # seconds of plain steps for as many tokens
        self._pause = _SHORTEST_PAUSE
        self._num_resting = 0  # plain steps to come

    @property
    def allows_guesses(self) -> bool:
        return self._num_resting == 0

    def saw_plain(self, num_rows: int, seconds: float) -> None:
        order = num_rows.bit_length()
        mean = self._plain.get(order, seconds)
        self._plain[order] = _MEMORY * mean + (1.0 - _MEMORY) * seconds
        self._num_resting = max(0, self._num_resting - 1)

    def saw_guessed(self, num_rows: int, seconds: float, num_accepted: int) -> None:
        """A step with guesses, `seconds` from the last result to this one, guessing included."""
        plain = self._plain.get(num_rows.bit_length())
        if plain is None:
            return
        self._num_steps += 1
        self._seconds += seconds
        self._worth += plain * (1.0 + num_accepted / num_rows)
        if self._num_steps < _TRIAL:
            return
        if self._seconds > self._worth:
            self._num_resting = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = _SHORTEST_PAUSE
        self._num_steps, self._seconds, self._worth = 0, 0.0, 0.0
