"""What a certificate applies to, derived from an EngineConfig without capturing anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.check.certificate import certificate_key, fingerprint
from llmc.compiler.cache import program_key
from llmc.compiler.program import RewriteOptions
from llmc.config import INDUCTOR_LEVEL, EngineConfig
from llmc.errors import ConfigError
from llmc.startup.compile import rewrite_options
from llmc.startup.resolve import ModelSource, pick_device, pick_level, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that determines which step serves. `key` is "" if a pass has no digest.

    Logits processors are left out, because the logits before them are compared.
    """

    source: ModelSource
    options: RewriteOptions
    level: int
    weights: str  # fingerprint
    key: str


def identify(config: EngineConfig) -> Identity:
    """The identity of a single rank's step; sharding is verified op by op (passes/sharding.py)."""
    config = replace(config, tensor_parallel_size=1, data_parallel_size=1)
    source = resolve(config, pick_device(config.device))
    if source.facts.is_encoder:
        raise ConfigError(
            f"{source.files.name} is an encoder, but a check compares the logits of text "
            "generation; `llmc serve` checks a small model of its architecture, and reports the "
            "result in its log and in /v1/models"
        )
    if source.pooling is not None:
        raise ConfigError(
            f"{source.files.name} is served for its vectors (task {config.task!r}), but a check "
            "compares the logits of text generation; select them with --task generate"
        )
    level = pick_level(config.opt_level, source.device)
    level = level if level >= INDUCTOR_LEVEL else 0  # graphs replay what is checked
    options = replace(rewrite_options(source), processors=())
    made_up = f"random, from seed {config.seed}"
    weights = made_up if source.is_dummy else fingerprint(source.files.path)
    key = program_key(source.facts.digest, source.dtype, source.device, options)
    if key:
        key = certificate_key(key, f"{weights} {source.stored}", source.device, level)
    return Identity(source=source, options=options, level=level, weights=weights, key=key)
