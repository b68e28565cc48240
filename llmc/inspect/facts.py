"""Facts about a decoder layer from its graph: its attention, its caches, the weights it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from llmc.inspect.shorten import Shortened
from llmc.inspect.stages import Stage
from llmc.kernels.attention import attention
from llmc.kernels.expert_linear import expert_linear
from llmc.passes.base import writes
from llmc.passes.edit import arguments
from llmc.passes.find_entries import split_entries
from llmc.passes.inputs import CacheInput, StateInput, WeightInput, input_of, token_input


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """`window` and `chunk` in tokens; 0 means none. `extras`: softcap, sinks, biases, indexer."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    chunk: int
    extras: tuple[str, ...]
    entry_tokens: int = 0  # tokens per compressed entry, used in addition to the window; 0: none

    @property
    def kind(self) -> str:
        if self.entry_tokens:
            return f"window {self.window:,}, entries of {self.entry_tokens:,}"
        if self.window:
            return f"window {self.window:,}"
        return f"chunk {self.chunk:,}" if self.chunk else "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    num_experts: int
    num_chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One part of the model: a decoder layer, or the part before or after the layers.

    `read_bytes` are read in every step, whatever the batch; `expert_bytes` are those of routed
    experts. Cache bytes are per token, state bytes per request.
    """

    attention: tuple[AttentionFacts, ...]
    experts: ExpertFacts | None
    other_ops: tuple[str, ...]  # our ops that keep state between tokens
    kv_bytes_per_token: int
    state_bytes: int
    weight_bytes: int
    read_bytes: int
    expert_bytes: int


def layer_facts(stages: Sequence[Stage], shortened: Shortened) -> dict[int, LayerFacts]:
    """Facts by layer of the whole model; -1 is before the layers, their number after them."""
    captured = stages[0].layers.count
    found = {i: _facts(stages, i) for i in range(-1, captured + 1)}
    whole = {-1: found[-1], shortened.num_layers: found[captured]}
    for i, stand_in in enumerate(shortened.stand_in):
        whole[i] = found[stand_in]
    return dict(sorted(whole.items()))


def _facts(stages: Sequence[Stage], layer: int) -> LayerFacts:
    early, late = _nodes(stages[0], layer), _nodes(stages[-1], layer)
    # attention written out in a model's code is only recognized by a later pass
    attended = next(filter(None, (_attentions(stage, layer) for stage in stages)), ())
    experts = next((_experts(n) for n in early if n.target is expert_linear.overload), None)
    kv = sum(_written_bytes(n) for n in late)
    state = 0
    stateful: list[str] = []
    weights = read = chosen = 0
    again = _repeated(stages[-1])
    for node in late:
        if node.op != "placeholder":
            continue
        role = input_of(node)
        if isinstance(role, WeightInput):
            size = num_bytes(node)
            weights += 0 if node in again else size
            targets = {str(u.target) for u in node.users}
            if any("expert_linear" in t for t in targets):
                chosen += size
            elif not all("embedding" in target for target in targets):
                read += size
        elif isinstance(role, StateInput):
            state += num_bytes(node, skip=(0,))  # [slots, ...]
            stateful.append(role.op.replace("_", " "))
    return LayerFacts(
        attention=attended,
        experts=experts,
        other_ops=tuple(dict.fromkeys(stateful)),
        kv_bytes_per_token=kv,
        state_bytes=state,
        weight_bytes=weights,
        read_bytes=read,
        expert_bytes=chosen,
    )


def _repeated(stage: Stage) -> set[fx.Node]:
    """Inputs for weights that an earlier input has too, which are in memory once: a quantized head
    that is tied to the embeddings."""
    seen: list[WeightInput] = []
    found = set()
    for node in stage.graph.graph.nodes:
        if node.op == "placeholder" and isinstance(role := input_of(node), WeightInput):
            if role in seen:
                found.add(node)
            seen.append(role)
    return found


def _nodes(stage: Stage, layer: int) -> list[fx.Node]:
    return [n for n in stage.graph.graph.nodes if stage.layers.of.get(n) == layer]


def _attentions(stage: Stage, layer: int) -> tuple[AttentionFacts, ...]:
    return tuple(_attention(n) for n in _nodes(stage, layer) if n.target is attention.overload)


def _written_bytes(node: fx.Node) -> int:
    """Cache bytes per token that this call writes; 0 if it writes no keys and values."""
    if node.op != "call_function" or not writes(node):
        return 0
    caches = [n for n in node.all_input_nodes if isinstance(input_of(n), CacheInput)]
    return sum(_token_bytes(n) for n in caches)


def _token_bytes(cache: fx.Node) -> int:
    role = cache.meta["input"]
    row = num_bytes(cache, skip=(0, 2))  # [blocks, heads, rows, dim]
    return -(-row * int(cache.meta["val"].shape[2]) // role.tokens) if role.tokens else row


def _attention(node: fx.Node) -> AttentionFacts:
    given = arguments(node)
    extras = []
    if given.softcap:
        extras.append(f"softcap {float(given.softcap):g}")
    if given.sinks is not None:
        extras.append("sinks")
    if given.slopes is not None:
        extras.append("ALiBi")
    if given.distance_bias is not None:
        extras.append("bias by distance")
    if given.chosen is not None:
        extras.append("sparse indexer")
    behind = split_entries(given.key)
    beside = None if behind is None else arguments(behind[1])
    if beside is not None and beside.index_query is not None:
        extras.append("sparse indexer")
    q, k, v = (_shape(n) for n in (given.query, given.key, given.value))
    return AttentionFacts(
        entry_tokens=0 if beside is None else int(beside.rate),
        heads=q[1],
        kv_heads=k[1],
        head_dim=q[3],
        v_head_dim=v[3],
        window=int(given.window),
        chunk=int(given.chunk),
        extras=tuple(extras),
    )


def _experts(node: fx.Node) -> ExpertFacts:
    """The numbers of experts; rows are (token, expert) pairs, so rows per token are the chosen."""
    given = arguments(node)
    chosen = _shape(given.x)[0] // max(1, _shape(token_input(node.graph))[0])
    return ExpertFacts(num_experts=_shape(given.weight)[0], num_chosen=max(1, chosen))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(size_hint(s) for s in node.meta["val"].shape)


def size_hint(size: Any) -> int:
    """A size as a number; for a symbolic one, its value in the capture's example."""
    return size if isinstance(size, int) else int(size.node.hint)


def num_bytes(node: fx.Node, skip: Sequence[int] = ()) -> int:
    """The bytes of a value, without the dimensions in `skip`."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [size_hint(s) for i, s in enumerate(value.shape) if i not in skip]
    return math.prod(sizes) * value.dtype.itemsize


def total(facts: Mapping[int, LayerFacts], field: str) -> int:
    return sum(getattr(f, field) for f in facts.values())
