"""`check_architecture`: EngineConfig -> a certificate of the model's architecture, in seconds.

    config -> shrunken copy -> random checkpoint -> check_model -> ArchitectureCertificate

The model's weights are not read; `llmc check` checks the model with its real weights.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from llmc.check.certificate import Certificate
from llmc.check.check import check_model, find_certificate
from llmc.check.encoder import TASKS, check_encoder, describe
from llmc.check.reference import save_random
from llmc.check.shrink import Shrunken, keep_layers, num_layers, shared_layers, shrink
from llmc.compiler.attention_fallback import build_model
from llmc.config import EngineConfig
from llmc.errors import CheckpointError, LlmcError, reason_of
from llmc.inspect.shorten import layer_kinds, one_of_each
from llmc.model_info import OnPhase
from llmc.passes.layers import layer_list
from llmc.pooling import LM, Head
from llmc.startup.architecture_certificate import ArchitectureCertificate
from llmc.startup.resolve import pick_device, resolve

log = logging.getLogger(__name__)

Depth = Literal["one of each", "to last kind", "whole"]
_DEPTHS: tuple[Depth, ...] = ("one of each", "to last kind", "whole")
_MAX_PARAMETERS = 400_000_000
_MAX_ROUNDING = 1e-3  # of the logits, relative
_STEADY = 4  # maximum factor from one layer's error to the next
_BUILD_ERRORS = (  # raised by transformers for a config that shrinking made inconsistent
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_architecture(
    config: EngineConfig, *, on_phase: OnPhase | None = None
) -> ArchitectureCertificate:
    """Check an architecture. A model that can't be compared is `not checked`, with the reason.

    Raises CheckpointError or ConfigError only if the model can't be found or read.
    """
    start = time.perf_counter()
    source = resolve(config, pick_device(config.device))
    if config.trust_remote_code:
        return ArchitectureCertificate.not_checked("its code comes with the model")
    # The logits of a decoder are compared, whatever task this model is served for.
    config = dataclasses.replace(config, task="generate", pooling="auto", normalize=None)
    reason = ""
    hf_config = source.load_hf_config()
    head = LM if source.pooling is None or not source.facts.is_encoder else source.pooling.head
    for shrunken in shrunken_configs(hf_config, dataclasses.replace(head, dense=())):
        try:
            if head.encoder:
                small = make_config(hf_config, shrunken.config)
                error = check_encoder(config, small, TASKS[head.kind])
                return describe(error, shrunken.notes)
            found = _check(config, hf_config, shrunken, on_phase)
        except (LlmcError, *_BUILD_ERRORS) as e:  # the next one is closer to the model
            reason = reason or reason_of(e)
            continue
        if not found.certified and is_rounding(found):
            return ArchitectureCertificate.not_checked(
                "its small model amplifies rounding: the first layers agree, and the final logits "
                f"differ by {found.logits.relative:.1e}, with the same tokens"
            )
        return _describe(found, shrunken, time.perf_counter() - start)
    return ArchitectureCertificate.not_checked(reason or "its config can't be made small")


def shrunken_configs(hf_config: Any, head: Head = LM) -> Iterator[Shrunken]:
    """Configs that can be built, from the smallest to those closer to the model."""
    for narrow in (True, False):
        for depth in _DEPTHS:
            try:
                shrunken = _shrunken(hf_config, head, narrow=narrow, depth=depth)
            except (LlmcError, *_BUILD_ERRORS) as e:
                log.debug("shrunken config (narrow %s, depth %s): %s", narrow, depth, e)
                continue
            yield shrunken


def make_config(hf_config: Any, fields: Mapping[str, Any]) -> Any:
    """A config of the same class with these fields. Raises what the class raises."""
    return type(hf_config).from_dict(dict(fields))


def _shrunken(hf_config: Any, head: Head, *, narrow: bool, depth: Depth) -> Shrunken:
    fields = hf_config.to_dict()
    text_config = hf_config.get_text_config()
    names = (name for name in fields if getattr(hf_config, name, None) is text_config)
    text = "" if text_config is hf_config else next(names, "")
    shrunken = shrink(fields, text=text, narrow=narrow)
    module = _on_meta(make_config(hf_config, shrunken.config), head)
    if depth != "whole":
        shrunken = _cut(hf_config, shrunken, text, module, to_last_kind=depth == "to last kind")
        module = _on_meta(make_config(hf_config, shrunken.config), head)
    size = sum(p.numel() for p in module.parameters())
    if size > _MAX_PARAMETERS:
        raise CheckpointError(f"it has {size / 1e6:.0f}M parameters even when shrunk")
    return shrunken


def _on_meta(hf_config: Any, head: Head) -> nn.Module:
    return build_model(hf_config, torch.float32, head).module


def _cut(
    hf_config: Any, shrunken: Shrunken, text: str, module: nn.Module, *, to_last_kind: bool
) -> Shrunken:
    """Keep the first layers, up to one of every kind and one more, and likewise for the layers at
    the end that share keys and values. `to_last_kind`: up to one of the model's last kind."""
    config = dict(shrunken.config)
    inner = config[text] if text else config
    path, count = layer_list(name for name, _ in module.named_parameters())
    layers = module.get_submodule(path) if count else None
    if not isinstance(layers, nn.ModuleList) or not len(layers) == count == num_layers(inner):
        raise CheckpointError("its list of layers was not found")
    built = make_config(hf_config, config)
    kinds = layer_kinds(layers, built)
    first_shared = count - shared_layers(inner)
    own = one_of_each(kinds[:first_shared])
    if to_last_kind:
        own += kinds[own - 1 : first_shared].index(kinds[first_shared - 1])
    kept = list(range(own))
    if first_shared < count:
        kept += range(first_shared, first_shared + one_of_each(kinds[first_shared:]))
    less = keep_layers(inner, kept)
    return dataclasses.replace(shrunken, config={**config, text: less} if text else less)


def _check(
    config: EngineConfig, hf_config: Any, shrunken: Shrunken, on_phase: OnPhase | None
) -> Certificate:
    with tempfile.TemporaryDirectory(prefix="llmc-check-") as folder:
        path = Path(folder)
        save_random(make_config(hf_config, shrunken.config), path)
        small = dataclasses.replace(
            config,
            model=folder,
            tokenizer=None,
            chat_template=None,
            revision=None,
            dtype="float32",
            load_format="auto",
            quantization=None,
            kv_cache_dtype="auto",
            max_model_len=None,
            speculative_config=None,
            opt_level=0,
            logits_processors=(),
        )
        return find_certificate(small) or check_model(small, on_phase=on_phase)


def is_rounding(found: Certificate) -> bool:
    """Whether a difference is rounding amplified by layers with random weights: within the limit at
    first, then growing slightly with each layer, with the same tokens and probabilities."""
    steps = [layer.relative for layer in found.layers]
    is_same = (
        found.logits.kl_max <= found.limit.kl
        and found.logits.top1 >= found.limit.top1
        and found.logits.relative < _MAX_ROUNDING
    )
    is_steady = all(b <= _STEADY * max(a, found.limit.relative / 10) for a, b in pairwise(steps))
    return is_same and len(steps) > 1 and steps[0] <= found.limit.relative and is_steady


def _describe(found: Certificate, shrunken: Shrunken, seconds: float) -> ArchitectureCertificate:
    fixed_by = tuple(c.name for c in found.culprits if c.kind == "pass") if found.is_fixable else ()
    return ArchitectureCertificate(
        status="certified" if found.certified else "different",
        reason=found.cache_note if found.certified else "; ".join(map(str, found.culprits)),
        fixed_by=fixed_by,
        notes=(*shrunken.notes, *found.notes),
        created=found.created,
        seconds=round(seconds, 1),
    )
