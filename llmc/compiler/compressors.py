"""Replaces modules that compress windows of tokens to entries with our ops during capture.

Their own code closes as many windows as the tokens of a call fill, so its computation depends on
that number. They are recognized by their signature and attributes. The replacement gives every
token the entry that ends with it. It is verified: with random weights and tokens, the module's own
code must produce the same entries, and show the same ones to each token.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CompileError
from llmc.kernels.entries import entries
from llmc.kernels.pool_windows import pool_windows

_PARAMETERS = ["hidden_states", "q_residual", "position_ids", "cache", "layer_idx"]
_OLD_NAMES = {"past_key_values": "cache"}  # until transformers 5.23
_PARTS = ("compress_rate", "head_dim", "kv_proj", "gate_proj", "position_bias", "kv_norm")
_ROTATION = "apply_rotary_pos_emb"  # transformers' name for it, in every model's file
_FRESH = (None, None, None, None)  # no state yet: passes/slot_state.py adds one to every call
_PROBE_TOP_K = 3
_PROBE_WINDOWS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compressed:
    """The arguments of `entries`, for T tokens."""

    entry: Tensor  # [T, D]
    query: Tensor | None
    key: Tensor | None
    weights: Tensor | None
    top_k: int


def use_compressors(model: nn.Module) -> None:
    """Replace compressors. CompileError if a module looks like one but computes something else."""
    found = [m for m in model.modules() if _is_compressor(m)]
    inner = {id(getattr(m, "indexer", None)) for m in found}
    proved: set[Any] = set()
    for module in found:
        if id(module) in inner:
            continue
        kind = (type(module), module.compress_rate, module.head_dim)
        if kind not in proved:
            _prove(module)
            proved.add(kind)
        module.forward = MethodType(_marked, module)


def has_compressors(model: nn.Module) -> bool:
    """Whether layers attend to entries of compressors that `use_compressors` has replaced."""
    return any(getattr(m.forward, "__func__", None) is _marked for m in model.modules())


def _is_compressor(module: nn.Module) -> bool:
    names = [_OLD_NAMES.get(n, n) for n in inspect.signature(module.forward).parameters]
    return names == _PARAMETERS and all(hasattr(module, name) for name in _PARTS)


def _marked(
    self: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    cache: Any,
    layer_idx: int,
) -> tuple[Tensor, None]:
    """hidden [1, T, N] -> each token's entry [1, 1, T, D] as a marker op, and no mask."""
    made = _compress(self, hidden_states, q_residual, position_ids)
    rows = entries.overload(
        made.entry, made.query, made.key, made.weights, self.compress_rate, made.top_k
    )
    return rows[None, None], None


def _compress(m: Any, hidden: Tensor, residual: Tensor, positions: Tensor) -> _Compressed:
    entry = _entries(m, hidden, positions)
    index = getattr(m, "indexer", None)
    if index is None:
        return _Compressed(entry=entry, query=None, key=None, weights=None, top_k=0)
    query = index.q_b_proj(residual).unflatten(-1, (-1, index.head_dim)).transpose(1, 2)
    query = _rotated(index, query, positions)[0].transpose(0, 1)
    return _Compressed(
        entry=entry,
        query=query,
        key=_entries(index, hidden, positions),
        weights=index.scorer.weights_proj(hidden)[0].float(),
        top_k=index.index_topk,
    )


def _entries(m: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    """[1, T, N] -> [T, D]. Entries of tokens that do not end a window are never read."""
    values, gates = m.kv_proj(hidden)[0], m.gate_proj(hidden)[0]
    series = m.position_bias.shape[1] // m.head_dim
    pooled = m.kv_norm(pool_windows.overload(values, gates, m.position_bias, series, *_FRESH))
    first = positions - positions % m.compress_rate  # start of each token's window
    return _rotated(m, pooled[None, None], first)[0, 0]


def _rotated(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [1, H, T, D] with the code of the module's model."""
    cos, sin = m.rotary_emb(x, position_ids=positions, layer_type=m.rope_layer_type)
    rotated: Tensor = _rotation(type(m))(x, cos, sin)
    return rotated


def _rotation(kind: type[nn.Module]) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(sys.modules[kind.__module__], _ROTATION)
    return function


def _prove(module: Any) -> None:
    probe = _random_copy(module)
    rate, name = module.compress_rate, type(module).__name__
    try:
        for seed, tokens in enumerate((rate, _PROBE_WINDOWS * rate + rate // 2)):
            _compare(probe, tokens, seed)
    except (RuntimeError, AttributeError, TypeError, ValueError, IndexError, KeyError) as e:
        raise CompileError(
            f"{name} appears to compress windows of {rate} tokens to entries, but its code "
            f"does something unexpected ({' '.join(str(e).split())[:200]})"
        ) from e


def _random_copy(module: nn.Module) -> Any:
    """A copy of the module on the CPU with random float32 weights, selecting few entries."""
    probe: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*probe.parameters(), *probe.buffers()):
            if tensor.is_floating_point():
                spread = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
                tensor.copy_(spread * torch.randn(tensor.shape, generator=generator))
    if hasattr(probe, "indexer"):
        probe.indexer.index_topk = _PROBE_TOP_K
    return probe


@torch.no_grad()
def _compare(probe: Any, tokens: int, seed: int) -> None:
    """Raise ValueError if the module's own code produces or shows other entries."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, tokens, probe.kv_proj.in_features, generator=generator)
    residual = hidden
    if hasattr(probe, "indexer"):
        residual = torch.randn(1, tokens, probe.indexer.q_b_proj.in_features, generator=generator)
    positions = torch.arange(tokens)[None]
    want, bias = type(probe).forward(probe, hidden, residual, positions, None, 0)
    made = _compress(probe, hidden, residual, positions)
    rate = probe.compress_rate
    if not torch.allclose(made.entry[rate - 1 :: rate], want[0, 0], rtol=1e-3, atol=1e-4):
        raise ValueError("random inputs give different entries")
    ended = (positions[0] + 1) // rate
    seen = torch.arange(tokens // rate) < ended[:, None]
    shown = bias.expand(1, 1, tokens, -1)[0, 0] == 0
    if made.query is None or made.key is None or made.weights is None:
        is_same = torch.equal(seen, shown)
    else:
        products = torch.einsum("qhd,kd->qhk", made.query, made.key[rate - 1 :: rate]).relu()
        scores = (made.weights[:, :, None] * products).sum(1).masked_fill(~seen, -torch.inf)
        count = min(made.top_k, scores.shape[1])
        best = scores.topk(count).values
        # ties can be broken in any way
        chosen = scores.masked_fill(~shown, -torch.inf).topk(count).values
        is_same = bool((shown.sum(1) == ended.clamp(max=made.top_k)).all())
        is_same = is_same and torch.allclose(chosen, best, rtol=1e-3, atol=1e-4)
    if not is_same:
        raise ValueError("random inputs show different entries")


@contextmanager
def no_masks(model: nn.Module) -> Iterator[None]:
    """Inside this context, a model with compressors gets no masks, which it would extend by its
    entries. The visible keys are known anyway: entries by their marker op, and the window from the
    arguments of its attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from llmc.compiler import interface

    if not has_compressors(model):
        yield
        return
    ALL_MASK_ATTENTION_FUNCTIONS.register(interface.NAME, _no_mask)
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.register(interface.NAME, interface.mask_function)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
