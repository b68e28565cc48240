"""Row and Figures: one technique of the table, and its measurements with and without."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from bench.ablations.subject import Bench

Sample = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One sample per round, alternating. `note`: the details of the measurement."""

    on: Sequence[float]
    off: Sequence[float]
    note: str = ""

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.on), statistics.median(self.off)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A technique. `on` and `off` describe what is compared, `model` what it runs on."""

    name: str
    what: str
    on: str
    off: str
    unit: str
    model: str
    better: Literal["lower", "higher"] = "lower"
    measure: Callable[[Bench], Figures]

    def ratio(self, figures: Figures) -> float:
        """How many times better the figure is with the technique."""
        on, off = figures.medians
        better, worse = (off, on) if self.better == "lower" else (on, off)
        return better / worse if worse else float("inf")

    def as_json(self, figures: Figures, seconds: float) -> dict[str, Any]:
        on, off = figures.medians
        return {
            "name": self.name,
            "what": self.what,
            "model": self.model,
            "unit": self.unit,
            "better": self.better,
            "on": {"is": self.on, "median": on, "samples": list(figures.on)},
            "off": {"is": self.off, "median": off, "samples": list(figures.off)},
            "ratio": self.ratio(figures),
            "note": figures.note,
            "seconds": seconds,
            "command": f"python -m bench.ablations --row {self.name}",
        }


def in_turn(on: Sample, off: Sample, rounds: int, *, note: str = "", warm: bool = True) -> Figures:
    """Measure on, off, on, off ..., so that changes of the machine's speed affect both."""
    if warm:
        on()
        off()
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        samples[0].append(on())
        samples[1].append(off())
    return Figures(on=samples[0], off=samples[1], note=note)


def computed(on: float, off: float, note: str) -> Figures:
    """Figures that are counted rather than timed: the same in every round."""
    return Figures(on=[on], off=[off], note=note)
