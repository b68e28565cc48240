"""An EAGLE-3 draft head -> ModelSource, for all naming schemes of published heads.

They use different names for the same things: `midlayer` or `layers.0`, fields at the top of
config.json or below `transformer_layer_config` and `eagle_config`. They may lack an embedding.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmc.config import EngineConfig
from llmc.errors import CheckpointError, ConfigError
from llmc.passes.widen_logits import ID_MAP
from llmc.pooling import DraftHead
from llmc.startup.config_facts import FactsCache, describe
from llmc.startup.model_files import ModelFiles, load_quantization, parse_json, resolve_model
from llmc.startup.resolve import ModelSource

if TYPE_CHECKING:
    from llmc.weights.checkpoint import Readable

_INSIDE = "model."  # submodule of the captured module that has most of the parameters
_OUTSIDE = ("lm_head.weight", ID_MAP)
_FUSED = "model.fc.weight"
EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(
    r"layers\.0\.((hidden_norm|input_layernorm|post_attention_layernorm)\.weight"
    r"|self_attn\.[qk]_norm\.weight"
    r"|(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.(weight|bias))"
)
_KNOWN = (
    *("fc.weight", "fc.bias", "input_norm.weight", "norm.weight", "embed_tokens.weight"),
    *_OUTSIDE,
)
# Derived from others, or only used in training.
_UNUSED = re.compile(r"t2d|.*rotary_emb\.inv_freq|verifier_.*")
_NESTED = ("transformer_layer_config", "eagle_config")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MAX_TAPS = 16


def resolve_head(
    target: ModelSource, config: EngineConfig, facts_cache: FactsCache | None = None
) -> ModelSource:
    """The head named in `config`. Raises CheckpointError if it is not a head or is damaged,
    ConfigError if it is for another model."""
    files = resolve_model(config)
    stated = _stated(files)
    stored = load_quantization(files)
    load_hf_config = functools.cache(functools.partial(_load_config, files, stated))
    facts = facts_cache.load(files, config) if facts_cache is not None else None
    if facts is None:
        facts = describe(load_hf_config())
        if facts_cache is not None:
            facts_cache.save(files, config, facts, load_hf_config())

    @functools.cache
    def open_tensors() -> Mapping[str, Readable]:
        from llmc.weights.tensors import open_tensors

        return _renamed(files.name, open_tensors(files.path, stored, target.dtype))

    if facts.vocab_size != target.facts.vocab_size:
        raise ConfigError(
            f"the draft head {files.name!r} is for a vocabulary of {facts.vocab_size} tokens, but "
            f"{target.files.name!r} has {target.facts.vocab_size}; use a head trained for it"
        )
    return ModelSource(
        config=config,
        files=files,
        facts=replace(facts, context=target.model_len),  # its training length is no limit
        device=target.device,
        dtype=target.dtype,
        stored=stored,
        pooling=None,
        draft_head=_head(files.name, stated, open_tensors(), facts.vocab_size),
        load_hf_config=load_hf_config,
        open_tensors=open_tensors,
    )


def _stated(files: ModelFiles) -> dict[str, Any]:
    """config.json, with nested fields moved to the top."""
    stated = parse_json(files.path / "config.json")
    for name in _NESTED:
        if isinstance(nested := stated.get(name), dict):
            stated = {**nested, **{k: v for k, v in stated.items() if v is not None}}
    return stated


def _load_config(files: ModelFiles, stated: Mapping[str, Any]) -> Any:
    from llmc.compiler.draft_head import make_config

    return make_config(files.name, stated)


def layers_of(files: ModelFiles) -> tuple[int, ...]:
    """The layers whose inputs the head reads, for `tap_states`."""
    return _layers(files.name, _stated(files))


def _layers(name: str, stated: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers for `tap_states`; () if the head uses EAGLE-3's default."""
    given = stated.get(_LAYER_IDS) or []
    if (
        not isinstance(given, list)
        or len(given) > _MAX_TAPS
        or not all(type(layer) is int and layer >= 0 for layer in given)
    ):
        raise CheckpointError(f"config.json of {name!r}: {_LAYER_IDS} is {given!r:.80}")
    # Some heads list the layers whose outputs they read, others those whose inputs. No head reads
    # the input of layer 1, and lists of outputs start with that layer.
    after = int(given[:1] == [1])
    return tuple(layer + after for layer in given)


def _renamed(name: str, tensors: Mapping[str, Readable]) -> Mapping[str, Readable]:
    found = {}
    for stored, tensor in tensors.items():
        own = stored.removeprefix(_INSIDE).replace("midlayer.", "layers.0.")
        if _UNUSED.fullmatch(own):
            continue
        if own not in _KNOWN and not _LAYER.fullmatch(own):
            raise CheckpointError(
                f"{name!r} has a tensor {stored!r}, which no EAGLE-3 head that llmc serves has"
            )
        found[own if own in _OUTSIDE else _INSIDE + own] = tensor
    return found


def _head(
    name: str, stated: Mapping[str, Any], tensors: Mapping[str, Readable], vocab_size: int
) -> DraftHead:
    missing = [part for part in (_FUSED, "lm_head.weight") if part not in tensors]
    if missing or len(tensors[_FUSED].shape) != 2:
        what = missing[0] if missing else f"{_FUSED} of two dimensions"
        raise CheckpointError(
            f"{name!r} has no {what.removeprefix(_INSIDE)}, so it is "
            "not an EAGLE-3 head (to draft with a whole model, use the method draft_model)"
        )
    if stated.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"config.json of {name!r} has use_aux_hidden_state false: it reads the last hidden "
            "state, which is not served; use a head that reads those of inner layers"
        )
    num_taps = len(_layers(name, stated)) or 3
    inputs = tensors[_FUSED].shape[1]
    if inputs == 0 or inputs % num_taps:
        raise CheckpointError(
            f"{name!r}: fc.weight reads {inputs} values, which are not {num_taps} hidden states"
        )
    draft_vocab_size = stated.get("draft_vocab_size") or vocab_size
    if type(draft_vocab_size) is not int or not 0 < draft_vocab_size <= vocab_size:
        raise CheckpointError(
            f"config.json of {name!r}: draft_vocab_size is {draft_vocab_size!r:.40}, but there are "
            f"{vocab_size} tokens"
        )
    if ID_MAP not in tensors and draft_vocab_size != vocab_size:
        raise CheckpointError(
            f"{name!r} has no {ID_MAP} to tell which of the {vocab_size} tokens its "
            f"{draft_vocab_size} are"
        )
    if ID_MAP in tensors:
        _check_ids(name, tensors[ID_MAP], draft_vocab_size, vocab_size)
    return DraftHead(
        num_taps=num_taps,
        width=inputs // num_taps,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        has_id_map=ID_MAP in tensors,
        has_fc_bias=f"{_INSIDE}fc.bias" in tensors,
        norm_before_fc=f"{_INSIDE}input_norm.weight" in tensors,
        norm_before_residual=stated.get("norm_before_residual") is True,
    )


def _check_ids(name: str, offsets: Readable, count: int, vocab_size: int) -> None:
    import torch

    if offsets.shape != (count,) or offsets.dtype.is_floating_point:
        raise CheckpointError(
            f"{name!r}: {ID_MAP} has shape {list(offsets.shape)} and type {offsets.dtype}, but "
            f"{count} integers are expected (draft_vocab_size)"
        )
    ids = offsets.read().long() + torch.arange(count)
    wrong = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise CheckpointError(
            f"{name!r}: {ID_MAP} yields token {int(ids[first])} for its token {first}, but there "
            f"are {vocab_size}"
        )
    if len(ids.unique()) != count:
        raise CheckpointError(f"{name!r}: {ID_MAP} maps two of its tokens to the same token")
