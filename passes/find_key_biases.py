"""`find_key_biases`: a bias per key that the model adds to its mask becomes a channel of the keys.

Some models modify their attention mask: they add a number to it for each key and KV head, computed
from the key's token, and may hide all keys but those with the highest numbers. The code that does
this is not matched but run on random numbers. It must compute exactly that, or the model is
rejected.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.choose_blocks import choose_blocks
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, set_arguments, val
from llmc.passes.evaluate import NotEvaluable, evaluate, token_counts
from llmc.passes.find_indexers import (
    CAUSAL,
    budget_of,
    check_plain,
    index_cache,
    is_over_keys,
    mask_markers,
    num_tokens,
)
from llmc.passes.inputs import add_constant, step_input, token_input

_SIZED = (aten.expand.default, aten.view.default, aten.reshape.default)
_HIDDEN = -1e4  # a bias below this hides a key
_MORE = 16  # probe with this many more tokens than are chosen
_ALIGNED = 8  # channels of a head are padded to a multiple of this


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bias:
    """The bias that is added to the attention scores [1, H, T, T]."""

    source: fx.Node  # [1, G, T] with dimensions of 1: the number of each key, for G heads
    groups: int
    topk: fx.Node | None  # chooses the keys with the highest numbers
    sized: tuple[fx.Node, ...]  # calls that contain the batch size of a mask marker, which is 0


@graph_pass(required=True)
def find_key_biases(gm: fx.GraphModule, *, max_positions: int, block_size: int) -> Notes:
    """Express a number that is added to all scores of a key as one more channel of the key, which
    is multiplied by a constant channel of the query.

    If the model hides all keys but those with the highest numbers, `choose_blocks` chooses them for
    each KV head, from a paged cache of the numbers. That is left out if no context has more keys
    than are chosen.

    Before:
        m = aten.masked_fill(b [1, Hkv, 1, T], hidden, MIN);  m = kept where it is in aten.topk(m)
        o = llmc.attention(q [1, H, T, D], k, v, ..., bias=m of all heads)
    After:
        i = llmc.choose_blocks(one of each KV head [T, Hkv, Hkv], b [T, Hkv], cache, ...)
        o = llmc.attention(aten.cat(q, 1 / scale), aten.cat(k, b), v, ..., chosen=i)
    """
    graph = gm.graph
    notes = []
    for marker in calls(graph, attention.overload):
        bias = arguments(marker).bias
        if bias is None:
            continue
        try:
            found = _find(bias, int(val(arguments(marker).key).shape[1]))
            budget = _prove(graph, bias, found)
        except (NotEvaluable, RuntimeError, IndexError) as e:
            raise CompileError(
                f"the model's code changed the attention mask of {marker.name}, but not by a "
                f"number for each key ({' '.join(str(e).split())[:200]}), which llmc can't page"
            ) from e
        _add_channel(graph, marker, found)
        if budget and budget < max_positions:
            chosen = _choose(graph, marker, found, budget, block_size)
            set_arguments(marker, chosen=chosen, sparse_block_size=1)
            check_plain(marker, chosen)
            notes.append(f"{marker.name}: a number for each key, the {budget} highest chosen")
        else:
            notes.append(f"{marker.name}: a number for each key")
    return notes


def _find(bias: fx.Node, kv_heads: int) -> _Bias:
    """What a bias is computed from; raises NotEvaluable if it does not have the expected form."""
    sources, masks, topks = [], set(), []
    seen, stack = set(), [bias]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_call(node, aten.topk.default):
            topks.append(node)
            stack += node.all_input_nodes
        elif not isinstance(node.meta.get("val"), Tensor):
            continue  # a size
        elif is_over_keys(node) or is_call(node, operator.getitem):
            stack += node.all_input_nodes
        elif markers := mask_markers(node):
            masks |= {tuple(val(m).shape) for m in markers}
        elif str(num_tokens(node)) in [str(s) for s in val(node).shape]:
            sources.append(node)
    if len(sources) != 1 or len(topks) > 1:
        raise NotEvaluable(
            f"it is computed from {len(sources)} tensors and {len(topks)} topk calls"
        )
    if masks != {CAUSAL}:
        raise NotEvaluable("it is computed from a mask that is not causal")
    shape = [str(s) for s in val(sources[0]).shape]
    groups = [int(s) for s in shape if s not in ("1", str(num_tokens(bias)))] or [1]
    if shape[-1] != str(num_tokens(bias)) or groups not in ([1], [kv_heads]):
        raise NotEvaluable(f"its numbers are {shape}: not one for each KV head, nor one for all")
    return _Bias(
        source=sources[0],
        groups=groups[0],
        topk=topks[0] if topks else None,
        sized=tuple(n for n in seen if is_call(n, *_SIZED) and n.args[1][0] == 0),  # type: ignore[index]
    )


def _prove(graph: fx.Graph, bias: fx.Node, found: _Bias) -> int:
    """The number of keys that are chosen, 0 for all. Raises NotEvaluable if random numbers give
    another bias."""
    budget = 0 if found.topk is None else budget_of(graph, found.topk)
    # the code was traced for this many tokens, and can depend on their number
    tokens = int(num_tokens(bias).node.hint)
    tokens = min(tokens, budget + _MORE) if budget else tokens
    heads = int(val(bias).shape[1])
    gen = torch.Generator().manual_seed(0)
    numbers = torch.randn(found.groups, tokens, generator=gen)
    shape = [n if isinstance(n, int) else tokens for n in val(found.source).shape]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    given: dict[fx.Node, Any] = {
        found.source: numbers.reshape(shape),
        **dict.fromkeys(mask_markers(bias), seen[None, None]),
        **token_counts(graph, tokens),
        **{node: _of_one_sequence(node) for node in found.sized},
    }
    got = evaluate(graph, bias, tokens, given, exact=True)[0].float()
    want = numbers[:, None, :].expand(-1, tokens, -1).masked_fill(~seen, float("-inf"))
    if budget:
        least = want.topk(min(budget, tokens), dim=-1).values[..., -1:]
        want = want.masked_fill(want < least, float("-inf"))
    want = want.repeat_interleave(heads // found.groups, 0)
    is_seen = want > _HIDDEN
    alike = got.shape == want.shape and torch.equal(got > _HIDDEN, is_seen)
    if not alike or not torch.allclose(got[is_seen], want[is_seen], rtol=1e-5, atol=1e-5):
        raise NotEvaluable("random numbers give another result")
    return budget


def _of_one_sequence(node: fx.Node) -> Any:
    def value(compute: Any) -> Tensor:
        source, sizes = node.args[:2]
        out: Tensor = node.target(compute(source), [1, *map(compute, sizes[1:])])  # type: ignore
        return out

    return value


def _add_channel(graph: fx.Graph, marker: fx.Node, found: _Bias) -> None:
    given = arguments(marker)
    _, heads, tokens, dim = val(given.key).shape
    with graph.inserting_before(marker):
        count = emit(graph, aten.sym_size.int, token_input(graph), 0)
        numbers = emit(graph, aten.reshape.default, found.source, [1, found.groups, count, 1])
        numbers = emit(graph, aten.expand.default, numbers, [1, heads, count, 1])
        numbers = emit(graph, aten.to.dtype, numbers, val(given.key).dtype)
        first = emit(graph, aten.slice.Tensor, given.query, 3, 0, 1)
        ones = emit(graph, aten.full_like.default, first, 1 / given.scale)
        padding = -(dim + 1) % _ALIGNED
        wider = {}
        for name, channel in (("query", ones), ("key", numbers)):
            joined = emit(graph, aten.cat.default, [getattr(given, name), channel], -1)
            wider[name] = emit(graph, aten.constant_pad_nd.default, joined, [0, padding], 0.0)
    set_arguments(marker, **wider, bias=None)


def _choose(
    graph: fx.Graph, marker: fx.Node, found: _Bias, budget: int, block_size: int
) -> fx.Node:
    """The keys [T, G, budget] with the highest numbers, for each of the G KV heads."""
    names = ("slot_mapping", "query_start", "context_len", "block_table")
    one_of_each = add_constant(
        graph, "one_of_each", torch.eye(found.groups, dtype=val(found.source).dtype), found.source
    )
    with graph.inserting_before(marker):
        count = emit(graph, aten.sym_size.int, token_input(graph), 0)
        numbers = emit(graph, aten.reshape.default, found.source, [found.groups, count])
        key = emit(graph, aten.transpose.int, numbers, 0, 1)
        key = emit(graph, aten.contiguous.default, key)
        like = emit(graph, aten.ones_like.default, emit(graph, aten.unsqueeze.default, key, 1))
        return emit(
            graph,
            choose_blocks.overload,
            query=emit(graph, aten.mul.Tensor, like, one_of_each),
            key=key,
            key_cache=index_cache(graph, key, block_size),
            **{name: step_input(graph, name) for name in names},
            top_k=budget,
            sparse_block_size=1,
            recent=0,
        )
