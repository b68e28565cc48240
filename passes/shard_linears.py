"""`shard_linears`: each rank of a tensor-parallel engine computes a part of every layer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.collectives import all_gather, all_reduce, embed_shard, first_rank
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.quantized_linear import CHANNELS, INPUTS, Format, Quantization
from llmc.kernels.sample import sample
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    insert_after,
    is_call,
    positional,
    replace,
    set_arguments,
    through,
    update_val,
    val,
)
from llmc.passes.inputs import (
    ConstantInput,
    Shard,
    StepInput,
    WeightInput,
    add_constant,
    input_of,
)
from llmc.passes.quantize_linears import formats_of
from llmc.passes.sharding import Cut, NoWholeBlocks, Region, Unprovable
from llmc.passes.sharding_rules import RESHAPES, SPLITS, heads, rule_of, slice_bounds
from llmc.passes.sharding_sums import insert_sum, join_sums


@graph_pass(required=True)
def shard_linears(
    gm: fx.GraphModule,
    *,
    size: int = 1,
    format: Format | None = None,
    kept: Sequence[tuple[str, Quantization]] = (),
) -> Notes:
    """Shard attention by heads, and everything between two linears by channels, into `size` parts.

    Every rank runs this graph over its own part of the weights and the cache, and partial outputs
    of a layer are summed. Those that are added to each other (of attention and MLP in parallel, or
    of routed and shared experts) are summed by one collective. The values to cut are found from
    attention and linears outward, by the rules of `sharding.py`; values for which these rules prove
    nothing stay whole, and every rank computes all of them. The embedding and the output head are
    cut by the vocabulary.

    Weights that `quantize_linears` will quantize (`format`, `kept`) are cut along whole blocks of
    its ops, so that each rank holds the same numbers that a single rank would.

    The sampled tokens are those of rank 0, since other ranks might break a tie differently.

    Before:
        q = aten.linear(x, wq);  k = aten.linear(x, wk);  v = aten.linear(x, wv)
        a = llmc.paged_attention(q [T, H, D], key_cache [blocks, Hkv, ...], value_cache, ...)
        y = aten.linear(a, wo, bo)
        logits = aten.linear(h, head);  token = llmc.sample(...)
    After:
        q = aten.linear(x, wq rows);  k = aten.linear(x, wk rows);  v = aten.linear(x, wv rows)
        a = llmc.paged_attention(q [T, H / size, D], key_cache [blocks, Hkv / size, ...], ...)
        y = aten.add(llmc.all_reduce(aten.linear(a, wo columns), turn), bo)
        logits = llmc.all_gather(aten.linear(h, head rows), size, turn)
        token = llmc.first_rank(llmc.sample(...), turn)
    """
    if size == 1:
        return ["--tensor-parallel-size is 1"]
    graph = gm.graph
    if calls(graph, all_reduce.overload, first_rank.overload):
        return ["sharded already"]
    formats = formats_of(graph, dict(kept), format)
    blocks = {weight: _block(weight, to) for weight, to in formats.items()}
    region, notes = _find(graph, Region(size, rule_of, blocks))
    pieces = _pieces(graph, region)
    for node in list(graph.nodes):
        if node in pieces:
            node.target = aten.slice.Tensor if is_call(node, aten.slice.Tensor) else SPLITS[0]
            node.args, node.kwargs = pieces[node], {}
            update_val(node)
        elif (cut := region.cuts.get(node)) is not None:
            _cut(node, cut, size)
        elif is_call(node, *SPLITS) and arguments(node).self in region.cuts:
            update_val(node)  # along another dimension
    vocabulary = _vocabulary(graph, region)
    terms, draws = [n for n in graph.nodes if n in region.terms], calls(graph, sample.overload)
    if terms or draws or vocabulary:
        turn = _turn(graph)
    for weight in vocabulary:
        _cut_vocabulary(graph, weight, size, turn)
    for term in terms:
        insert_sum(term, turn)
    join_sums(graph)
    for drawn in draws:
        insert_after(drawn, first_rank.overload, turn)
    return notes


def _block(weight: fx.Node, to: Quantization) -> tuple[int, ...]:
    """The smallest unit by which each dimension of a weight can be cut."""
    block = (INPUTS, CHANNELS) if to.transposed else (CHANNELS, INPUTS)
    return (1,) * (val(weight).dim() - 2) + block


def _find(graph: fx.Graph, region: Region) -> tuple[Region, Notes]:
    """Everything that can be cut: one attempt per attention, then per linear not yet covered."""
    left: Counter[str] = Counter()
    for node in calls(graph, paged_attention.overload):
        if node in region.cuts:
            continue
        try:
            region = _attempt_attention(region, node)
        except Unprovable as reason:
            left[f"attention stays whole: {reason}"] += 1
    for node in calls(graph, aten.linear.default, expert_linear.overload):
        try:
            region = _attempt_linear(region, node)
        except NoWholeBlocks as reason:
            left[f"values between linears stay whole: {reason}"] += 1
        except Unprovable:
            continue
    return region, [f"{count} x {reason}" for reason, count in left.items()]


def _attempt_attention(known: Region, node: fx.Node) -> Region:
    given = arguments(node)
    count, kv_count = (int(val(n).shape[1]) for n in (given.query, given.key_cache))
    region = known.attempt()
    region.cut(node, 1, heads(known.size, count, kv_count)[0])
    region.grow()
    return region


def _attempt_linear(known: Region, node: fx.Node) -> Region:
    given = arguments(node)
    x = given.input if is_call(node, aten.linear.default) else given.x
    if x in known.cuts or node in known.cuts:
        return known
    width = val(x).shape[-1]
    if not isinstance(input_of(given.weight), WeightInput) or x.op == "placeholder":
        raise Unprovable(f"{node.name} is not a linear over a parameter")
    region = known.attempt()
    region.cut(x, -1, ((int(width), known.size),))
    region.grow()
    return region


def _pieces(graph: fx.Graph, region: Region) -> dict[fx.Node, tuple[Any, ...]]:
    """New arguments of the slices and splits along a cut dimension, within a rank's part."""
    found: dict[fx.Node, tuple[Any, ...]] = {}
    for node in calls(graph, *SPLITS, aten.slice.Tensor):
        source = arguments(node).self
        cut = region.cuts.get(source)
        if cut is None or arguments(node).dim % val(source).dim() != cut.dim:
            continue
        if is_call(node, aten.slice.Tensor):
            dim, start, end, step = slice_bounds(node)
            bounds = (_held(cut, start), _held(cut, end)) if step == 1 else (start, cut.length)
            found[node] = (source, dim, *bounds, step)
        else:
            ends = list(accumulate(int(part.shape[cut.dim]) for part in node.meta["val"]))
            edges = [_held(cut, end) for end in (0, *ends)]
            sizes = [end - start for start, end in pairwise(edges)]
            found[node] = (source, sizes, cut.dim)
    return found


def _held(cut: Cut, end: int) -> int:
    """How many elements of the sections before `end` a rank holds."""
    held = at = 0
    for length, parts in cut.sections:
        if at >= end:
            break
        held += length // parts
        at += length
    return held


def _cut(node: fx.Node, cut: Cut, size: int) -> None:
    """Set a value's size to that on each rank."""
    if node.op != "placeholder":
        _cut_size(node, cut)
        update_val(node)
        return
    shape = list(val(node).shape)
    shape[cut.dim] = cut.length
    node.meta["val"] = val(node).new_empty(shape)
    role = input_of(node)
    shard = Shard(dim=cut.dim, sections=cut.sections, size=size)
    if isinstance(role, WeightInput):
        node.meta["input"] = dataclasses.replace(role, shards=(shard,))
    elif isinstance(role, ConstantInput):
        node.meta["input"] = dataclasses.replace(role, shard=shard)


def _cut_size(node: fx.Node, cut: Cut) -> None:
    """Replace the size of the cut dimension in a shape argument with the rank's size."""
    if not is_call(node, *RESHAPES, aten.expand.default):
        return
    sizes = list(positional(node)[1])
    if sizes[cut.dim] != -1:
        sizes[cut.dim] = cut.length
    node.args = (node.args[0], sizes)


def _vocabulary(graph: fx.Graph, region: Region) -> list[fx.Node]:
    """Weights with a row per vocabulary token whose rows can be divided among the ranks: those read
    only by the output head and by embeddings of the step's tokens."""
    head = _head(graph)
    head_weight = arguments(head).weight if head is not None else None
    found = []
    for node in graph.find_nodes(op="placeholder"):
        role = input_of(node)
        if not isinstance(role, WeightInput) or role.transposed or node in region.cuts:
            continue
        readers = [n for n in node.users if n is not head or node is not head_weight]
        is_read_so = all(is_call(n, aten.embedding.default) and _of_tokens(n) for n in readers)
        parts = region.size * (region.blocks[node][0] if node in region.blocks else 1)
        if is_read_so and int(val(node).shape[0]) % parts == 0 and val(node).dim() == 2:
            found.append(node)
    return found


def _of_tokens(embedding: fx.Node) -> bool:
    ids = through(arguments(embedding).indices, aten.unsqueeze.default)
    return input_of(ids) == StepInput(name="token_ids")


def _head(graph: fx.Graph) -> fx.Node | None:
    """The linear whose output is the logits, apart from scaling and caps."""
    results = graph.output_node().args[0]
    node = results[1] if isinstance(results, tuple | list) and len(results) == 2 else None
    while isinstance(node, fx.Node) and not is_call(node, aten.linear.default):
        sources = [n for n in node.all_input_nodes if n.op == "call_function"]
        is_plain = torch.Tag.pointwise in getattr(node.target, "tags", ())
        is_plain |= is_call(node, aten.to.dtype, aten.squeeze.dim, *RESHAPES)
        node = sources[0] if is_plain and len(sources) == 1 else None
    return node if isinstance(node, fx.Node) else None


def _cut_vocabulary(graph: fx.Graph, weight: fx.Node, size: int, turn: fx.Node) -> None:
    rows = Cut(0, ((int(val(weight).shape[0]), size),))
    _cut(weight, rows, size)
    for reader in list(weight.users):
        given = arguments(reader)
        if is_call(reader, aten.embedding.default):
            with graph.inserting_before(reader):
                own = emit(graph, embed_shard.overload, given.indices, weight)
                total = emit(graph, all_reduce.overload, own, turn)
            replace(reader, total)
            continue
        if given.bias is not None:
            set_arguments(reader, bias=None)
        update_val(reader)
        whole = insert_after(reader, all_gather.overload, size, turn)
        if given.bias is not None:
            insert_after(whole, aten.add.Tensor, given.bias)


def _turn(graph: fx.Graph) -> fx.Node:
    """A token tensor that keeps collectives in one order, whatever compiles the graph."""
    like = next(n for n in graph.nodes if isinstance(n.meta.get("val"), Tensor))
    return add_constant(graph, "turn", torch.zeros(1), like)
