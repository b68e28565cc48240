"""The minimum that one op of a step must read, write and compute, derived from its arguments.

Each operand's bytes count once: a weight as it is stored, only the part of a cache that the
requests attend to, only the selected rows of a table. Operations are the multiplications and
additions of products, attention and recurrences; all other ops are memory-bound on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from llmc.kernels.add_lora import of_experts
from llmc.kernels.attention import first_visible
from llmc.kernels.latent_attention import expands
from llmc.kernels.quantized_linear import CHANNELS
from llmc.kernels.step_inputs import ROW_TABLES
from llmc.passes.inputs import (
    AdapterInput,
    CacheInput,
    ConstantInput,
    Input,
    StateInput,
    StepInput,
)

# Operations per value of the state and per token.
_STATE_OPERATIONS = {
    "delta_rule": 7,
    "selective_scan": 5,
    "linear_recurrence": 2,
    "conv_delta_rule": 7,
    "conv_scan": 5,
}
_PICKED = ("index_select", "index", "gather")  # they read only what they return
_EMBEDDINGS = {"embedding": "indices", "embed_shard": "ids", "quantized_embedding": "ids"}
_TABLES_BY_POSITION = ("cos_table", "sin_table")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes read and written; multiplications and additions."""

    num_bytes: int = 0
    num_operations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTokens:
    """One request of a step: its tokens in this step, and its context length after it."""

    new: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the op `name`: its arguments by name, the roles of those that are inputs of the
    step, and the names of those that it writes to."""

    name: str
    given: Mapping[str, Any]
    roles: Mapping[str, Input]
    written: frozenset[str]
    result: Any
    requests: Sequence[RequestTokens]

    @property
    def num_tokens(self) -> int:
        return sum(request.new for request in self.requests)


def work_of(call: Call) -> Work:
    """The minimum work of a call; zero for a view."""
    read = {name: tensors(value) for name, value in call.given.items()}
    known = {t.untyped_storage()._cdata for found in read.values() for t in found}
    made = [t for t in tensors(call.result) if t.untyped_storage()._cdata not in known]
    if not made and not call.written:
        return Work()
    if call.name == "ban_words":  # reads a few words and writes to a few logits
        return Work()
    num_bytes = sum(_size(t) for t in made)
    for name, found in read.items():
        role = call.roles.get(name)
        num_bytes += sum(_bytes_of(call, name, tensor, role) for tensor in found)
        if name in call.written and role is None:
            num_bytes += sum(_size(tensor) for tensor in found)
    return Work(num_bytes=num_bytes, num_operations=_operations(call))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """The bytes of a tensor; for an expanded one, those of its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _bytes_of(call: Call, name: str, tensor: Tensor, role: Input | None) -> int:
    given = call.given
    if isinstance(role, CacheInput):
        places = tensor.shape[0] * tensor.shape[2]  # blocks, and tokens of each
        used = sum(_span(call, r) for r in call.requests) if "context_len" in given else 0
        if "slot_mapping" in given:
            used += call.num_tokens
        return tensor.nbytes // places * used
    if isinstance(role, StateInput):
        return 2 * tensor.nbytes // tensor.shape[0] * len(call.requests)
    if isinstance(role, StepInput) and role.name in ROW_TABLES:
        return 0  # a few values per request
    if isinstance(role, AdapterInput):
        used = _adapted_rows(given).unique().numel()
        return int(used * _adapter_shape(tensor, given).numel() * tensor.element_size())
    if call.name in _EMBEDDINGS and name != _EMBEDDINGS[call.name]:
        rows = tensor.shape[0] * (CHANNELS if call.name == "quantized_embedding" else 1)
        return int(tensor.nbytes * given[_EMBEDDINGS[call.name]].numel() // rows)
    if isinstance(role, ConstantInput) and name in _TABLES_BY_POSITION:
        return tensor.nbytes // tensor.shape[0] * call.num_tokens
    if call.name in _PICKED and name == next(iter(given)):
        return min(_size(tensor), sum(_size(t) for t in tensors(call.result)))
    if given.get("expert") is not None and role is not None:
        return int(tensor.nbytes * given["expert"].unique().numel() // tensor.shape[0])
    return _size(tensor)


def _adapted_rows(given: Mapping[str, Any]) -> Tensor:
    """The numbers of the A and B matrices used by the rows of an `add_lora` that use any."""
    numbers: Tensor = given["adapter"]
    expert = given.get("expert")
    if expert is not None:
        numbers = of_experts(numbers, expert, *given["a"].shape[:2])
    return numbers[numbers > 0]


def _adapter_shape(tensor: Tensor, given: Mapping[str, Any]) -> torch.Size:
    """The shape of the part of A or B that a row uses: one slot, or one expert of a slot."""
    return tensor.shape[1:] if given.get("expert") is None else tensor.shape[2:]


def _operations(call: Call) -> int:
    given, name = call.given, call.name
    if name in ("linear", "fused_linear", "add_linear", "norm_add_linear"):
        x, weight = (given[n] for n in given if n in ("x", "input", "weight"))
        return int(2 * x.numel() * weight.shape[0])
    if name == "route":
        return int(2 * given["x"].numel() * given["router"].shape[0])
    if name.endswith("quantized_linear"):
        return int(2 * given["x"].numel() * given["weight"].shape[0] * CHANNELS)
    if name.endswith("expert_linear"):
        sums = call.result.shape[-1] * (1 if given.get("act") is None else 2)
        return int(2 * given["expert"].numel() * given["x"].shape[-1] * sums)
    if name in ("mm", "bmm", "matmul"):
        left, right = list(given.values())[:2]
        return int(2 * left.numel() * right.shape[-1])
    if name in ("addmm", "baddbmm"):
        left, right = list(given.values())[1:3]
        return int(2 * left.numel() * right.shape[-1])
    if name == "add_lora":
        sizes = (_adapter_shape(given[matrix], given).numel() for matrix in ("a", "b"))
        return int(2 * _adapted_rows(given).numel() * sum(sizes))
    if name == "causal_conv":
        return int(2 * call.num_tokens * given["weight"].numel())
    if name in _STATE_OPERATIONS:
        values = given["state"][0].numel()
        taps = given["conv_weight"].numel() if "conv_weight" in given else 0
        return call.num_tokens * (_STATE_OPERATIONS[name] * int(values) + 2 * taps)
    if name in ("latent_attention", "rope_latent_attention"):
        return sum(_latent_operations(call, request) for request in call.requests)
    if name in ("paged_attention", "rope_attention", "choose_keys", "choose_blocks"):
        _, heads, width = given["query"].shape
        if name in ("paged_attention", "rope_attention"):
            width += given["value_cache"].shape[3]
        return int(2 * heads * width * sum(_pairs(call, r) for r in call.requests))
    return 0


def _latent_operations(call: Call, request: RequestTokens) -> int:
    """The operations in the form in which the request is computed: see `expands`."""
    given = call.given
    rows, rank = given["weight"].shape
    _, heads, dim = given["query"].shape
    width, v_dim = given["key_cache"].shape[3], call.result.shape[2]
    sizes = {"dim": dim - (width - rank), "shared": width - rank, "v_dim": v_dim, "rank": rank}
    pairs = _pairs(call, request)
    if _windows(call) == (0, 0) and expands(
        request.new, request.context, **sizes, itemsize=given["weight"].element_size()
    ):
        return int(2 * (request.context * rows * rank + pairs * heads * (dim + v_dim)))
    return int(2 * (request.new * rows * rank + pairs * heads * (width + rank)))


def _span(call: Call, request: RequestTokens) -> int:
    """Cached tokens that the request's queries attend to, each counted once."""
    first = request.context - request.new
    seen = (request.context - first_visible(first, *_windows(call))) // _tokens_of_key(call)
    return min(seen, request.new * _most_chosen(call, request))


def _pairs(call: Call, request: RequestTokens) -> int:
    """The number of (query, key) pairs."""
    windows, most, rate = _windows(call), _most_chosen(call, request), _tokens_of_key(call)
    return sum(
        min((place + 1 - first_visible(place, *windows)) // rate, most)
        for place in range(request.context - request.new, request.context)
    )


def _tokens_of_key(call: Call) -> int:
    """How many tokens a key of an indexer represents."""
    return int(call.given.get("rate", 1))


def _windows(call: Call) -> tuple[int, int]:
    return call.given.get("window", 0), call.given.get("chunk", 0)


def _most_chosen(call: Call, request: RequestTokens) -> int:
    """The maximum number of keys that a query attends to; limited if the model chooses them."""
    chosen = call.given.get("chosen")
    if not isinstance(chosen, torch.Tensor):
        return request.context
    return int(chosen.shape[2]) * int(call.given["sparse_block_size"])
