"""`quantize_linears`: linears and routed experts read weights of 4 to 8 bits, quantized while they
are loaded or stored that way in the checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.kernels.collectives import embed_shard, shard_ids
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_embedding import quantized_embedding
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import (
    CHANNELS,
    INPUTS,
    Format,
    Part,
    Quantization,
    quantization_of,
    quantized_linear,
)
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    is_ranked,
    only_user,
    replace,
    val,
)
from llmc.passes.inputs import QuantizedPart, StepInput, WeightInput, add_input, input_of

_EMBEDDINGS = (aten.embedding.default, embed_shard.overload)


@graph_pass(changes_model=True)
def quantize_linears(
    gm: fx.GraphModule,
    *,
    format: Format | None,
    kept: Sequence[tuple[str, Quantization]] = (),
) -> Notes:
    """Read half or a quarter of the weight bytes. Not exact: the model's outputs change slightly.

    `kept` weights stay in their stored format, which is exact, if that is `format` or `format` is
    None. This includes embeddings, whose rows `quantized_embedding` dequantizes on lookup. The
    output head is int8 in every format, since its errors directly change the logits, and with it
    the embedding that it is tied to. Routers are not quantized, since a small error can select
    another expert.

    Before:
        y = aten.linear(x, w, b)
        e = aten.embedding(w, ids);  e = llmc.embed_shard(ids, w)
    After:
        y = llmc.quantized_linear(x, w in 4 to 8 bits, its scales, its zeros or None, b,
                                  its minimums)
        e = llmc.quantized_embedding(ids, w in 4 to 8 bits, ...)
        e = llmc.quantized_embedding(llmc.shard_ids(ids, rows), w in 4 to 8 bits, ...)
    where x is aten.index_select(x, -1, order) if the groups of a stored weight have inputs from
    anywhere (act-order), and followed, if the channels N of a linear are not whole blocks of 16, by
        y = aten.add(aten.slice(y, -1, 0, N), b)
    and llmc.expert_linear becomes llmc.quantized_expert_linear as linears do.
    """
    formats = dict(kept)
    if format is None and not formats:
        return ["--quantization is not set"]
    graph = gm.graph
    left: Counter[str] = Counter()
    nodes = calls(graph, aten.linear.default, *_EMBEDDINGS, expert_linear.overload)
    for node, found in [(node, _form_of(node, formats, format)) for node in nodes]:
        to = found.to and _of_rank(found.to, arguments(node).weight)
        if to is not None:
            _rewrite(node, to, kept=found.kept)
        elif not is_call(node, *_EMBEDDINGS):
            left[found.reason or "a rank's part does not divide into blocks of 16 by 32"] += 1
    return [f"{count} linears: {reason}" for reason, count in left.items()]


def formats_of(
    graph: fx.Graph, kept: Mapping[str, Quantization], format: Format | None
) -> dict[fx.Node, Quantization]:
    """The weights that the pass will quantize, also in parts, and their formats, before linears are
    merged."""
    formats = {}
    for node in calls(graph, aten.linear.default, aten.embedding.default, expert_linear.overload):
        weight, to = arguments(node).weight, _form_of(node, kept, format).to
        if to is not None and _size(weight, to.transposed)[-2] % CHANNELS == 0:
            formats[weight] = to
    return formats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The format of a call's weight; if `to` is None it is not quantized, and `reason` says why."""

    to: Quantization | None = None
    kept: bool = False
    reason: str = ""


def _form_of(node: fx.Node, kept: Mapping[str, Quantization], format: Format | None) -> _Form:
    """The format of the whole weight, of which a rank may hold a part."""
    given = arguments(node)
    transposed = is_call(node, expert_linear.overload) and given.transposed
    to, reason = _kept_format(given.weight, kept)
    if to is not None and to.transposed != transposed:
        to, reason = None, "experts are stored in another layout than the model uses"
    if to is not None and to.order and not is_call(node, aten.linear.default):
        to, reason = None, "the groups of its inputs are not consecutive"
    if to is not None and format in (None, to.format):
        return _Form(to=to, kept=True)
    if format is None or (is_call(node, *_EMBEDDINGS) and only_user(given.weight) is node):
        return _Form(reason=reason)
    return _new_form(node, given.weight, format, transposed)


def _rewrite(node: fx.Node, to: Quantization, *, kept: bool) -> None:
    given, graph = arguments(node), node.graph
    with graph.inserting_before(node):
        parts = _low_bit(graph, given.weight, to, kept=kept)
        order = parts.pop("order", None)
        if is_call(node, aten.linear.default):
            x = given.input
            if order is not None:
                x = emit(graph, aten.index_select.default, x, -1, order)
            channels = int(val(given.weight).shape[0])
            bias = None if channels % CHANNELS else given.bias
            fast = emit(graph, quantized_linear.overload, x=x, **parts, bias=bias)
            if channels % CHANNELS:
                fast = emit(graph, aten.slice.Tensor, fast, -1, 0, channels)
                fast = (
                    fast if given.bias is None else emit(graph, aten.add.Tensor, fast, given.bias)
                )
        elif is_call(node, expert_linear.overload):
            fast = emit(
                graph,
                quantized_expert_linear.overload,
                x=given.x,
                **parts,
                bias=given.bias,
                expert=given.expert,
            )
        else:
            ids = given.ids if is_call(node, embed_shard.overload) else given.indices
            if is_call(node, embed_shard.overload):
                ids = emit(graph, shard_ids.overload, ids, int(val(given.weight).shape[0]))
            dtype = val(node).dtype
            fast = emit(graph, quantized_embedding.overload, ids=ids, **parts, dtype=dtype)
    replace(node, fast)


def _size(weight: fx.Node, transposed: bool) -> tuple[int, ...]:
    """[N, K], or [E, N, K] for experts."""
    return _channels_first([int(n) for n in val(weight).shape], transposed)


def _channels_first(size: Sequence[int], transposed: bool) -> tuple[int, ...]:
    *experts, channels, depth = size
    return (*experts, depth, channels) if transposed else (*experts, channels, depth)


def _whole_size(weight: fx.Node, transposed: bool) -> tuple[int, ...]:
    """The same for the whole weight, of which a rank may hold a part."""
    role = input_of(weight)
    assert isinstance(role, WeightInput)
    size = [int(n) for n in val(weight).shape]
    for _, shard in role.pieces:
        if shard is not None and shard.dim == 0:  # along which parts are joined
            size[0] += shard.whole - shard.length
        elif shard is not None:
            size[shard.dim] = shard.whole
    return _channels_first(size, transposed)


def _of_rank(to: Quantization, weight: fx.Node) -> Quantization | None:
    """The same format for a rank's part. None if the part does not divide into whole blocks."""
    role = input_of(weight)
    assert isinstance(role, WeightInput)
    *_, channels, depth = _size(weight, to.transposed)
    if role.shards and (channels % CHANNELS or depth % INPUTS):
        return None
    for _, shard in role.pieces:
        if shard is not None and shard.dim == val(weight).dim() - (2 if to.transposed else 1):
            if to.order:  # its groups have inputs of all ranks
                return None
            to = to.of_inputs(shard.ranges(0))
    return to


def _new_form(node: fx.Node, weight: Any, format: Format, transposed: bool) -> _Form:
    """The format that a weight is quantized to, or why it is not quantized."""
    role = input_of(weight)
    if not isinstance(role, WeightInput) or role.quantized:
        return _Form(reason="the weight is computed")
    linears = [user for user in weight.users if is_call(user, aten.linear.default)]
    has_head = any(is_head(arguments(linear).input) for linear in linears)
    if len(weight.users) > 1 and not (
        has_head and all(_reads_bits(user, weight) for user in weight.users)
    ):
        return _Form(reason="the weight is shared with another op, which needs it unquantized")
    *experts, channels, depth = _whole_size(weight, transposed)
    to = quantization_of("int8" if has_head else format, channels, depth)
    if to is None or (experts and channels % CHANNELS):
        reason = f"{channels} channels of {depth} inputs do not divide into blocks of 16 by 32"
        return _Form(reason=reason)
    if any(map(is_ranked, linears)):
        return _Form(reason="it is a router, whose choices would change with small errors")
    return _Form(to=dataclasses.replace(to, transposed=transposed))


def _kept_format(weight: Any, kept: Mapping[str, Quantization]) -> tuple[Quantization | None, str]:
    """The format in which all parts of a weight are stored, or why that format is not kept."""
    role = input_of(weight)
    if not isinstance(role, WeightInput) or role.quantized or role.transposed:
        return None, "the weight is computed"
    formats = {kept.get(part) for part in role.parts}
    format = formats.pop()
    if formats:
        return None, "merged weights are stored in different formats, so they are dequantized"
    if format is None:
        return None, "stored unquantized, or in a format that the op can't represent exactly"
    if not all(_reads_bits(user, weight) for user in weight.users):
        return None, "the weight is shared with another op, which needs it unquantized"
    return format, ""


def _reads_bits(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a user of a weight can read it quantized."""
    if is_call(node, aten.linear.default, expert_linear.overload):
        return arguments(node).weight is weight
    return is_call(node, *_EMBEDDINGS) and arguments(node).weight is weight


def _low_bit(
    graph: fx.Graph, weight: fx.Node, to: Quantization, *, kept: bool
) -> dict[Part, fx.Node | None]:
    """Placeholders of the quantized weight, its scales, and any zeros and minimums."""
    role = input_of(weight)
    assert isinstance(role, WeightInput)
    size = _size(weight, to.transposed)
    nodes: dict[Part, fx.Node | None] = {}
    parts: tuple[Part, ...] = ("weight", "scale", "zero", "minimum")
    for part in (*parts, "order") if to.order else parts:
        if part not in to.dtypes:
            nodes[part] = None
            continue
        fake = val(weight).new_empty(to.shape(part, *size), dtype=to.dtypes[part])
        low = dataclasses.replace(role, quantized=QuantizedPart(to=to, part=part, kept=kept))
        nodes[part] = add_input(graph, f"{weight.name}_{to.format}_{part}", low, fake)
    return nodes


def is_head(x: Any) -> bool:
    """Whether the inputs of a linear are the rows that `last_token_logits` selected."""
    if not is_call(x, aten.index_select.default):
        return False
    return input_of(arguments(x).index) == StepInput(name="logits_index")
