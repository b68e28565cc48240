"""rules.json: what transformers' maps of GGUF files lack, as data."""

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
    """A normalized name: file formats and transformers spell the same name differently."""
    return name.replace("-", "").replace("_", "").lower()


def architectures() -> dict[str, str]:
    """general.architecture of a file -> transformers' name, for the supported ones."""
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
    """The rule of a file's architecture; `as` is transformers' name. CheckpointError if none.

    A variant of a rule applies to files whose metadata has the given values (`true`: any nonzero
    value; null: absent), or that have tensors of the given name, or of so many rows.
    """
    name = header.architecture
    known = {squashed(a): (a, model) for a, model in architectures().items()}
    if why := rules()["refused"].get(name):
        raise CheckpointError(f"GGUF files of architecture {shown(name)} are not served: {why}")
    if squashed(name) not in known:
        raise CheckpointError(
            f"GGUF files of architecture {shown(name)} are not served: neither transformers nor "
            f"llmc has a map for it (they have {len(known)}, see docs/gguf.md); use the "
            "safetensors checkpoint"
        )
    spelled, model = known[squashed(name)]
    rule = {**rules()["architectures"].get(spelled, {}), "as": model}
    for variant in rule.pop("variants", []):
        values = {key: _found(header, key) for key in variant["when"]}
        if all(
            (wanted is True and _is_nonzero(values[key])) or values[key] == wanted
            for key, wanted in variant["when"].items()
        ):
            rule |= variant
    if why := rule.get("refused"):
        because = rule.get("because", "transformers has no such model")
        raise CheckpointError(
            f"GGUF files of architecture {shown(name)} {why} are not served, because {because}; "
            "use the safetensors checkpoint"
        )
    return rule


def _is_nonzero(value: Any) -> bool:
    return any(value) if isinstance(value, list) else bool(value)


def _found(header: GgufHeader, key: str) -> Any:
    """A metadata value, a tensor's number of rows, or whether there are tensors of this name."""
    if key.startswith("rows of "):
        tensor = header.tensors.get(key.removeprefix("rows of "))
        return None if tensor is None else tensor.shape[0]
    if key.endswith((".weight", ".bias")):
        return any(name.endswith(key) for name in header.tensors)
    return header.metadata.get(f"{header.architecture}.{key}")
