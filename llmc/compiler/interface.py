"""How transformers' modeling code calls llmc: functions that it looks up by name.

They are registered as `llmc` in transformers' own tables. The attention function calls the marker
op `llmc::attention`. The mask function returns a *mask marker*, an empty tensor whose shape encodes
which tokens are visible, since some models specify a window only in the mask. The experts function
calls `llmc::expert_linear` around the model's own gate.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from llmc.errors import CompileError
from llmc.kernels.attention import attention as attention_marker
from llmc.kernels.expert_linear import expert_linear

NAME = "llmc"
KEY_CACHE = "llmc_key_cache"
VALUE_CACHE = "llmc_value_cache"

# The config field with the number of tokens up to which an indexer that returns a mask shows all
# keys, and the module's attribute for it.
INDEXER_BUDGET = "indexer_budget"
_INDEXER_LIMIT = "token_budget"
# Keyword arguments of attention with a sparse indexer's selection: positions [1, T, N], or blocks
# for each KV head [1, Hkv, T, N], whose size is an attribute of its module.
_CHOSEN_KEYS = "indices"
_CHOSEN_BLOCKS = "block_indices"
# A bias that is added to the scores, for each query and key.
_BIAS = "position_bias"
# A length below this is not that of the tokens, which has no bound.
_MAX_STATES = 1 << 31
# Only passed by functions that make bidirectional masks.
_BOTH_WAYS = "allow_is_bidirectional_skip"
_SHOWS_ALL = "bidirectional_mask_function"  # transformers' mask without a limit

# Tensor keyword arguments whose information the packed step already has. Any other tensor (such as
# a position bias) would change the result, so it is refused.
_IGNORED = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskMarker:
    """What a mask shows: earlier tokens within a window or chunk (0: no limit); later ones unless
    `causal`."""

    window: int = 0
    chunk: int = 0
    causal: bool = True

    def encode(self) -> Tensor:
        # four dimensions, as masks have
        shape = (0, self.window + 1, self.chunk + 1, 1 if self.causal else 2)
        return torch.empty(shape, device="meta", dtype=torch.bool)

    @staticmethod
    def decode(mask: Tensor | None) -> MaskMarker:
        if mask is None:
            return MaskMarker()
        if mask.dim() != 4 or mask.shape[0] != 0 or mask.shape[3] not in (1, 2):
            raise CompileError(
                f"the model's code modified the attention mask before its attention "
                f"(shape {tuple(mask.shape)}), which is not supported yet"
            )
        window, chunk = int(mask.shape[1]) - 1, int(mask.shape[2]) - 1
        return MaskMarker(window=window, chunk=chunk, causal=int(mask.shape[3]) == 1)


def choose_all_keys(model: nn.Module) -> None:
    """Make sparse indexers that return a mask of selected keys show all keys.

    They do so up to their budget, to which the context is limited (llmc/startup/config_facts.py).
    """
    for module in model.modules():
        parameters = list(inspect.signature(module.forward).parameters)
        if _INDEXER_LIMIT in vars(module) and "attention_mask" in parameters:
            module.forward = _all_of(parameters.index("attention_mask"))


@functools.cache  # equal modules share one function
def _all_of(place: int) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        mask = args[place] if place < len(args) else kwargs["attention_mask"]
        return torch.ones_like(mask, dtype=torch.bool)

    return forward


def mask_function(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask interface. It is called with `local_size` for windows and chunks, and for
    bidirectional masks with a flag that allows skipping trivial ones."""
    config = kwargs.get("config")
    if _BOTH_WAYS in kwargs:
        if kwargs.get("use_vmap"):
            raise CompileError("the model extends its bidirectional mask, which is not supported")
        is_whole = getattr(kwargs.get("mask_function"), "__name__", "") == _SHOWS_ALL
        # up to this distance on both sides
        window = 0 if is_whole else int(getattr(config, "sliding_window", 0)) + 1
        return MaskMarker(window=window, causal=False).encode()
    size = kwargs.get("local_size")
    if not size:
        return MaskMarker().encode()
    if size == getattr(config, "attention_chunk_size", None):
        return MaskMarker(chunk=int(size)).encode()
    return MaskMarker(window=int(size)).encode()


@contextmanager
def unpacked_positions() -> Iterator[None]:
    """Inside this context, transformers does not search a mask's positions for packed sequences: a
    marker could not express the result, and capturing the search takes a tenth of the time."""
    from transformers import masking_utils

    search = "find_packed_sequence_indices"
    if not hasattr(masking_utils, search):
        yield
        return
    with mock.patch.object(masking_utils, search, lambda position_ids: None):
        yield


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D] ... -> ([1, T, H, Dv], None)."""
    known = {*_IGNORED, _CHOSEN_KEYS, _CHOSEN_BLOCKS, _BIAS}
    unknown = [k for k, v in kwargs.items() if isinstance(v, Tensor) and k not in known]
    if unknown:
        raise CompileError(
            f"{type(module).__name__} passes {unknown} to its attention, which is not supported"
        )
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    bias = None
    if _has_row_for_each(query, attention_mask):
        # passes/find_key_biases.py determines what the model's code computed from the marker
        attention_mask, bias = None, attention_mask
    mask = MaskMarker.decode(attention_mask)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    extras = (s_aux, sinks, kwargs.get(_BIAS))
    is_plain = not softcap and all(extra is None for extra in extras)
    if not causal and attention_mask is None and is_plain and _is_within_tokens(query, key):
        return _attend_within_tokens(query, key, value, scale), None
    causal = causal and mask.causal
    window = mask.window or (0 if mask.chunk or bias is not None else int(sliding_window or 0))
    if not causal:
        # A causal mask's limit can differ from what FlashAttention gets: tokens within less than
        # this distance on both sides.
        window = int(sliding_window or 0) if mask.causal else mask.window
        if mask.chunk or not is_plain:
            raise CompileError(
                f"{type(module).__name__} attends to later tokens with chunks, a soft cap, sinks "
                "or a position bias, which is not supported"
            )
    out = attention_marker.overload(
        query,
        key,
        value,
        getattr(module, KEY_CACHE),
        getattr(module, VALUE_CACHE),
        scale,
        window,
        mask.chunk,
        float(softcap or 0.0),
        s_aux if sinks is None else _sinks_of_tokens(sinks),
        None,
        *_chosen(module, kwargs),
        causal,
        bias,
        None,
        _position_bias(module, query, key, kwargs.get(_BIAS)),
    )
    return out, None


def _is_within_tokens(query: Tensor, key: Tensor) -> bool:
    """Whether tokens are not the sequence of an attention but its heads: each token attends to some
    of its own states, such as the outputs of earlier layers. The sequence then has a fixed length.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    has_fixed_length = statically_known_true(query.shape[2] < _MAX_STATES)
    return has_fixed_length and statically_known_true(query.shape[1] == key.shape[1])


def _attend_within_tokens(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query [1, T, Q, D], key, value [1, T, N, D] -> [1, Q, T, Dv]. Every query sees all N keys."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    out = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(value.dtype), value)
    return out.transpose(1, 2)


def _has_row_for_each(query: Tensor, mask: Tensor | None) -> bool:
    """Whether a mask [0, H, T, T] is no longer a marker, but was computed from one."""
    return mask is not None and mask.dim() == 4 and bool(mask.shape[2] == query.shape[2])


def _position_bias(
    module: nn.Module, query: Tensor, key: Tensor, bias: Tensor | None
) -> Tensor | None:
    """The bias that the model adds to the scores [1, H, T, T]; passes/find_distance_biases.py
    determines how it is computed."""
    if bias is not None and bias.shape != (*query.shape[:3], key.shape[2]):
        raise CompileError(
            f"{type(module).__name__} adds a bias of shape {tuple(bias.shape)} to its scores, "
            "instead of one for each head, query and key"
        )
    return bias


def _sinks_of_tokens(sinks: Tensor) -> Tensor:
    """Sink logits [1, H, T, 1], one for each token and head -> [T, H]."""
    if sinks.dim() != 4:
        raise CompileError(f"the model's sinks {tuple(sinks.shape)} are not [1, heads, tokens, 1]")
    return sinks.squeeze(3).squeeze(0).transpose(0, 1)


def _chosen(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Tensor | None, int]:
    """The model's selection of keys or blocks for attention, and the block size."""
    blocks = kwargs.get(_CHOSEN_BLOCKS)
    if blocks is None:
        return kwargs.get(_CHOSEN_KEYS), 1
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise CompileError(
            f"{type(module).__name__} attends to selected blocks, but does not say how many tokens "
            "they have (indexer.block_size)"
        )
    return blocks, size


def experts_function(
    module: Any, hidden: Tensor, expert_index: Tensor, expert_weight: Tensor
) -> Tensor:
    """transformers' experts interface: hidden [T, K], index and weight [T, top_k] -> [T, K].

    Every selected (token, expert) pair is a row; the gate between the two linears is the model's.
    """
    top_k = expert_index.shape[-1]
    expert = expert_index.reshape(-1)
    rows = hidden.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, hidden.shape[-1])
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    linear = expert_linear.overload
    inner = linear(rows, up, up_bias, expert, module.is_transposed)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = linear(inner, module.down_proj, down_bias, expert, module.is_transposed)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    pairs: Tensor = out.reshape(-1, top_k, out.shape[-1]) * expert_weight.unsqueeze(-1)
    return pairs.sum(1).to(hidden.dtype)


def register() -> None:
    """Register the functions in transformers' tables. Idempotent."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_function)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_function)


def use_experts(model: nn.Module) -> None:
    """Make the routed experts of a built model use `experts_function`."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(module, "_apply_gate") and config is not None:
            config._experts_implementation = NAME
