"""rules.json: what transformers' maps of GGUF files leave out, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from llmc.errors import CheckpointError
from llmc.weights.gguf.reader import GgufHeader, shown


@cache
def rules() -> Mapping[str, Any]:
    text = files(__package__).joinpath("rules.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def squashed(name: str) -> str:
    """Formats and transformers write one name in many ways."""
    return name.replace("-", "").replace("_", "").lower()


def architectures() -> dict[str, str]:
    """General.architecture of a file -> transformers' name, for those that are read."""
    from transformers import CONFIG_MAPPING
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    own = rules()["architectures"]
    spelled = {squashed(name): name for name in own}
    known = {
        spelled.get(squashed(name), name): name
        for name in GGUF_CONFIG_MAPPING
        if name in CONFIG_MAPPING
    }
    known |= {name: rule["as"] for name, rule in own.items() if rule.get("as") in CONFIG_MAPPING}
    return dict(sorted(known.items()))


def rule_of(header: GgufHeader) -> dict[str, Any]:
    """That of a file's architecture: `as` is transformers' name of it. CheckpointError for none.

    A variant of a rule holds for files whose metadata has such values (`true`: any but zero, null:
    none), or which have tensors of such a name.
    """
    name = header.architecture
    known = {squashed(a): (a, model) for a, model in architectures().items()}
    if why := rules()["refused"].get(name):
        raise CheckpointError(f"GGUF files of architecture {shown(name)} are not served: {why}")
    if squashed(name) not in known:
        raise CheckpointError(
            f"GGUF files of architecture {shown(name)} are not served: neither transformers nor "
            f"llmc has a map for it (they have {len(known)}, see docs/gguf.md); take the "
            "safetensors checkpoint"
        )
    spelled, model = known[squashed(name)]
    rule = {**rules()["architectures"].get(spelled, {}), "as": model}
    for variant in rule.pop("variants", []):
        values = {key: _found(header, key) for key in variant["when"]}
        if all(
            (wanted is True and bool(values[key])) or values[key] == wanted
            for key, wanted in variant["when"].items()
        ):
            rule |= variant
    if why := rule.get("refused"):
        because = rule.get("because", "transformers has no such model")
        raise CheckpointError(
            f"GGUF files of architecture {shown(name)} {why} are not served, for {because}; take "
            "the safetensors checkpoint"
        )
    return rule


def _found(header: GgufHeader, key: str) -> Any:
    """A value of the metadata, or whether there are tensors of this name."""
    if key.endswith((".weight", ".bias")):
        return any(name.endswith(key) for name in header.tensors)
    return header.metadata.get(f"{header.architecture}.{key}")
