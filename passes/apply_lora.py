"""`apply_lora`: apply each request's LoRA adapter to linears, embeddings and routed experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.add_lora import add_lora
from llmc.kernels.collectives import embed_shard, shard_ids
from llmc.kernels.expert_linear import expert_linear
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, through, val
from llmc.passes.inputs import (
    AdapterInput,
    Shard,
    StepInput,
    WeightInput,
    add_constant,
    add_input,
    input_of,
    step_input,
    token_input,
)
from llmc.passes.sharding_rules import RESHAPES


@graph_pass()
def apply_lora(gm: fx.GraphModule, *, slots: int = 0, rank: int = 0, expert_rank: int = 0) -> Notes:
    """Add the adapters' contribution in place to the output of every linear and embedding whose
    weight is a parameter.

    `slots` adapters can be active at a time, with ranks up to `rank`; the contents of the slots
    change while the engine runs. In a merged linear, each part has its own A and its own columns of
    the output. For an embedding, A x is a row of A's transpose, which is looked up for each token.
    Each routed expert has its own A and B, with ranks up to `expert_rank`; 0: not supported.

    If a weight is sharded, A is sharded like its inputs and B like its output channels. If the
    linear's output is a term of a sum over the ranks, so is the adapter's contribution, and it is
    added before the all-reduce.

    Before:
        y = aten.linear(x, w)
        e = aten.embedding(w, ids)
        z = llmc.expert_linear(rows, w [E, N, K], bias, aten.reshape(chosen [tokens, k], [-1]), ..)
    After:
        y = aten.linear(x, w)
        llmc.add_lora(y, x, a [slots, parts, rank, K], b [slots, rank, N], bounds [parts + 1],
                      adapter [tokens], or [samples] at the output head)
        e = aten.embedding(w, ids)
        low = aten.index(a [slots, V, rank], [adapter - 1, ids])
        llmc.add_lora(e, low, identity [slots, 1, rank, rank], b [slots, rank, H], [0, H], adapter)
        and of llmc.embed_shard(ids, w), `low` is 0 where the row is another rank's
        z = llmc.expert_linear(rows, w, bias, expert, ..)
        llmc.add_lora(z, rows, a [slots, E, expert_rank, K], b [slots, E, expert_rank, N], [0, N],
                      adapter, expert)
        and after aten.bmm(rows [E, tokens, K], w [E, K, N]), which has rows of all tokens for each
        expert, with aten.repeat(adapter, [E]) and the number of the expert of each row
    """
    if not slots:
        return ["--enable-lora is not set"]
    adapters = _Adapters(gm.graph, slots, rank, expert_rank)
    rewrites = {
        aten.linear.default: adapters.on_linear,
        aten.embedding.default: adapters.on_embedding,
        embed_shard.overload: adapters.on_embedding,
        expert_linear.overload: adapters.on_experts,
        aten.bmm.default: adapters.on_all_experts,
    }
    left: Counter[str] = Counter()
    for node in calls(gm.graph, *rewrites):
        if not any(is_call(user, add_lora.overload) for user in node.users):
            left[rewrites[node.target](node)] += 1
    return [f"{count} {reason}" for reason, count in left.items() if reason]


class _Adapters:
    """Rewrites calls. Each method returns what was not rewritten and why, or ""."""

    def __init__(self, graph: fx.Graph, slots: int, rank: int, expert_rank: int) -> None:
        self._graph, self._slots = graph, slots
        self._rank, self._expert_rank = rank, expert_rank
        self._rows = _Rows(graph)
        self._constants: dict[tuple[str, Any], fx.Node] = {}

    def on_linear(self, node: fx.Node) -> str:
        given = arguments(node)
        role = input_of(given.weight)
        adapter = self._rows.of(given.input)
        if not isinstance(role, WeightInput):
            return "linears: the weight is computed"
        if adapter is None:
            return "linears: their rows are not the tokens"
        widths = _widths(node, role)
        channels, depth = (int(n) for n in val(given.weight).shape)
        role_a = AdapterInput(
            op="linear", matrix="a", weights=role.parts, widths=widths, shards=_shards(role, 1)
        )
        a = self._input(node, given.weight, role_a, len(widths), self._rank, depth)
        b = self._input(node, given.weight, replace(role_a, matrix="b"), self._rank, channels)
        with self._graph.inserting_after(node):
            emit(
                self._graph, add_lora.overload, node, given.input, a, b, self._bounds(node, widths),
                adapter,
            )  # fmt: skip
        return ""

    def on_embedding(self, node: fx.Node) -> str:
        given = arguments(node)
        role = input_of(given.weight)
        adapter = self._rows.of(node)
        if not isinstance(role, WeightInput):
            return "embeddings: the weight is computed"
        if adapter is None:
            return "embeddings: their rows are not the tokens"
        graph, rank = self._graph, self._rank
        length, channels = (int(n) for n in val(given.weight).shape)
        role_a = AdapterInput(
            op="embedding", matrix="a", weights=role.parts, widths=(channels,),
            shards=_shards(role, 0),
        )  # fmt: skip
        a = self._input(node, given.weight, role_a, length, rank)
        b = self._input(node, given.weight, replace(role_a, matrix="b"), rank, channels)
        bounds = self._bounds(node, (channels,))
        identity = self._constant(
            ("lora_identity", val(node).dtype),
            node,
            torch.eye(rank, dtype=val(node).dtype).repeat(self._slots, 1, 1, 1),
        )
        with graph.inserting_after(node):
            # rows without an adapter get slot -1, the last one; add_lora skips them
            slot = emit(graph, aten.sub.Tensor, adapter, 1)
        with graph.inserting_before(slot.next):
            if is_call(node, embed_shard.overload):
                low = self._own_rows(a, slot, given.ids, length)
            else:
                low = emit(graph, aten.index.Tensor, a, [slot, given.indices])
            emit(graph, add_lora.overload, node, low, identity, b, bounds, adapter)
        return ""

    def _own_rows(self, a: fx.Node, slot: fx.Node, ids: fx.Node, length: int) -> fx.Node:
        """The rows of `a` for ids of this rank, and zeros for the others."""
        graph = self._graph
        own = emit(graph, shard_ids.overload, ids, length)
        known = emit(graph, aten.clamp.default, own, 0, length - 1)
        rows = emit(graph, aten.index.Tensor, a, [slot, known])
        is_here = emit(graph, aten.eq.Tensor, own, known)
        return emit(graph, aten.mul.Tensor, rows, emit(graph, aten.unsqueeze.default, is_here, -1))

    def on_experts(self, node: fx.Node) -> str:
        given = arguments(node)
        role = input_of(given.weight)
        chosen = through(given.expert, *RESHAPES)
        if not self._expert_rank:
            return "linears of routed experts: max_lora_expert_rank is 0"
        if not isinstance(role, WeightInput) or len(role.parts) != 1:
            return "linears of routed experts: the weight is computed"
        if val(chosen).dim() != 2 or not self._rows.are_tokens(chosen):
            return "linears of routed experts: their rows are not the tokens' choices in order"
        experts, *size = (int(n) for n in val(given.weight).shape)
        channels, depth = reversed(size) if given.transposed else size
        role_a = AdapterInput(
            op="experts", matrix="a", weights=role.parts, widths=(channels,),
            shards=_shards(role, 1 if given.transposed else 2),
        )  # fmt: skip
        a, b = self._of_experts(node, given.weight, role_a, experts, depth, channels)
        with self._graph.inserting_after(node):
            emit(
                self._graph, add_lora.overload, node, given.x, a, b,
                self._bounds(node, (channels,)), self._rows.of_tokens(), given.expert,
            )  # fmt: skip
        return ""

    def on_all_experts(self, node: fx.Node) -> str:
        given = arguments(node)
        role = input_of(given.mat2)
        if not isinstance(role, WeightInput) or len(role.parts) != 1:
            return ""  # no experts
        if not self._expert_rank:
            return "linears of routed experts: max_lora_expert_rank is 0"
        experts, depth, channels = (int(n) for n in val(given.mat2).shape)
        if not self._rows.are_tokens_of_each(given.self, experts):
            return "linears of routed experts: their rows are not all tokens for each expert"
        role_a = AdapterInput(
            op="experts", matrix="a", weights=role.parts, widths=(channels,),
            shards=_shards(role, 1),
        )  # fmt: skip
        a, b = self._of_experts(node, given.mat2, role_a, experts, depth, channels)
        adapter, expert = self._rows.of_all_experts(experts, self._constant)
        bounds = self._bounds(node, (channels,))
        with self._graph.inserting_after(node):
            emit(self._graph, add_lora.overload, node, given.self, a, b, bounds, adapter, expert)
        return ""

    def _of_experts(
        self,
        node: fx.Node,
        weight: fx.Node,
        role_a: AdapterInput,
        experts: int,
        depth: int,
        channels: int,
    ) -> tuple[fx.Node, fx.Node]:
        shape = experts, self._expert_rank
        a = self._input(node, weight, role_a, *shape, depth)
        return a, self._input(node, weight, replace(role_a, matrix="b"), *shape, channels)

    def _input(self, node: fx.Node, weight: fx.Node, role: AdapterInput, *shape: int) -> fx.Node:
        name = f"{weight.name}_{role.op}_lora_{role.matrix}"
        value = val(node).new_empty((self._slots, *shape))
        return add_input(self._graph, name, role, value)

    def _bounds(self, node: fx.Node, widths: tuple[int, ...]) -> fx.Node:
        edges = [sum(widths[:i]) for i in range(len(widths) + 1)]
        table = torch.tensor(edges, dtype=torch.int32)
        return self._constant(("lora_bounds", widths), node, table)

    def _constant(self, key: tuple[str, Any], node: fx.Node, table: Tensor) -> fx.Node:
        if key not in self._constants:
            placed = table.to(val(node).device)
            self._constants[key] = add_constant(self._graph, key[0], placed, node)
        return self._constants[key]


def _shards(role: WeightInput, inputs_at: int) -> tuple[Shard | None, ...]:
    """The shards of a weight with its inputs in dimension `inputs_at`, in `AdapterInput`'s form."""
    return tuple(s and replace(s, dim=int(s.dim == inputs_at)) for s in role.shards)


def _widths(linear: fx.Node, role: WeightInput) -> tuple[int, ...]:
    """Output channels of each parameter: a merged linear's output is split right after it."""
    if len(role.parts) == 1:
        return (int(val(linear).shape[-1]),)
    (split,) = (user for user in linear.users if is_call(user, aten.split_with_sizes.default))
    return tuple(int(n) for n in arguments(split).split_sizes)


class _Rows:
    """The adapter of each row of a linear's input, computed once per step."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._num_tokens = str(val(token_input(graph)).shape[0])
        self._made: dict[str, fx.Node] = {}

    def of(self, source: fx.Node) -> fx.Node | None:
        """int32, one for each row of `source`; None if its rows are neither tokens nor samples."""
        if is_call(source, aten.index_select.default) and input_of(
            arguments(source).index
        ) == StepInput(name="logits_index"):
            return self._once("row", self._by_sample)
        return self.of_tokens() if self.are_tokens(source) else None

    def are_tokens(self, source: fx.Node) -> bool:
        """Whether `source` has a row for each token of the step."""
        lead = [str(n) for n in val(source).shape[:-1]]
        return [n for n in lead if n != "1"] == [self._num_tokens]

    def are_tokens_of_each(self, source: fx.Node, experts: int) -> bool:
        """Whether `source` has a row for each expert and token, in this order."""
        return [str(n) for n in val(source).shape[:-1]] == [str(experts), self._num_tokens]

    def of_tokens(self) -> fx.Node:
        return self._once("token", self._by_token)

    def of_all_experts(self, experts: int, constant: Any) -> tuple[fx.Node, fx.Node]:
        """The adapter and the expert of each row, if they are all tokens for each expert."""
        graph, adapter = self._graph, self.of_tokens()
        name = f"token of {experts}"
        if name not in self._made:
            with graph.inserting_after(adapter):
                self._made[name] = emit(graph, aten.repeat.default, adapter, [experts])
            numbers = constant(("lora_experts", experts), adapter, torch.arange(experts)[:, None])
            with graph.inserting_after(adapter):
                zeros = emit(graph, aten.zeros_like.default, token_input(graph))
            with graph.inserting_after(zeros):
                of_row = emit(graph, aten.add.Tensor, numbers, zeros)
            with graph.inserting_after(of_row):
                self._made[f"expert of {experts}"] = emit(graph, aten.reshape.default, of_row, [-1])
        return self._made[name], self._made[f"expert of {experts}"]

    def _once(self, name: str, make: Callable[[fx.Node], fx.Node]) -> fx.Node:
        if name not in self._made:
            table = step_input(self._graph, "adapter")
            self._made[name] = make(table)
        return self._made[name]

    def _by_sample(self, table: fx.Node) -> fx.Node:
        row = step_input(self._graph, "row")
        with self._graph.inserting_before(self._first_call()):
            return emit(self._graph, aten.index_select.default, table, 0, row)

    def _by_token(self, table: fx.Node) -> fx.Node:
        graph = self._graph
        start = step_input(graph, "query_start")
        request_row = step_input(graph, "request_row")
        with graph.inserting_before(self._first_call()):
            by_request = emit(graph, aten.index_select.default, table, 0, request_row)
            # token t belongs to the request with the first end above t
            count = emit(
                graph,
                aten.cumsum.default,
                emit(graph, aten.ones_like.default, token_input(graph)),
                0,
            )
            ends = emit(graph, aten.slice.Tensor, start, 0, 1)
            ends = emit(graph, aten.to.dtype, ends, torch.int64)
            request = emit(graph, aten.searchsorted.Tensor, ends, count)
            return emit(graph, aten.index_select.default, by_request, 0, request)

    def _first_call(self) -> fx.Node:
        found: fx.Node = next(n for n in self._graph.nodes if n.op != "placeholder")
        return found
