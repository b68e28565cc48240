"""Finds the cause of a difference: the compiler, a kernel, a pass, or the capture itself.

Components are switched off one after another, from the outside in, until the difference is gone:
compiled code, then fast kernels, then passes. Passes are found by bisection. Each one found stays
off, and the search continues until the step is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llmc.check.variants import Subject, Variant, kernels_of

Kind = Literal["compiler", "kernel", "pass", "engine", "capture", "cache"]
Good = Callable[[Variant], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """`switch` is the option to serve without it; "" if there is none."""

    kind: Kind
    name: str
    switch: str
    layer: int | None = None  # the first whose hidden state is wrong

    def __str__(self) -> str:
        where = "" if self.layer is None else f", first seen at the output of layer {self.layer}"
        what = {
            "compiler": f"Inductor's code at {self.name}",
            "kernel": f"kernel {self.name}",
            "pass": f"pass {self.name}",
            "cache": self.name,
            "engine": "a pass that can't be switched off",
            "capture": "the capture of the model's code",
        }
        return what[self.kind] + where


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`is_fixable`: the step is right without the culprits."""

    culprits: tuple[Culprit, ...]
    is_fixable: bool


def bisect(
    subject: Subject,
    variant: Variant,
    good: Good,
    *,
    captured_is_good: Callable[[], bool],
    first_layer: Callable[[Variant], int | None],
) -> Diagnosis:
    """Find what makes `variant` wrong. `first_layer` returns the first wrong layer of a run."""
    if variant.level > 0 and good(replace(variant, level=0)):
        culprit = Culprit(kind="compiler", name=f"-O{variant.level}", switch="-O0")
        return Diagnosis(culprits=(culprit,), is_fixable=True)
    variant = replace(variant, level=0)
    if good(replace(variant, kernels=())):
        found = _kernels(subject, variant, good)
        return Diagnosis(culprits=found, is_fixable=False)
    names: list[str] = []
    is_fixable = False
    while not is_fixable and (name := _first_wrong_pass(subject, variant, good)) is not None:
        names.append(name)
        variant = _switched(variant, name, False)
        is_fixable = good(variant)
    culprits = [
        Culprit(
            kind="pass",
            name=name,
            switch=f"--disable-pass {name}",
            layer=first_layer(_switched(variant, name, True)),
        )
        for name in names
    ]
    if not is_fixable:
        kind: Kind = "engine" if captured_is_good() else "capture"
        culprits.append(Culprit(kind=kind, name="", switch="", layer=first_layer(variant)))
    return Diagnosis(culprits=tuple(culprits), is_fixable=is_fixable)


def _switched(variant: Variant, name: str, on: bool) -> Variant:
    return replace(variant, switches={**variant.switches, name: on})


def _kernels(subject: Subject, variant: Variant, good: Good) -> tuple[Culprit, ...]:
    """The ops whose fast version alone causes the difference; all fast ones if none does."""
    used = kernels_of(subject.rewrite(variant).graph)
    fast = {op: library for op, library in used.items() if library != "reference"}
    alone = [op for op in fast if not good(replace(variant, kernels=(op,)))]
    return tuple(
        Culprit(kind="kernel", name=f"{op} ({fast[op]})", switch="") for op in alone or fast
    )


def _first_wrong_pass(subject: Subject, variant: Variant, good: Good) -> str | None:
    """The first pass that makes the step wrong, by bisection; None if it is wrong without any."""
    optional = [
        p.name
        for p in subject.options.passes
        if not p.required and p.name not in subject.needed and p.is_on(variant.switches)
    ]

    def first(count: int) -> Variant:
        off: Mapping[str, bool] = dict.fromkeys(optional[count:], False)
        return replace(variant, switches={**variant.switches, **off})

    if not good(first(0)):
        return None
    low, high = 0, len(optional)  # good with `low` passes, wrong with `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(first(middle)) else (low, middle)
    return optional[low]
