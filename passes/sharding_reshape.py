"""How a cut is carried through a change of shape, for the rules of `sharding`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from llmc.passes.sharding import Cut, Sections, Unprovable

_MAX_SECTIONS = 64


def through_reshape(
    call: fx.Node, old: Sequence[Any], new: Sequence[Any], cut: Cut
) -> tuple[int, Sections]:
    """Map the cut of a value of shape `old` to shape `new`: (dimension, sections)."""
    for before, after in _groups(call, old, new):
        if cut.dim not in before:
            continue
        before, after = ([d for d in g if s[d] != 1] for g, s in ((before, old), (after, new)))
        if len(before) == len(after) == 1:
            return after[0], cut.sections
        if len(after) == 1:
            return after[0], _flat([int(old[d]) for d in before], before.index(cut.dim), cut)
        if len(before) == 1:
            return _unflat(call, after, [int(new[d]) for d in after], cut)
        break
    raise Unprovable(f"{call.name} mixes parts")


def _groups(
    call: fx.Node, old: Sequence[Any], new: Sequence[Any]
) -> Iterable[tuple[list[int], list[int]]]:
    """Matching groups of dimensions of both shapes, in order; symbolic sizes have their own."""
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and str(old[i]) == str(new[j]):
            yield [i], [j]
            i, j = i + 1, j + 1
            continue
        a: list[int] = []
        b: list[int] = []
        size_a = size_b = 1
        while not a or size_a != size_b:
            take_old = i < len(old) and (size_a <= size_b or j >= len(new))
            if not take_old and j >= len(new):
                raise Unprovable(f"{call.name} mixes parts")
            if take_old:
                if not isinstance(old[i], int):
                    break
                a, size_a, i = [*a, i], size_a * old[i], i + 1
            else:
                if not isinstance(new[j], int):
                    break
                b, size_b, j = [*b, j], size_b * new[j], j + 1
        if size_a != size_b:
            # the sizes before a symbolic size do not match
            raise Unprovable(f"{call.name} mixes parts")
        if not a and not b:
            # a 1 on one side before a symbolic size that both have
            if i < len(old) and not isinstance(old[i], int) and j < len(new) and new[j] == 1:
                yield [], [j]
                j += 1
                continue
            raise Unprovable(f"{call.name} mixes parts")
        yield a, b


def _flat(sizes: Sequence[int], at: int, cut: Cut) -> Sections:
    """Sections of the flattened `sizes`, of which dimension `at` is cut."""
    outer, inner = 1, 1
    for n in sizes[:at]:
        outer *= n
    for n in sizes[at + 1 :]:
        inner *= n
    sections = tuple((length * inner, parts) for length, parts in cut.sections) * outer
    if len(sections) > _MAX_SECTIONS:
        raise Unprovable("the parts lie in too many pieces")
    return sections


def _unflat(call: fx.Node, dims: list[int], sizes: list[int], cut: Cut) -> tuple[int, Sections]:
    """The inverse: which of `dims` is cut, and how."""
    for at in range(len(dims)):
        inner = 1
        for n in sizes[at + 1 :]:
            inner *= n
        count = len(cut.sections)
        for times in range(1, count + 1):  # the same sections, repeated
            own = cut.sections[: count // times]
            if count % times or own * times != cut.sections:
                continue
            if any(n % inner or (n // inner) % parts for n, parts in own):
                continue
            made = tuple((n // inner, parts) for n, parts in own)
            if sum(n for n, _ in made) == sizes[at] and _flat(sizes, at, Cut(0, made)) == (
                cut.sections
            ):
                return dims[at], made
    raise Unprovable(f"{call.name} mixes parts")
