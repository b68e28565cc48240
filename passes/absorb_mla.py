"""`absorb_mla`: multi-head latent attention attends to its latent and caches only that."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.kernels.attention import attention
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    only_user,
    set_arguments,
    swapped,
    val,
)
from llmc.passes.inputs import WeightInput, input_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Latent:
    """What the keys [1, H, T, D + Dr] and values [1, H, T, Dv] of all heads are computed from."""

    latent: fx.Node  # [1, T, R] or [1, 1, T, R]
    weight: fx.Node  # [H * (D + Dv), R]: a head's keys, then its values
    shared: fx.Node  # [1, 1, T, Dr]: the part of the key that all heads share
    heads: int
    key_dim: int  # D
    value_dim: int  # Dv

    @property
    def rank(self) -> int:
        return int(val(self.weight).shape[1])

    @property
    def shared_dim(self) -> int:
        return int(val(self.shared).shape[3])

    @property
    def cached(self) -> int:
        """The number of cached values per token."""
        return self.rank + self.shared_dim

    @property
    def expanded(self) -> int:
        return self.heads * (self.key_dim + self.shared_dim + self.value_dim)


@graph_pass()
def absorb_mla(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """If all heads' keys and values are a linear of one latent, pass that linear to attention.

    The latent and the part of the keys that all heads share form a single key of one head, and
    page_attention caches only that. The weight is not quantized: one that is stored quantized is
    dequantized when it is loaded.

    A score is q . (Wk c) = (Wk^T q) . c, and an output is sum p (Wv c) = Wv (sum p c). So the
    weight can be applied to queries and outputs (absorbed), or to the latents, which expands them
    to full keys and values. page_attention turns the marker into `latent_attention`, which picks
    whichever takes fewer multiplications for each request of a step: absorbing for few new tokens,
    expanding for prompts (`kernels.latent_attention.expands` has the formula).

    Before:
        kv = aten.linear(c [1, 1, T, R], w [H * (D + Dv), R])
        k, v = aten.split_with_sizes(kv by head [1, H, T, D + Dv], [D, Dv], -1)
        o = llmc.attention(q [1, H, T, D + Dr], cat(k, r [1, 1, T, Dr] for every head), v, ...)
    After:
        key = aten.cat(c, r) [1, 1, T, R + Dr]
        o = llmc.attention(q [1, H, T, D + Dr], key, key[..., :R], ..., weight=w)
    """
    graph = gm.graph
    reasons: Counter[str] = Counter()
    done: Counter[tuple[int, int]] = Counter()
    made: dict[Any, tuple[_Latent, fx.Node, fx.Node]] = {}  # layers may share keys and values
    for marker in calls(graph, attention.overload):
        given = arguments(marker)
        tensors = (given.key, given.value)
        found = made[tensors][0] if tensors in made else _find(given.key, given.value)
        if found is None:
            continue
        reason = unwanted
        if given.chosen is not None:
            reason = "a sparse indexer chooses their keys"
        elif given.distance_bias is not None or _has_token_sinks(given.sinks):
            reason = "they have a per-token position bias or per-token sinks"
        elif tensors not in made:
            reason = reason or _why_not(found)
        if reason is not None:
            reasons[reason] += 1
            continue
        if tensors not in made:
            made[tensors] = (found, *_keys_and_values(graph, found, marker))
        _, key, value = made[tensors]
        set_arguments(marker, key=key, value=value, weight=found.weight)
        done[found.expanded, found.cached] += 1
    notes = [
        f"{count} layers cache {cached:,} values per token instead of {expanded:,}"
        for (expanded, cached), count in done.items()
    ]
    return notes + [f"{count} layers not rewritten: {reason}" for reason, count in reasons.items()]


def _has_token_sinks(sinks: fx.Node | None) -> bool:
    return sinks is not None and val(sinks).dim() == 2


def _find(key: Any, value: Any) -> _Latent | None:
    """The latent that `key` and `value` are computed from, if there is one."""
    if not is_call(key, aten.cat.default) or len(arguments(key).tensors) != 2:
        return None
    own, spread = arguments(key).tensors
    if arguments(key).dim not in (-1, 3) or not is_call(spread, aten.expand.default):
        return None
    shared = arguments(spread).self
    if not (is_call(own, operator.getitem) and is_call(value, operator.getitem)):
        return None
    split, other = arguments(own), arguments(value)
    if split.source is not other.source or (split.index, other.index) != (0, 1):
        return None
    if not is_call(split.source, aten.split_with_sizes.default):
        return None
    parts = arguments(split.source)
    view = swapped(parts.self, 1, 2)
    if parts.dim not in (-1, 3) or len(parts.split_sizes) != 2:
        return None
    if not is_call(view, aten.view.default, aten.reshape.default):
        return None
    linear = arguments(view).self
    if not is_call(linear, aten.linear.default):
        return None
    source = arguments(linear)
    heads, width = val(view).shape[2:]
    one_head = val(shared).dim() == 4 and val(shared).shape[1] == 1
    sizes = list(val(source.input).shape)
    one_latent = len(sizes) == 3 or (len(sizes) == 4 and sizes[1] == 1)
    if source.bias is not None or not (one_head and one_latent and sizes[0] == 1):
        return None
    return _Latent(
        latent=source.input,
        weight=source.weight,
        shared=shared,
        heads=int(heads),
        key_dim=int(parts.split_sizes[0]),
        value_dim=int(parts.split_sizes[1]),
    )


def _why_not(found: _Latent) -> str | None:
    if not isinstance(input_of(found.weight), WeightInput) or only_user(found.weight) is None:
        return "the weight of keys and values is computed, or is also used elsewhere"
    if found.cached >= found.expanded:
        return "the latent is no smaller than the keys and values"
    return None


def _keys_and_values(graph: fx.Graph, found: _Latent, marker: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The new key [1, 1, T, R + Dr], and its first R channels as the value."""
    with graph.inserting_before(marker):
        latent = found.latent
        if val(latent).dim() == 3:
            latent = emit(graph, aten.unsqueeze.default, latent, 1)
        key = emit(graph, aten.cat.default, [latent, found.shared], -1)
        value = emit(graph, aten.slice.Tensor, key, 3, 0, found.rank)
    return key, value
