"""The facts that startup needs from a model's config: plain data, cached on disk.

transformers knows how to interpret a config.json, but importing it takes longer than a warm start.
So the facts are cached under a digest of config.json and of transformers' version. They are used
only if nothing can have changed how transformers interprets the file: there is no code in the
model's directory, and no class that this process may have registered.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llmc.cache_dir import files_digest, write_atomically
from llmc.config import EngineConfig
from llmc.startup.model_files import ModelFiles

log = logging.getLogger(__name__)

_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_SENSES = ("vision", "image", "video", "audio", "speech")
_TUPLES = ("eos_token_ids", "unused_parts", "fields")
_NEVER_KEPT = ("auto_map", "configuration_files")  # these refer to code or further files


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """Facts from a config. `digest` identifies it, and its class's code, in a program's key."""

    digest: str
    dtype: str | None  # as stored, such as "bfloat16"
    context: int | None  # the longest context that the config allows, in tokens
    dense_context: int | None  # see `dense_context`
    long_context_from: (
        int | None
    )  # longest sequence, in tokens, that uses the rotary embedding's short factors
    vocab_size: int  # 0 if the config does not say
    eos_token_ids: tuple[int, ...]
    unused_parts: tuple[str, ...]  # parts besides the text model, such as "vision"
    is_encoder: bool  # its tokens attend to later ones too
    num_token_types: int  # number of token type embeddings
    classifier_pooling: str  # as named in configs; "last" for decoders
    fields: tuple[str, ...]  # that the config's class has; those of its parts as `part.field`


def describe(hf_config: Any) -> ConfigFacts:
    from llmc.compiler.cache import config_digest
    from llmc.compiler.rotary import long_context_from

    text = _text_part(hf_config)
    dtype = getattr(hf_config, "dtype", None)
    return ConfigFacts(
        digest=config_digest(hf_config),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        context=model_context(hf_config),
        dense_context=dense_context(hf_config),
        long_context_from=long_context_from(text),
        vocab_size=getattr(text, "vocab_size", None) or 0,
        eos_token_ids=eos_token_ids(hf_config),
        unused_parts=unused_parts(hf_config),
        is_encoder=is_encoder(hf_config),
        num_token_types=getattr(text, "type_vocab_size", None) or 0,
        classifier_pooling=classifier_pooling(hf_config),
        fields=tuple(sorted(set(class_fields(hf_config)))),
    )


class FactsCache:
    """Files under `root`/configs, one per config."""

    def __init__(self, root: Path) -> None:
        self._root = root / "configs"

    def load(self, files: ModelFiles, config: EngineConfig) -> ConfigFacts | None:
        """None if they are not cached, or if transformers is imported anyway."""
        path = self._path(files, config)
        if path is None or "transformers" in sys.modules:
            return None
        try:
            if path.stat().st_uid != os.getuid():
                return None
            found = json.loads(path.read_text(encoding="utf-8"))
            lists = {k: tuple(found[k]) for k in _TUPLES}
            return ConfigFacts(**{**found, **lists})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as e:
            log.warning("%s can't be read (%s); re-creating it", path, e)
            return None

    def save(
        self, files: ModelFiles, config: EngineConfig, facts: ConfigFacts, hf_config: Any
    ) -> None:
        """Cache the facts, unless the config's class is not transformers' own."""
        from llmc.compiler.cache import is_of_transformers

        path = self._path(files, config)
        if path is None or path.exists() or not is_of_transformers(type(hf_config)):
            return
        try:
            write_atomically(path, json.dumps(asdict(facts)))
        except OSError as e:
            log.warning("the facts read from config.json can't be cached: %s", e)

    def _path(self, files: ModelFiles, config: EngineConfig) -> Path | None:
        """None for a config that must not be cached."""
        from llmc.compiler.cache import package_version

        file = files.path / "config.json"
        if config.trust_remote_code or not file.is_file():
            return None
        text = file.read_bytes()
        if any(name.encode() in text for name in _NEVER_KEPT) or b'"model_type"' not in text:
            return None
        digest = hashlib.blake2b(text, digest_size=16)
        about = (_own_sources(), package_version("transformers"))
        digest.update("\0".join(about).encode())
        return self._root / f"{digest.hexdigest()}.json"


@cache
def _own_sources() -> str:
    """Digest of the code that reads a config: this package and the compiler."""
    from llmc.compiler.cache import sources_digest

    return sources_digest() + files_digest(sorted(Path(__file__).parent.glob("*.py")))


def _text_part(hf_config: Any) -> Any:
    return getattr(hf_config, "get_text_config", lambda: hf_config)()


def model_context(hf_config: Any) -> int | None:
    """Longest context that config.json allows. None if it does not say, as for recurrent models and
    models with attention slopes (ALiBi)."""
    from llmc.compiler.heads import first_position
    from llmc.compiler.rotary import extended_context

    stated, dense = _first_positive(hf_config, _CONTEXT), dense_context(hf_config)
    if stated is not None and is_encoder(hf_config):
        stated = max(1, stated - first_position(hf_config))
    elif stated is not None:
        stated = max(stated, extended_context(_text_part(hf_config), stated))
    return min((n for n in (stated, dense) if n is not None), default=None)


def is_encoder(hf_config: Any) -> bool:
    """Whether tokens attend to later ones: a masked language model, or a decoder that its config
    makes bidirectional for embeddings."""
    from llmc.compiler.heads import has_no_head, is_masked_lm

    if is_masked_lm(hf_config):
        return True
    if _text_part(hf_config) is not hf_config:  # part of a multimodal model
        return has_no_head(hf_config)
    both_ways = getattr(hf_config, "use_bidirectional_attention", None) in (True, "all")
    return both_ways or getattr(hf_config, "is_causal", True) is False or has_no_head(hf_config)


def classifier_pooling(hf_config: Any) -> str:
    from llmc.compiler.heads import is_masked_lm

    if not is_masked_lm(hf_config):
        return "last"
    return str(getattr(hf_config, "classifier_pooling", None) or "cls")


def dense_context(hf_config: Any) -> int | None:
    """Tokens up to which an indexer that returns a mask selects every key, so attention is dense.

    None for other models; `find_indexers` supports indexers that return positions.
    """
    from llmc.compiler.interface import INDEXER_BUDGET

    return _first_positive(hf_config, (INDEXER_BUDGET,))


def _first_positive(hf_config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(_text_part(hf_config), name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), None)


def unused_parts(hf_config: Any) -> tuple[str, ...]:
    """A model's parts besides the text model, by the names of their configs."""
    names = [name.removesuffix("_config") for name in getattr(hf_config, "sub_configs", {})]
    return tuple(n for n in names if n in _SENSES and getattr(hf_config, f"{n}_config", None))


def class_fields(hf_config: Any) -> Iterator[str]:
    """The fields that the class of a config has, whatever a config.json says, under all their
    names."""
    kind = type(hf_config)
    for base in kind.__mro__[:-1]:  # without object
        if (init := vars(base).get("__init__")) is not None:
            _, *parameters = inspect.signature(init).parameters.values()  # without self
            named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            yield from (one.name for one in parameters if one.kind in named)
        properties = {name: one for name, one in vars(base).items() if isinstance(one, property)}
        yield from (name for name, one in properties.items() if one.fset is not None)
    yield from getattr(kind, "attribute_map", {})
    for part in getattr(kind, "sub_configs", ()):
        if (config := getattr(hf_config, part, None)) is not None:
            yield from (f"{part}.{name}" for name in class_fields(config))


def eos_token_ids(hf_config: Any) -> tuple[int, ...]:
    """The end tokens in config.json."""
    value = getattr(hf_config, "eos_token_id", None)
    if value is None:
        value = getattr(_text_part(hf_config), "eos_token_id", None)
    return token_ids(value)


def token_ids(value: object) -> tuple[int, ...]:
    """Token ids from a config value, which is one id or a list; invalid ids are left out."""
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
