"""The rules of `sharding`: how a cut is carried through the ops of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.write_kv import write_kv
from llmc.passes.edit import arguments, aten, is_call, only_user, val
from llmc.passes.inputs import WeightInput, input_of
from llmc.passes.sharding import Region, Rule, Sections, Unprovable
from llmc.passes.sharding_reshape import through_reshape

SPLITS = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def rule_of(call: fx.Node) -> Rule | None:
    """The rule for a call, or None if it is not known how its values can be cut."""
    rule = _RULES.get(call.target)
    if rule is None and torch.Tag.pointwise in getattr(call.target, "tags", ()):
        return _pointwise
    return rule


def _tensors(call: fx.Node) -> list[fx.Node]:
    return [n for n in call.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]


def _pointwise(region: Region, call: fx.Node) -> None:
    """Values are cut in the same dimension, counted from the last; sizes of 1 are broadcast."""
    rank = val(call).dim()
    sources = _tensors(call)
    for value in (call, *sources):
        if (found := region.cuts.get(value)) is None:
            continue
        dim = found.dim + rank - val(value).dim()
        for other in (call, *sources):
            at = dim - rank + val(other).dim()
            if at >= 0 and val(other).shape[at] != 1:
                region.cut(other, at, found.sections)
            else:
                region.keep(other)


def _same(move: Callable[[fx.Node, int], int | None]) -> Rule:
    """The rule for ops with one input and one output; `move(call, dim)` maps a dimension of the
    input to that of the output, or None if the output does not have it."""

    def rule(region: Region, call: fx.Node) -> None:
        source = call.args[0]
        places = {d: move(call, d) for d in range(val(source).dim())}
        if (cut := region.cuts.get(source)) is not None:  # type: ignore[arg-type]
            to = places[cut.dim]
            if to is None:
                raise Unprovable(f"{call.name} needs whole rows")
            region.cut(call, to, cut.sections)
        elif (cut := region.cuts.get(call)) is not None:
            origin = next((d for d, to in places.items() if to == cut.dim), None)
            if origin is None:
                raise Unprovable(f"{call.name} creates the dimension")
            region.cut(source, origin, cut.sections)

    return rule


def _positive(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _rank(call: fx.Node) -> int:
    return val(call.args[0]).dim()


def _move_transpose(call: fx.Node, dim: int) -> int:
    given = arguments(call)
    a, b = _positive(given.dim0, _rank(call)), _positive(given.dim1, _rank(call))
    return {a: b, b: a}.get(dim, dim)


def _move_permute(call: fx.Node, dim: int) -> int:
    return [_positive(d, _rank(call)) for d in arguments(call).dims].index(dim)


def _move_unsqueeze(call: fx.Node, dim: int) -> int:
    return dim + (_positive(arguments(call).dim, _rank(call) + 1) <= dim)


def _move_squeeze(call: fx.Node, dim: int) -> int | None:
    at = _positive(arguments(call).dim, _rank(call))
    if val(call).dim() == _rank(call):
        return dim
    return None if dim == at else dim - (at < dim)


def _move_select(call: fx.Node, dim: int) -> int | None:
    at = _positive(arguments(call).dim, _rank(call))
    return None if dim == at else dim - (at < dim)


def _move_softmax(call: fx.Node, dim: int) -> int | None:
    return None if dim == _positive(arguments(call).dim, _rank(call)) else dim


def _move_reduce(call: fx.Node, dim: int) -> int | None:
    given = arguments(call)
    if not given.dim:
        return None
    gone = {_positive(d, _rank(call)) for d in given.dim}
    if dim in gone:
        return None
    return dim if given.keepdim else dim - sum(d < dim for d in gone)


def _expand(region: Region, call: fx.Node) -> None:
    """Broadcasting: a dimension of size 1 stays whole; each rank makes its part of the rest."""
    _pointwise(region, call)


def _norm(region: Region, call: fx.Node) -> None:
    """A norm over the last dimensions, which must be whole."""
    given = arguments(call)
    first = val(call).dim() - len(given.normalized_shape)
    for value, other in ((call, given.input), (given.input, call)):
        if (cut := region.cuts.get(value)) is not None:
            if cut.dim >= first:
                raise Unprovable(f"{call.name} needs whole rows")
            region.cut(other, cut.dim, cut.sections)
    for weight in _tensors(call)[1:]:
        region.keep(weight)


def _reshape(region: Region, call: fx.Node) -> None:
    source = call.args[0]
    if (cut := region.cuts.get(source)) is not None:  # type: ignore[arg-type]
        region.cut(call, *through_reshape(call, val(source).shape, val(call).shape, cut))
    elif (cut := region.cuts.get(call)) is not None:
        region.cut(source, *through_reshape(call, val(call).shape, val(source).shape, cut))


def _cat(region: Region, call: fx.Node) -> None:
    given = arguments(call)
    dim = _positive(given.dim, val(call).dim())
    for value in (call, *given.tensors):
        if (cut := region.cuts.get(value)) is None:
            continue
        if cut.dim == dim:
            region.divide(call, dim, [(t, int(val(t).shape[dim])) for t in given.tensors])
            return
        for other in (call, *given.tensors):
            region.cut(other, cut.dim, cut.sections)


def _split(region: Region, call: fx.Node) -> None:
    """A call that returns several values, which are read by getitem."""
    given = arguments(call)
    dim = _positive(given.dim, _rank(call))
    readers: dict[int, fx.Node] = {}
    for user in call.users:
        if not is_call(user, operator.getitem) or arguments(user).index in readers:
            raise Unprovable(f"{call.name} has an unknown reader")
        readers[arguments(user).index] = user
    source = call.args[0]
    for value in (source, *readers.values()):
        if (cut := region.cuts.get(value)) is not None and cut.dim != dim:  # type: ignore[arg-type]
            for other in (source, *readers.values()):
                region.cut(other, cut.dim, cut.sections)
            return
    parts = call.meta["val"]
    pieces = [(readers.get(i), int(part.shape[dim])) for i, part in enumerate(parts)]
    region.divide(source, dim, pieces)  # type: ignore[arg-type]


def _item(region: Region, call: fx.Node) -> None:
    source = call.args[0]
    if not isinstance(source, fx.Node) or _RULES.get(source.target) is not _split:
        raise Unprovable(f"no rule for {call.name}")
    _split(region, source)


def _slice(region: Region, call: fx.Node) -> None:
    dim, start, end, step = slice_bounds(call)
    source = call.args[0]
    found = region.cuts.get(source) or region.cuts.get(call)  # type: ignore[arg-type]
    if found is None:
        return
    if found.dim != dim:
        region.cut(source, found.dim, found.sections)
        region.cut(call, found.dim, found.sections)
        return
    size = int(val(source).shape[dim])
    if step > 1:
        if start >= step or end < size or size % step:
            raise Unprovable(f"{call.name} selects only some of the parts")
        if (cut := region.cuts.get(source)) is not None:  # type: ignore[arg-type]
            if any(n % (step * parts) for n, parts in cut.sections):
                raise Unprovable(f"{call.name} selects only some of the parts")
            region.cut(call, dim, tuple((n // step, parts) for n, parts in cut.sections))
        else:
            region.cut(source, dim, tuple((n * step, p) for n, p in region.cuts[call].sections))
        return
    region.divide(source, dim, _tiles(source, dim, size))  # type: ignore[arg-type]


def _tiles(source: Any, dim: int, size: int) -> list[tuple[fx.Node | None, int]]:
    """The slices of a value along `dim`, which must not overlap, and the gaps between them."""
    bounds = sorted(
        ((*slice_bounds(u)[1:3], u) for u in source.users if is_call(u, aten.slice.Tensor)
         and slice_bounds(u)[0] == dim),
        key=lambda bound: bound[:2],
    )  # fmt: skip
    tiles: list[tuple[fx.Node | None, int]] = []
    at = 0
    for start, end, node in bounds:
        if start < at or slice_bounds(node)[3] != 1:
            raise Unprovable(f"slices of {source.name} overlap")
        if start > at:
            tiles.append((None, start - at))
        tiles.append((node, end - start))
        at = end
    if at < size:
        tiles.append((None, size - at))
    return tiles


def slice_bounds(call: fx.Node) -> tuple[int, int, int, int]:
    """(dim, start, end, step) of a slice; raises Unprovable if its bounds are not numbers."""
    given = arguments(call)
    dim = _positive(given.dim, _rank(call))
    size = val(call.args[0]).shape[dim]
    if val(call).shape[dim] is size or str(val(call).shape[dim]) == str(size):
        return dim, 0, size if isinstance(size, int) else 0, given.step
    bounds = (given.start or 0, size if given.end is None else given.end)
    if not all(isinstance(n, int) for n in (*bounds, size, given.step)):
        if isinstance(size, int):
            raise Unprovable(f"{call.name} has computed bounds")
        return dim, 0, 0, 1
    start, end = (min(max(n + size if n < 0 else n, 0), size) for n in bounds)
    return dim, start, max(start, end), given.step


def _linear(region: Region, call: fx.Node) -> None:
    given = arguments(call)
    _product(region, call, given.input, given.weight, given.bias, rows=0, columns=1)


def _matmul(region: Region, call: fx.Node) -> None:
    """Rows times one whole matrix: the first factor can be cut in any dimension but the last."""
    given = arguments(call)
    if val(given.other).dim() != 2:
        raise Unprovable(f"{call.name} multiplies by several matrices")
    for value, other in ((call, given.self), (given.self, call)):
        if (cut := region.cuts.get(value)) is not None:
            if cut.dim == val(value).dim() - 1:
                raise Unprovable(f"{call.name} needs whole rows")
            region.cut(other, cut.dim, cut.sections)
    region.keep(given.other)


def _expert_linear(region: Region, call: fx.Node) -> None:
    given = arguments(call)
    rows, columns = (2, 1) if given.transposed else (1, 2)
    _product(region, call, given.x, given.weight, given.bias, rows=rows, columns=columns)
    is_own = isinstance(input_of(given.bias), WeightInput) and only_user(given.bias) is not None
    if call in region.terms and given.bias is not None and not is_own:
        raise Unprovable(f"{call.name} adds a bias that can't be given to one rank only")
    region.keep(given.expert)


def _product(
    region: Region, call: fx.Node, x: Any, weight: Any, bias: Any, *, rows: int, columns: int
) -> None:
    """Cut the weight by rows if the output is cut, by columns if the input is cut."""
    cut_x, cut_out, cut_w = (region.cuts.get(v) for v in (x, call, weight))
    last = val(x).dim() - 1
    if cut_x is not None or (cut_w is not None and cut_w.dim == columns):
        if cut_x is not None and cut_x.dim != last:
            raise Unprovable(f"{call.name} is cut across its rows")
        cut = cut_x or cut_w
        assert cut is not None
        region.cut(x, -1, cut.sections)
        region.cut(weight, columns, cut.sections)
        region.keep(call)
        if bias is not None:
            region.keep(bias)
        region.terms.add(call)
    elif cut_out is not None or cut_w is not None:
        if cut_out is not None and cut_out.dim != last:
            raise Unprovable(f"{call.name} is cut across its rows")
        cut = cut_out or cut_w
        assert cut is not None
        region.cut(call, -1, cut.sections)
        region.cut(weight, rows, cut.sections)
        region.keep(x)
        if bias is not None:
            region.cut(bias, -1, cut.sections)
    elif bias is not None and bias in region.cuts:
        region.cut(call, -1, region.cuts[bias].sections)


def heads(size: int, count: int, kv_count: int) -> tuple[Sections, Sections]:
    """Sections of the query heads, and of the key and value heads. If there are fewer of the latter
    than ranks, neighboring ranks hold the same heads."""
    if count % size or (kv_count % size and size % kv_count):
        raise Unprovable(f"{count} heads and {kv_count} KV heads are not divisible by {size}")
    return ((count, size),), ((kv_count, min(size, kv_count)),)


def _paged_attention(region: Region, call: fx.Node) -> None:
    given = arguments(call)
    if given.chosen is not None:
        raise Unprovable("a sparse indexer chooses positions for all heads")
    count, kv_count = (int(val(n).shape[1]) for n in (given.query, given.key_cache))
    own, kv = heads(region.size, count, kv_count)
    region.cut(given.query, 1, own)
    region.cut(call, 1, own)
    for cache in (given.key_cache, given.value_cache):
        region.cut(cache, 1, kv)
    for by_head in (given.sinks, given.slopes):
        if by_head is not None:
            region.cut(by_head, -1, own)
    if given.distance_bias is not None:
        region.cut(given.distance_bias, 1, own)


def _write_kv(region: Region, call: fx.Node) -> None:
    given = arguments(call)
    for source, cache in ((given.key, given.key_cache), (given.value, given.value_cache)):
        cut = region.cuts.get(source) or region.cuts.get(cache)
        if cut is not None:
            if cut.dim != 1:
                raise Unprovable(f"{call.name} writes parts of heads")
            region.cut(source, 1, cut.sections)
            region.cut(cache, 1, cut.sections)


def _stay(call: fx.Node, dim: int) -> int:
    return dim


_RULES: dict[Any, Rule] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    expert_linear.overload: _expert_linear,
    paged_attention.overload: _paged_attention,
    write_kv.overload: _write_kv,
    operator.getitem: _item,
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.expand.default: _expand,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.transpose.int: _same(_move_transpose),
    aten.permute.default: _same(_move_permute),
    aten.unsqueeze.default: _same(_move_unsqueeze),
    aten.squeeze.dim: _same(_move_squeeze),
    aten.select.int: _same(_move_select),
    aten.softmax.int: _same(_move_softmax),
    **dict.fromkeys(
        (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.linalg_vector_norm.default),
        _same(_move_reduce),
    ),
    **dict.fromkeys(
        (aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.detach.default,
         aten.alias.default),
        _same(_stay),
    ),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(SPLITS, _split),
}  # fmt: skip
