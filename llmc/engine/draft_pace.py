"""How many tokens to guess: as many as pay, by what was accepted and by what a guess costs.

    Acceptance (one a request)   how likely a guess is right
    DraftCosts (one an engine)   what a guessed token adds to a step, as a share of a plain one

With p and c these two, m guesses give 1 + p + ... + p^m tokens in a step that takes 1 + c m.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

LEAST_GAIN = 1.02  # drafting less than this much better is not worth it
_MEMORY = 0.75  # of what was accepted, per step with guesses
_WEIGHT = 3.0  # tokens that a first estimate counts for
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 256  # tokens between two tries that nobody believes in
_MOST_COST = 8.0
_NUM_TIMES = 9  # measurements that are kept
_LEAST_TIMES = 3  # with fewer nothing is known
_FIRST_COST = 0.1
_EXPIRES = 256  # plain steps after which a measured cost is forgotten: it may have been an accident


def best_length(chance: float, cost: float, most: int) -> int:
    """How many guesses give the most tokens for the time; 0 where none pays."""
    best, best_gain = 0, LEAST_GAIN
    tokens, right = 1.0, 1.0
    for length in range(1, most + 1):
        right *= chance
        tokens += right
        gain = tokens / (1.0 + cost * length)
        if gain <= best_gain:
            break
        best, best_gain = length, gain
    return best


class Acceptance:
    """Of one request: how likely a guess is right, and when to try again where it is not."""

    def __init__(self, chance: float) -> None:
        self._right, self._tested = chance * _WEIGHT, _WEIGHT
        self._pause = _SHORTEST_PAUSE
        self._next_try: int | None = None  # a number of tokens

    @property
    def chance(self) -> float:
        return self._right / self._tested

    def length(self, cost: float, most: int, num_tokens: int) -> int:
        """How many tokens to guess when the request has `num_tokens`."""
        length = best_length(self.chance, cost, most)
        if length:
            self._next_try = None
        elif self._next_try is None:
            # A try that fails costs `cost` steps; it must not come before they have paid.
            self._next_try = num_tokens + int(self._pause * max(1.0, 4.0 * cost))
        elif num_tokens >= self._next_try:
            return 1
        return length

    def saw(self, num_drafted: int, num_accepted: int) -> None:
        num_tested = min(num_accepted + 1, num_drafted)  # beyond the first wrong one says nothing
        self._right = self._right * _MEMORY + num_accepted
        self._tested = self._tested * _MEMORY + num_tested
        if num_accepted:
            self._pause = _SHORTEST_PAUSE
        elif self._next_try is not None:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._next_try = None


class DraftCosts:
    """Measured while serving, from the times between the results of decode steps.

    Plain steps are kept by the binary order of their number of rows: a step of another size says
    nothing. Until a few of a size are known nothing is guessed there.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._plain: dict[int, deque[float]] = {}
        self._costs: deque[float] = deque(maxlen=_NUM_TIMES)
        self._num_plain = 0  # since the last cost was measured or forgotten

    def rest(self) -> None:
        """Nothing runs: the time to the next result is not that of a step."""
        self._last = None

    def saw_step(self, num_rows: int, num_drafted: int, is_decode: bool) -> None:
        """The result of a step came. Only decode steps are measured."""
        now, last = self._clock(), self._last
        self._last = now
        if last is None or not is_decode:
            return
        plain = self._plain.setdefault(num_rows.bit_length(), deque(maxlen=_NUM_TIMES))
        self._num_plain += 1
        if not num_drafted:
            plain.append(now - last)
        elif len(plain) >= _LEAST_TIMES:
            cost = ((now - last) / max(_usual(plain), 1e-9) - 1.0) * num_rows / num_drafted
            self._costs.append(min(max(cost, 0.0), _MOST_COST))
            self._num_plain = 0
        if self._num_plain >= _EXPIRES and self._costs:
            self._costs.popleft()
            self._num_plain = 0

    def cost(self, num_rows: int) -> float | None:
        """Of a guessed token, as a share of a plain step; None while that can't be measured."""
        plain = self._plain.get(num_rows.bit_length())
        if plain is None or len(plain) < _LEAST_TIMES:
            return None
        return _usual(self._costs) if len(self._costs) >= _LEAST_TIMES else _FIRST_COST


def _usual(values: Collection[float]) -> float:
    """Below the median: what disturbs a measurement makes it longer."""
    return sorted(values)[len(values) // 3]
