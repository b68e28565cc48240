"""SpeculationPolicy: one switch for all requests, on while steps with draft tokens are faster.

The decision is based on time. While the switch is off, plain decode steps are timed. While it is
on, the time of all decode steps, drafting included, is compared with the time that plain steps
would have taken for as many tokens:

    off --rest is over--> trial: 16 steps --2 % faster--> on --slower--> off
                            '------ slower, or has lost too much ------^

The rest is long enough that the time lost is 1 % of the total. A trial can lose the time of 4 plain
steps, and of twice as many after each failed trial: a draft model has to compute a long prompt
before it saves anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

Clock = Callable[[], float]

_TRIAL = 16  # steps per evaluation
_MIN_GAIN = 1.02  # required speedup in a trial; afterwards not being slower is enough
_MIN_LOSS, _MAX_LOSS = 4.0, 64.0  # plain steps that a trial can lose
_LOSS_SHARE = 0.01
_MIN_REST, _MAX_REST = 64, 6400  # plain steps
_NUM_TIMES, _LEAST_TIMES = 8, 3
_MAX_AGE = 256  # steps after which plain steps are timed again


class PlainTimes:
    """Durations in seconds of recent plain steps with about the same number of rows."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self.mean: float | None = None  # without the slowest; None while there are too few

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        if len(self._times) >= _LEAST_TIMES:
            self.mean = (sum(self._times) - max(self._times)) / (len(self._times) - 1)


class SpeculationPolicy:
    """Decides when to draft. Steps are compared with plain ones in the same power-of-two range of
    rows."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._plain: dict[int, PlainTimes] = {}
        self._last: float | None = None  # when the last result arrived
        self._num_resting = 0  # plain steps still to run
        self._is_trial = True
        self._max_loss = _MIN_LOSS
        self._num_steps = 0  # in this trial, or since the last decision
        self._seconds = 0.0  # time that these took
        self._plain_seconds = 0.0  # time that plain steps would have taken for their tokens
        self._age = 0  # steps since the last plain one

    def is_on(self, num_rows: int) -> bool:
        """Whether to draft in a step with this many running requests."""
        return self._num_resting == 0 and self._times(num_rows).mean is not None

    def pause(self) -> None:
        """Note that the engine is idle: the time until the next result is not that of a step."""
        self._last = None

    def on_step(
        self,
        num_rows: int,
        *,
        num_running: int,
        num_tokens: int,
        is_decode: bool,
        is_plain: bool,
        draft_seconds: float,
    ) -> None:
        """Record a step when its result arrives. Unless it is a decode, only drafting counts."""
        now, last = self.clock(), self._last
        self._last = now
        if last is None:
            return
        times = self._times(num_running)
        if is_plain and is_decode and num_rows == num_running:
            times.add(now - last)
            self._num_resting = max(self._num_resting - 1, 0)
            self._age = 0
        elif self._num_resting == 0 and times.mean is not None:
            plain_seconds = times.mean * num_tokens / num_running if is_decode else 0.0
            self._judge(times.mean, now - last if is_decode else draft_seconds, plain_seconds)

    def _judge(self, plain_step: float, seconds: float, plain_seconds: float) -> None:
        self._num_steps += 1
        self._age += 1
        self._seconds += seconds
        self._plain_seconds += plain_seconds
        num_lost = (self._seconds - self._plain_seconds) / max(plain_step, 1e-9)
        least_gain = _MIN_GAIN if self._is_trial else 1.0
        if num_lost > self._max_loss or (
            self._num_steps >= _TRIAL and self._plain_seconds < least_gain * self._seconds
        ):
            self._is_trial = True
            self._max_loss = min(2 * self._max_loss, _MAX_LOSS)
            self._rest(int(min(max(num_lost / _LOSS_SHARE, _MIN_REST), _MAX_REST)))
        elif self._age >= _MAX_AGE:
            self._rest(_NUM_TIMES)
        elif self._num_steps >= _TRIAL:
            self._is_trial, self._max_loss = False, _MIN_LOSS
            self._rest(0)

    def _rest(self, num_steps: int) -> None:
        self._num_resting = num_steps
        self._num_steps, self._seconds, self._plain_seconds = 0, 0.0, 0.0

    def _times(self, num_rows: int) -> PlainTimes:
        return self._plain.setdefault(num_rows.bit_length(), PlainTimes())
