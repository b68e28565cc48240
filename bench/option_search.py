"""Searches for faster launch options, of isolated calls (bench/tune.py) or of whole steps
(bench/step_options.py): from the code's own options it goes to the fastest neighbour, with one
number halved or doubled, until there is none.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch import Tensor

from bench.tuned_table import make_line, using
from llmc.kernels.tuned import FUNCTIONS, Key, Tuned

T = TypeVar("T")
GAIN = 0.97  # of the time of the code's options: what a line of a table must save
_WORST = 1.03  # of any single call or step
_MAX_ERROR = 0.02  # relative to the largest value of the right result
_ROUNDS = 4
_NOTHING: Mapping[Key, Any] = MappingProxyType({})


class Measured(Protocol):
    """What asks for the options. Both methods run it with those of the table in use."""

    @property
    def gain(self) -> float:
        """The ratio of times from which on other options are not worth it."""

    @property
    def noise(self) -> float:
        """The ratio of times from which on a difference may be noise."""

    def run(self) -> None:
        """Launch all kernels, so that they can be compiled together."""

    def seconds(self, budget_s: float) -> dict[str, float]:
        """The times of its calls or steps by name; `budget_s`: for each. Raises an error where a
        kernel can't be compiled, or a result is not the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best options found for `key`, and the seconds of each call or step before and after.
    They are worth it if the ratio of these is below `gain`."""

    key: Key
    options: Any
    before: Mapping[str, float]
    after: Mapping[str, float]
    gain: float = GAIN
    num_tried: int
    failed: Mapping[str, str]

    @property
    def is_faster(self) -> bool:
        ratios = [self.after[case] / self.before[case] for case in self.before]
        return statistics.mean(ratios) < self.gain and max(ratios) < _WORST

    @property
    def line(self) -> dict[str, Any] | None:
        """Of a table; None if the code's options stay."""
        measured = {"before_s": self.before, "after_s": self.after}
        return make_line(self.key, self.options, measured) if self.is_faster else None

    def __str__(self) -> str:
        name, shape, chosen = self.key
        old, new = asdict(chosen), asdict(self.options)
        changed = [
            f"{field} {old[field]} -> {new[field]}" for field in old if old[field] != new[field]
        ]
        times = [
            f"{1e6 * s:.1f} -> {1e6 * self.after[case]:.1f} us" for case, s in self.before.items()
        ]
        return (
            f"{name}{shape}: {', '.join(changed) or 'as the code chooses'}"
            f"{'' if self.is_faster or not changed else ' (not kept)'}; {', '.join(times)}; "
            f"{self.num_tried} tried, {len(self.failed)} failed"
        )


def compiling_together() -> contextlib.AbstractContextManager[None]:
    from llmc.kernels.triton import launch  # imports triton

    return launch.compiling_together()


def neighbours(function: Tuned[*tuple[Any, ...], Any], at: Any, chosen: Any) -> Iterator[Any]:
    """`at` with one number changed, where the kernel still computes what it does with `chosen`.
    Flags stay: what they do depends on more than the arguments, such as the size of blocks."""
    for name, value in asdict(at).items():
        if type(value) is bool:
            continue
        by_one = name == "num_stages"
        for other in (value - 1, value + 1) if by_one else (value // 2, value * 2):
            new = replace(at, **{name: other})
            if new != at and function.accepts(new, chosen):
                yield new


def search(
    key: Key,
    measured: Measured,
    deadline: float,
    *,
    kept: Mapping[Key, Any] = _NOTHING,
    budget_s: float = 0.05,
) -> Found:
    """Descend from the code's options to faster ones until `deadline` (of time.monotonic).
    `kept`: options of other keys that are in use meanwhile."""

    def seconds(options: Any, budget_s: float = budget_s) -> dict[str, float]:
        with using({**kept, key: options}):
            return measured.seconds(budget_s)

    chosen = best = key[2]
    before = seconds(chosen)
    best_ratio, tried, failed = 1.0, {chosen}, {}
    for _ in range(_ROUNDS):
        start = best
        new = [one for one in neighbours(FUNCTIONS[key[0]], start, chosen) if one not in tried]
        if time.monotonic() > deadline:
            break
        with compiling_together():
            for options in new:
                with contextlib.suppress(Exception), using({**kept, key: options}):
                    measured.run()
        for options in new:
            if time.monotonic() > deadline:
                break
            tried.add(options)
            try:
                times = seconds(options)
            except Exception as error:  # whatever it is, the others are tried
                failed[str(options)] = f"{type(error).__name__}: {error}"[:200]
                continue
            ratio = statistics.mean(times[case] / before[case] for case in before)
            if ratio < measured.noise * best_ratio:
                best, best_ratio = options, ratio
        if best == start:
            break
    after = before
    if best != chosen:  # both again and longer: the least of many is lucky
        before, after = (seconds(options, 4 * budget_s) for options in (chosen, best))
    return Found(
        key=key, options=best, before=before, after=after, gain=measured.gain,
        num_tried=len(tried) - 1, failed=failed,
    )  # fmt: skip


def search_all(
    asked: Mapping[Key, Sequence[T]],
    measured: Callable[[Sequence[T]], Measured],
    seconds: float,
    *,
    kept: Mapping[Key, Any] = _NOTHING,
    budget_s: float = 0.05,
) -> Iterator[Found]:
    """Search for all in order, each in a share of the time that is left, by how many ask for it.
    `measured` makes what is timed of them. `kept` can change between two searches."""
    end = time.monotonic() + seconds
    num_left = sum(map(len, asked.values()))
    for index, (key, askers) in enumerate(asked.items()):
        now = time.monotonic()
        if now > end:
            print(f"no time is left for {len(asked) - index} of {len(asked)}", flush=True)
            break
        deadline = now + (end - now) * len(askers) / num_left
        num_left -= len(askers)
        try:
            found = search(key, measured(askers), deadline, kept=kept, budget_s=budget_s)
        except Exception as error:  # whatever it is, the others are searched
            print(f"{key[0]}{key[1]} failed: {type(error).__name__}: {error}", flush=True)
            continue
        print(found, flush=True)
        yield found


@contextlib.contextmanager
def only_kernels() -> Iterator[None]:
    """Within this, an op whose kernel can't be compiled fails, instead of running its reference.
    New memory is filled with NaN: it may hold the right results of the call before."""
    from llmc.kernels.triton import define  # imports triton

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mock.patch.object(define, "KernelError", ()):  # which the ops catch
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Raises RuntimeError where a result is not the right one."""
    for mine, right in zip(got, want, strict=True):
        mine, right = mine.double(), right.double()
        error = (mine - right).abs().max() / right.abs().max()
        if not error <= _MAX_ERROR:  # nor if it is NaN
            raise RuntimeError(f"another result than the right one: error {error:.1e}")
