"""What each placeholder of a step graph is: the roles that capture assigns and passes rewrite.

Every placeholder carries one of these in `node.meta["input"]`. Weights are graph inputs, never
constants, so that one graph serves every checkpoint of an architecture. A pass that wants them in
another form (merged, quantized) replaces the placeholder with one that has another recipe, and the
loader fills that recipe straight from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, fx

from llmc.kernels.quantized_linear import Part, Quantization
from llmc.kernels.step_inputs import input_named


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A tensor that the runner passes in at every step, by its name (kernels/step_inputs.py)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInput:
    """One half of a layer's paged cache. `layer` counts attention calls in execution order.

    After them come the caches of sparse indexers, which have only keys. `tokens` is the number of
    tokens per block if that differs from its number of rows (page_entries); 0: a row is a token.
    """

    layer: int
    part: Literal["key", "value"]
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPart:
    """One of the tensors of a quantized weight; otherwise their recipes are identical.

    `kept`: it has the checkpoint's bits; otherwise it is quantized while loading.
    """

    to: Quantization
    part: Part
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInput:
    """The state that a recurrent call keeps per request, in slots; `call` numbers the calls."""

    call: int
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TapInput:
    """A cache that `tap_states` added to a draft head's target model."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A tensor-parallel rank's shard of a tensor: a part of each section of `dim`.

    `sections` are (length, parts), end to end; a section with one part is replicated on all ranks.
    If it has fewer parts than there are ranks (`size`), neighboring ranks hold the same part.
    `rank`: every rank holds the part of this one.
    """

    dim: int
    sections: tuple[tuple[int, int], ...]
    size: int
    rank: int | None = None

    @property
    def length(self) -> int:
        """The size of `dim` on each rank."""
        return sum(length // parts for length, parts in self.sections)

    @property
    def whole(self) -> int:
        """The size of `dim` in the whole tensor."""
        return sum(length for length, _ in self.sections)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The (start, length) ranges of the whole dimension that this rank holds, in order."""
        found, start = [], 0
        rank = rank if self.rank is None else self.rank
        for length, parts in self.sections:
            part = rank * parts // self.size
            found.append((start + part * (length // parts), length // parts))
            start += length
        return found

    def of(self, tensor: Tensor, rank: int) -> Tensor:
        """This rank's part of the whole tensor."""
        pieces = [tensor.narrow(self.dim, start, n) for start, n in self.ranges(rank)]
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInput:
    """A recipe over the model's parameters: `parts` by name, concatenated along dimension 0.

    `transposed`: each part is stored [in, out] and is transposed to [out, in] first.
    `quantized`: the result is the quantized weight, its scales or its zeros.
    `shards`: the shard of each part (after transposing) that is used; () uses all.
    `order`: ranges (start, length) of the rows, which are kept in this order, perhaps more than
    once; () keeps all.
    `functions`: names of elementwise functions that are applied in order; names of dtypes are
    casts. The first is the dtype in which the parts are loaded.
    `first_rank`: only rank 0 has it and the others have zeros, since it is added to a term that is
    summed over the ranks.
    """

    parts: tuple[str, ...]
    transposed: bool = False
    quantized: QuantizedPart | None = None
    shards: tuple[Shard | None, ...] = ()
    first_rank: bool = False
    order: tuple[tuple[int, int], ...] = ()
    functions: tuple[str, ...] = ()

    @property
    def pieces(self) -> list[tuple[str, Shard | None]]:
        """Each part and the shard of it that is used."""
        return list(zip(self.parts, self.shards or [None] * len(self.parts), strict=True))


# of a recipe, by name
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "neg": torch.neg,
    "plus_one": lambda x: x + 1,
}

AdaptedOp = Literal["linear", "embedding", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInput:
    """A or B of the LoRA adapters on one op, stacked by slot (passes/apply_lora.py).

    `weights` are the parameters that a (merged) linear consists of, with `widths` output channels
    each; embeddings and routed experts have one. `shards` are a rank's shards of each: a `dim` of 0
    means output channels (those of B), 1 means inputs (those of A); () is the whole weight.
    """

    op: AdaptedOp
    matrix: Literal["a", "b"]
    weights: tuple[str, ...]
    widths: tuple[int, ...]
    shards: tuple[Shard | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConstantInput:
    """A tensor known at capture time: a buffer computed from the model's config, or a table."""

    tensor: Tensor
    shard: Shard | None = None


Input = StepInput | CacheInput | StateInput | TapInput | WeightInput | AdapterInput | ConstantInput


def input_of(node: Any) -> Input | None:
    """The role of a placeholder, or None for any other node."""
    if isinstance(node, fx.Node) and node.op == "placeholder":
        role: Input = node.meta["input"]
        return role
    return None


def placeholder_of(graph: fx.Graph, role: Input) -> fx.Node | None:
    """The placeholder with this role, if the graph has it."""
    return next((n for n in graph.nodes if input_of(n) == role), None)


def add_input(graph: fx.Graph, name: str, role: Input, val: Tensor) -> fx.Node:
    """Add a placeholder after the existing ones; `val` is a fake tensor of its shape and dtype."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.target = node.name  # fx appends a number to a name that is already in use
    node.meta["input"] = role
    node.meta["val"] = val
    return node


def add_constant(graph: fx.Graph, name: str, tensor: Tensor, like: fx.Node) -> fx.Node:
    """Add one of the caller's tensors as a placeholder; `like` is any node that has a value."""
    fake = fake_like(like, *tensor.shape, dtype=tensor.dtype)
    return add_input(graph, name, ConstantInput(tensor=tensor), fake)


# Sizes of fake values at capture; the number of tokens is symbolic.
_SIZES: Mapping[str, int] = {
    "2": 2, "R": 2, "R + 1": 3, "S": 2, "blocks": 2,
    "2 + 2 * prompts": 4, "2 + 2 * long prompts": 6,
    "rows": 4, "context": 2, "biases": 2, "mask words": 2, "bad word tokens": 2,
}  # fmt: skip


def step_input(
    graph: fx.Graph,
    name: str,
    val: Tensor | None = None,
    *,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> fx.Node:
    """The placeholder of the step input `name`, added if the graph does not have it yet.

    `val`: its fake value, for an input that kernels/step_inputs.py does not define; `sizes`:
    dimensions to take from another value of the graph.
    """
    node = placeholder_of(graph, StepInput(name=name))
    if node is not None:
        return node
    fake = _fake(graph, name, sizes) if val is None else val
    return add_input(graph, name, StepInput(name=name), fake)


def _fake(graph: fx.Graph, name: str, sizes: Mapping[str, Any]) -> Tensor:
    spec = input_named(name)
    known = {**_SIZES, **sizes}
    if "T" in spec.dims and "T" not in sizes:
        known["T"] = token_input(graph).meta["val"].shape[0]
    like = next(n for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)).meta["val"]
    device = torch.device("cpu") if spec.on_host else like.device
    with like.fake_mode:  # else torch would start CUDA, if it is asked for
        fake: Tensor = like.new_empty(spec.shape(known), dtype=spec.dtype, device=device)
    return fake


def token_input(graph: fx.Graph) -> fx.Node:
    """A placeholder with one element per token of the step: the token ids or the positions."""
    found: fx.Node = next(
        n
        for n in graph.nodes
        if input_of(n) in (StepInput(name="token_ids"), StepInput(name="positions"))
    )
    return found


def fake_like(node: fx.Node, *shape: Any, dtype: torch.dtype) -> Tensor:
    """An empty fake tensor in the same fake mode as `node`'s value."""
    return node.meta["val"].new_empty(shape, dtype=dtype)  # type: ignore[no-any-return]
