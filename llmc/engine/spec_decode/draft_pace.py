"""How many tokens to guess: as many as pay, by what was accepted and by what a guess costs.

    Acceptance (one a request)   how likely a guess is right
    DraftCosts (one an engine)   what a guessed token adds to a step, as a share of a plain one

With p and c these two, m guesses give 1 + p + ... + p^m tokens in a step that takes 1 + c m.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

LEAST_GAIN = 1.02  # drafting less than this much better is not worth it
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 256  # tokens between two tries that nobody believes in
_MOST_COST = 8.0
_NUM_TIMES = 9  # measurements that are kept
_LEAST_TIMES = 3  # with fewer nothing is known
_FIRST_COST = 0.1
_EXPIRES = 256  # plain steps after which a measured cost is forgotten: it may have been an accident


def best_length(chance: float, cost: float, most: int) -> int:
    """How many guesses give the most tokens for the time; 0 where none pays."""
    return best_gain(chance, cost, most)[0]


def best_gain(chance: float, cost: float, most: int) -> tuple[int, float]:
    """`best_length`, and how many times as fast it makes a request; 0 and 1 where none pays."""
    best, best_gain = 0, LEAST_GAIN
    tokens, right = 1.0, 1.0
    for length in range(1, most + 1):
        right *= chance
        tokens += right
        gain = tokens / (1.0 + cost * length)
        if gain <= best_gain:
            break
        best, best_gain = length, gain
    return (best, best_gain) if best else (0, 1.0)


class Acceptance:
    """Of one request: how likely a guess is right, and when to try again where it is not.

    The first estimate, `chance`, counts for `weight` tokens; `memory` is how much of what was
    seen counts after the next step with guesses.
    """

    def __init__(self, chance: float, *, weight: float = 3.0, memory: float = 0.75) -> None:
        self._right, self._tested, self._memory = chance * weight, weight, memory
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

    def saw(self, num_tested: int, num_right: int) -> None:
        self._right = self._right * self._memory + num_right
        self._tested = self._tested * self._memory + num_tested
        if num_right:
            self._pause = _SHORTEST_PAUSE
        elif self._next_try is not None:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._next_try = None


def num_tested(num_drafted: int, num_accepted: int) -> int:
    """How many of a step's guesses say something: those after the first wrong one do not."""
    return min(num_accepted + 1, num_drafted)


class StepTimes:
    """The last few steps, by the binary order of their number of rows: one of another size says
    nothing."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._usual: dict[int, float] = {}

    def add(self, num_rows: int, seconds: float) -> None:
        order = num_rows.bit_length()
        times = self._times.setdefault(order, deque(maxlen=_NUM_TIMES))
        times.append(seconds)
        if len(times) >= _LEAST_TIMES:
            self._usual[order] = _usual(times)

    def usual(self, num_rows: int) -> float | None:
        """Seconds; None while too few are known."""
        return self._usual.get(num_rows.bit_length())


class DraftCosts:
    """Measured while serving, from the times between the results of decode steps.

    Until a few plain steps of a size are known nothing is guessed there.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._excluded = 0.0  # seconds since the last result
        self.plain = StepTimes()
        self._costs: deque[float] = deque(maxlen=_NUM_TIMES)
        self._cost = _FIRST_COST
        self._num_plain = 0  # since the last cost was measured or forgotten

    def rest(self) -> None:
        """Nothing runs: the time to the next result is not that of a step."""
        self._last = None

    def exclude(self, seconds: float) -> None:
        """These have passed since the last result, and are not the next step's."""
        if self._last is not None:
            self._last += seconds
            self._excluded += seconds

    def saw_step(self, num_rows: int, num_drafted: int, is_decode: bool) -> float | None:
        """The result of a step came. Only decode steps are measured: -> seconds since the last
        result, those that were excluded among them.
        """
        now, last, excluded = self._clock(), self._last, self._excluded
        self._last, self._excluded = now, 0.0
        if last is None or not is_decode:
            return None
        plain = self.plain.usual(num_rows)
        self._num_plain += 1
        if not num_drafted:
            self.plain.add(num_rows, now - last)
        elif plain is not None:
            cost = ((now - last) / max(plain, 1e-9) - 1.0) * num_rows / num_drafted
            self._costs.append(min(max(cost, 0.0), _MOST_COST))
            self._num_plain = 0
            self._weigh()
        if self._num_plain >= _EXPIRES and self._costs:
            self._costs.popleft()
            self._num_plain = 0
            self._weigh()
        return now - last + excluded

    def cost(self, num_rows: int) -> float | None:
        """Of a guessed token, as a share of a plain step; None while that can't be measured."""
        return None if self.plain.usual(num_rows) is None else self._cost

    def _weigh(self) -> None:
        is_known = len(self._costs) >= _LEAST_TIMES
        self._cost = _usual(self._costs) if is_known else _FIRST_COST


def _usual(values: Collection[float]) -> float:
    """Below the median: what disturbs a measurement makes it longer."""
    return sorted(values)[len(values) // 3]
