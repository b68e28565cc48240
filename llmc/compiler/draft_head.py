"""The modules of draft heads, which read a model's hidden states: EAGLE-3 heads, and the layer that
some checkpoints have after those of their model (multi-token prediction, MTP).

    EAGLE-3: hidden states of the model - fc -> g [T, N]         MTP: output of its norm -> g
                  (for a token that it drafted itself: its own last u in place of g)
    token embeddings e [T, N]   |                                 e, g
        attention over [norm(e), norm(g)] -> + g -> MLP -> u      linear of both -> a layer -> u
                                          u -> norm -> logits of the next token

A token's position has the hidden states of the previous token, from which the model drew it.
Layers are transformers' code, of the class that the config names. Parameters have the checkpoints'
names, except for those that llmc/startup/eagle3.py renames.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CheckpointError, reason_of
from llmc.kernels.draft_states import CARRIED, LEFT, draft_states
from llmc.passes.layers import layer_list
from llmc.passes.widen_logits import ID_MAP
from llmc.pooling import DRAFTED, DraftHead

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_MOST = 10**8
_NOT_A_LAYERS = ("model_type", "architectures", "auto_map", "quantization_config")
_IN_LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def make_config(name: str, stated: Mapping[str, Any]) -> Any:
    """The config of an EAGLE-3 head's only layer, from config.json. Raises CheckpointError."""
    from transformers import AutoConfig

    given = {k: v for k, v in stated.items() if k not in _NOT_A_LAYERS}
    try:
        config = AutoConfig.for_model(
            str(stated.get("model_type")), **given | {"num_hidden_layers": 1}
        )
    except Exception as e:  # transformers raises nearly every type here, from KeyError to OSError
        raise CheckpointError(f"config.json of {name!r} can't be used: {reason_of(e)}") from e
    for field in (*_SIZES, "vocab_size"):
        value = getattr(config, field, None)
        if type(value) is not int or not 0 < value <= _MOST:
            raise CheckpointError(f"config.json of {name!r}: {field} is {value!r:.80}")
    return config


def make_head(maker: Any, config: Any, head: DraftHead, **options: Any) -> nn.Module:
    """A module whose forward drafts: `maker`'s model of the config, extended by the head's parts.

    Its inputs are input_ids [1, T], where DRAFTED is added to tokens that it drew itself, and
    position_ids [1, T]; it returns logits [1, T, D]. CheckpointError for models of another form.
    """
    text = config.get_text_config()
    if head.is_own_layer:
        text.num_hidden_layers += 1
        kinds = getattr(text, "layer_types", None)
        if isinstance(kinds, list):
            text.layer_types = [*kinds, kinds[-1]]
    module = maker.from_config(config, **options)
    path, _ = layer_list(name for name, _ in module.named_parameters())
    base: Any = module.get_submodule(path.rpartition(".")[0])
    layer: Any = module.get_submodule(path)[-1]
    _check_form(base, ("norm", "rotary_emb", "embed_tokens"))
    add = _add_mtp if head.is_own_layer else _add_eagle3
    draft: Callable[[Tensor, Tensor], Tensor] = add(
        module, base, layer, head, int(text.hidden_size), options.get("dtype")
    )

    def forward(input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        embeddings = base.embed_tokens(input_ids & (DRAFTED - 1))
        return CausalLMOutput(logits=draft(embeddings, position_ids))

    module.forward = forward
    made: nn.Module = module
    return made


def _check_form(module: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise CheckpointError(
            f"{type(module).__name__} has no {missing[0]}, so it is not a draft head layer that "
            "llmc supports"
        )


def _add_eagle3(
    module: Any, base: Any, layer: Any, head: DraftHead, size: int, dtype: Any
) -> Callable[[Tensor, Tensor], Tensor]:
    _check_form(layer, _IN_LAYER)
    _check_form(layer.self_attn, _PROJECTIONS)
    for name in _PROJECTIONS:  # they read the token's embedding along with the hidden state
        plain = getattr(layer.self_attn, name)
        wide = nn.Linear(2 * size, plain.out_features, plain.bias is not None, dtype=dtype)
        setattr(layer.self_attn, name, wide)
    layer.hidden_norm = copy.deepcopy(base.norm)
    inputs = head.num_taps * head.width
    base.fc = nn.Linear(inputs, size, head.has_fc_bias, dtype=dtype)
    if head.norm_before_fc:
        base.input_norm = copy.deepcopy(base.norm)
        base.input_norm.weight = nn.Parameter(torch.ones(inputs, dtype=dtype))
    module.set_output_embeddings(nn.Linear(size, head.draft_vocab_size, False, dtype=dtype))
    if head.has_id_map:  # read by passes/widen_logits.py
        module.register_buffer(ID_MAP, torch.zeros(head.draft_vocab_size, dtype=torch.int64))

    def draft(embeddings: Tensor, position_ids: Tensor) -> Tensor:
        blank = embeddings.new_zeros(*embeddings.shape[:2], head.width)
        states = torch.cat([draft_states.overload(blank, i) for i in range(head.num_taps)], -1)
        if head.norm_before_fc:
            states = base.input_norm(states)
        hidden = draft_states.overload(base.fc(states), CARRIED)
        normed = layer.hidden_norm(hidden)
        residual = normed if head.norm_before_residual else hidden
        attended = layer.self_attn(
            hidden_states=torch.cat((layer.input_layernorm(embeddings), normed), dim=-1),
            position_embeddings=base.rotary_emb(hidden, position_ids),
            attention_mask=None,
        )
        hidden = residual + attended[0]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        hidden = draft_states.overload(hidden, LEFT)
        logits: Tensor = module.get_output_embeddings()(base.norm(hidden))
        return logits

    return draft


def _add_mtp(
    module: Any, base: Any, layer: Any, head: DraftHead, size: int, dtype: Any
) -> Callable[[Tensor, Tensor], Tensor]:
    layer.enorm, layer.hnorm = copy.deepcopy(base.norm), copy.deepcopy(base.norm)
    layer.eh_proj = nn.Linear(2 * size, size, False, dtype=dtype)
    layer.shared_head = nn.Module()
    layer.shared_head.norm = copy.deepcopy(base.norm)

    def draft(embeddings: Tensor, position_ids: Tensor) -> Tensor:
        tap = draft_states.overload(torch.zeros_like(embeddings), 0)
        hidden = draft_states.overload(base.norm(tap), CARRIED)
        both = torch.cat((layer.enorm(embeddings), layer.hnorm(hidden)), dim=-1)
        hidden = layer.eh_proj(both)
        out = layer(
            hidden,
            attention_mask=None,
            position_ids=position_ids,
            position_embeddings=base.rotary_emb(hidden, position_ids),
        )
        hidden = draft_states.overload(out[0] if isinstance(out, tuple) else out, LEFT)
        logits: Tensor = module.get_output_embeddings()(layer.shared_head.norm(hidden))
        return logits

    return draft
