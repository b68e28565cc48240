"""Matches rotary embeddings in the forms in which models' code writes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.rms_norm import add_rms_norm, rms_norm
from llmc.passes.edit import CASTS, arguments, aten, is_call, operands, swapped, through, val
from llmc.passes.inputs import ConstantInput, StepInput, add_input, input_of

_VIEWS = (aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)


@dataclass(frozen=True, slots=True)
class Rotary:
    """x [1, H, T, D], whose first channels are rotated by cos and sin.

    Some models rotate before they transpose the heads to the front: then x is [1, T, H, D].

    Channel i is rotated together with i + Dr / 2, or with its neighbor if interleaved. If moved,
    the model then puts the first channels of all pairs before the second ones; as queries and keys
    do so alike, their products are those without it.
    """

    x: fx.Node
    cos: fx.Node  # table placeholders [positions, Dr], or [positions, Dr / 2] when halved
    sin: fx.Node
    halved: bool = False
    interleaved: bool = False
    moved: bool = False
    angles: bool = False  # both tables are that of the angles, halved
    heads_last: bool = False
    norm: fx.Node | None = None  # the call of rms_norm or add_rms_norm after the rotation

    @property
    def kind(self) -> tuple[bool, ...]:
        """Rotations of one kind by the same tables can be made by one op."""
        return self.halved, self.interleaved, self.moved, self.angles


def find_rotary(flat: Any) -> Rotary | None:
    """Match heads of which all or the first channels are rotated, and perhaps normalized then."""
    node, heads_last = _heads_of(flat)
    norm = None
    if is_call(node, rms_norm.overload):
        norm, node = node, through(arguments(node).x, *CASTS)
    elif _is_first_of(node, add_rms_norm.overload):
        norm = node = node.args[0]  # of the rotation's own sum
    found = _found(rotation(node) or _partial(node), heads_last)
    return found and replace(found, norm=norm)


def _is_first_of(node: Any, target: Any) -> bool:
    """Whether a value is the first result of a call of `target`."""
    return is_call(node, operator.getitem) and node.args[1] == 0 and is_call(node.args[0], target)


def find_last_rotary(flat: Any) -> tuple[fx.Node, Rotary] | None:
    """Match heads of which the last channels are rotated: the channels before them, and these."""
    node, heads_last = _heads_of(flat)
    pair = _pair_of(node)
    found = pair and _found(rotation(through(pair[1], *CASTS)), heads_last)
    return None if pair is None or found is None else (pair[0], found)


def _heads_of(flat: Any) -> tuple[Any, bool]:
    """The value that page_attention squeezed, and transposed unless its heads came last."""
    node = through(flat, aten.squeeze.dim)
    heads_last = not is_call(node, aten.transpose.int)
    # casts are skipped, here and below: the op uses float32 and rounds once
    node = through(node if heads_last else arguments(node).self, *CASTS)
    back = None if heads_last else swapped(node, 1, 2)  # the model rotated before it transposed
    return (node, heads_last) if back is None else (through(back, *CASTS), True)


def _found(rotary: Rotary | None, heads_last: bool) -> Rotary | None:
    return rotary and replace(rotary, x=through(rotary.x, *CASTS), heads_last=heads_last)


def rotation(node: Any) -> Rotary | None:
    """Match a value of which all channels are rotated."""
    return _turn(node) or _two_halves(node) or _complex_product(node)


def _turn(node: Any) -> Rotary | None:
    """Match x * cos + turned * sin, where turned is x rotated by a quarter turn."""
    if not is_call(node, aten.add.Tensor, add_rms_norm.overload):
        return None
    for straight, turned in operands(node):
        if not (is_call(straight, aten.mul.Tensor) and is_call(turned, aten.mul.Tensor)):
            continue
        for x, cos in operands(straight):
            for other, sin in operands(turned):
                c, s = _table_of(cos), _table_of(sin)
                if c is None or s is None:
                    continue
                x, other = through(x, *CASTS), through(other, *CASTS)
                if _swaps_halves(other, x):
                    return Rotary(x, c, s)
                if _swaps_neighbours(other, x):
                    return Rotary(x, c, s, interleaved=True)
    return None


def _swaps_neighbours(flat: Any, x: Any) -> bool:
    """Whether flat = stack([-x[1::2], x[0::2]], -1).flatten(-2)."""
    if not is_call(flat, aten.flatten.using_ints) or val(flat).dim() != val(x).dim():
        return False
    stack = arguments(flat).self
    if not is_call(stack, aten.stack.default) or len(arguments(stack).tensors) != 2:
        return False
    if arguments(stack).dim not in (-1, val(x).dim()):
        return False
    minus, even = arguments(stack).tensors
    return (
        is_call(minus, aten.neg.default)
        and _slice_is(arguments(minus).self, x, 1, None, step=2)
        and _slice_is(even, x, 0, None, step=2)
    )


def _swaps_halves(cat: Any, x: Any) -> bool:
    """Whether cat = cat(-x[half:], x[:half])."""
    pair = _pair_of(cat)
    if pair is None or not is_call(pair[0], aten.neg.default):
        return False
    width = val(x).shape[-1]
    minus, first = arguments(pair[0]).self, pair[1]
    return _slice_is(minus, x, width // 2, None) and _slice_is(first, x, 0, width // 2)


def _pair_of(cat: Any) -> tuple[Any, Any] | None:
    """The two tensors of a concatenation of two."""
    if not is_call(cat, aten.cat.default) or len(arguments(cat).tensors) != 2:
        return None
    first, second = arguments(cat).tensors
    return first, second


def _slice_is(node: Any, source: Any, start: int, end: int | None, *, step: int = 1) -> bool:
    """Whether node is source[..., start:end:step]."""
    node = through(node, *CASTS)
    if not is_call(node, aten.slice.Tensor):
        return False
    cut = arguments(node)
    if through(cut.self, *CASTS) is not source or cut.dim not in (-1, val(source).dim() - 1):
        return False
    if (cut.start or 0) != start or (cut.step or 1) != step:
        return False
    width = val(source).shape[-1]
    high = width if cut.end is None else min(cut.end, width)
    return bool(high == (width if end is None else end))


def _partial(node: Any) -> Rotary | None:
    """Match cat(rotated first channels, the rest)."""
    pair = _pair_of(node)
    inner = pair and _turn(pair[0])
    if pair is None or inner is None or not is_call(inner.x, aten.slice.Tensor):
        return None
    rest = pair[1]
    x = through(arguments(inner.x).self, *CASTS)
    width = int(val(inner.x).shape[-1])
    if not (_slice_is(inner.x, x, 0, width) and _slice_is(rest, x, width, None)):
        return None
    return replace(inner, x=x)


def _two_halves(node: Any) -> Rotary | None:
    """Match cat(a cos - b sin, b cos + a sin) with a, b the two halves of x, or its channels with
    even and with odd numbers."""
    minus: Any
    plus: Any
    minus, plus = _pair_of(node) or (None, None)
    if not (is_call(minus, aten.sub.Tensor) and is_call(plus, aten.add.Tensor)):
        return None
    a_cos, b_sin = arguments(minus).self, arguments(minus).other
    if not (is_call(a_cos, aten.mul.Tensor) and is_call(b_sin, aten.mul.Tensor)):
        return None
    a, b = arguments(a_cos).self, arguments(b_sin).self
    cos, sin = _table_of(arguments(a_cos).other), _table_of(arguments(b_sin).other)
    halves, neighbours = _source_of_halves(a, b), _source_of_neighbours(a, b)
    x = halves or neighbours
    if cos is None or sin is None or x is None:
        return None
    for b_cos, a_sin in operands(plus):
        if _is_product(b_cos, b, cos) and _is_product(a_sin, a, sin):
            apart = halves is None
            return Rotary(x, cos, sin, halved=True, interleaved=apart, moved=apart)
    return None


def _is_product(node: Any, half: Any, table: fx.Node) -> bool:
    if not is_call(node, aten.mul.Tensor):
        return False
    given = arguments(node)
    return given.self is half and _table_of(given.other) is table


def _source_of_halves(a: Any, b: Any) -> fx.Node | None:
    if not (is_call(a, operator.getitem) and is_call(b, operator.getitem)):
        return None
    first, second = arguments(a), arguments(b)
    chunk = first.source
    if second.source is not chunk or (first.index, second.index) != (0, 1):
        return None
    if not is_call(chunk, aten.chunk.default) or arguments(chunk).chunks != 2:
        return None
    source: fx.Node = arguments(chunk).self
    return source if arguments(chunk).dim in (-1, val(source).dim() - 1) else None


def _source_of_neighbours(a: Any, b: Any) -> fx.Node | None:
    """x, if a is x[..., 0::2] and b is x[..., 1::2]."""
    if not is_call(a, aten.slice.Tensor):
        return None
    x: fx.Node = through(arguments(a).self, *CASTS)
    both = _slice_is(a, x, 0, None, step=2) and _slice_is(b, x, 1, None, step=2)
    return x if both else None


def _complex_product(node: Any) -> Rotary | None:
    """Match a product of complex numbers: of neighbours in x, and of 1 turned by angles."""
    if not is_call(node, aten.flatten.using_ints):
        return None
    real = arguments(node).self
    if not is_call(real, aten.view_as_real.default) or val(node).dim() != val(real).dim() - 1:
        return None
    product = arguments(real).self
    for number, turns in operands(product) if is_call(product, aten.mul.Tensor) else ():
        polar = through(turns, *_VIEWS)
        if not (
            is_call(number, aten.view_as_complex.default) and is_call(polar, aten.polar.default)
        ):
            continue
        size, angles = arguments(polar).abs, _table_of(arguments(polar).angle)
        pairs = arguments(number).self
        if angles is None or not is_call(size, aten.ones_like.default):
            continue
        if not is_call(pairs, aten.reshape.default, aten.view.default):
            continue
        x = through(arguments(pairs).self, *CASTS)
        shape = [str(n) for n in val(x).shape[:-1]]
        if [str(n) for n in val(pairs).shape] == [*shape, str(val(x).shape[-1] // 2), "2"]:
            return Rotary(x, angles, angles, halved=True, interleaved=True, angles=True)
    return None


def _table_of(node: Any) -> fx.Node | None:
    """The table placeholder whose rows for the tokens' positions a value is, looking through views.
    The fused op reads its rows by these positions too."""
    node = through(node, *_VIEWS)
    if not is_call(node, aten.index_select.default):
        return None
    if input_of(arguments(node).index) != StepInput(name="positions"):
        return None
    table: fx.Node = arguments(node).self
    return table if isinstance(input_of(table), ConstantInput) else None


def tables_of(
    graph: fx.Graph, rotary: Rotary, made: dict[tuple[Any, ...], fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """The tables of cosines and sines in float32, with a number for each rotated channel; each is
    created once, if needed."""
    return (
        _table(graph, rotary.cos, torch.cos, rotary, made),
        _table(graph, rotary.sin, torch.sin, rotary, made),
    )


def _table(
    graph: fx.Graph,
    table: fx.Node,
    of_angles: Callable[[Tensor], Tensor],
    rotary: Rotary,
    made: dict[tuple[Any, ...], fx.Node],
) -> fx.Node:
    role = input_of(table)
    assert isinstance(role, ConstantInput)
    rows = role.tensor
    is_plain = rows.dtype == torch.float32 and rows.dim() == 2 and rows.is_contiguous()
    if is_plain and not rotary.halved:
        return table  # usable as is; layers that are not fused may read it too
    key = (table, of_angles if rotary.angles else None, rotary.kind)
    if key not in made:
        rows = rows.flatten(1).float()
        rows = of_angles(rows) if rotary.angles else rows
        if rotary.halved:
            rows = rows.repeat_interleave(2, -1) if rotary.interleaved else rows.repeat(1, 2)
        fake = val(table).new_empty(rows.shape, dtype=torch.float32)
        name = f"{table.name}_{of_angles.__name__}" if rotary.angles else f"{table.name}_f32"
        made[key] = add_input(graph, name, ConstantInput(tensor=rows.contiguous()), fake)
    return made[key]
