"""`hf_overrides`: fields of config.json with other values, without a change to the model's files.

The model is then read from a folder in the cache that has a config.json of its own, and links to
the model's other files. So everything that reads config.json, transformers included, sees the same.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmc.cache_dir import cache_dir, new_folder, publish_folder
from llmc.errors import CheckpointError, ConfigError
from llmc.weights.quantized.quantization_config import QUANTIZATION_KEYS

log = logging.getLogger(__name__)

_CONFIG = "config.json"
# Two names of one field, of which transformers would prefer the second.
_ROPE = ("rope_parameters", "rope_scaling")
_THETA = "rope_theta"  # inside of it or, in older files, beside it


def check_config_overrides(given: object) -> None:
    """Raises ConfigError unless it is None or a mapping that JSON can express."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(
            'hf_overrides must be a mapping such as {"max_position_embeddings": 65536}, '
            f"got {given!r:.80}"
        )
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"hf_overrides can't be written as JSON: {error}") from error


def overridden(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config with those of `given`; an object's fields are replaced one by one."""
    made = dict(config)
    rope = next((name for name in _ROPE if isinstance(made.get(name), dict)), None)
    for name, value in given.items():
        if name in _ROPE:
            name = rope or name
        stated = made.get(name)
        if isinstance(stated, dict) and isinstance(value, Mapping):
            value = overridden(stated, value)
        made[name] = value
        if name == _THETA and rope is not None and _THETA in made[rope]:
            made[rope] = {**made[rope], _THETA: value}
    return made


def new_fields(config: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """The names in `given` that a config does not have; those inside an object as `object.name`."""
    for name, value in given.items():
        if name not in config and name not in (*_ROPE, _THETA):
            yield name
        elif isinstance(value, Mapping) and isinstance(config.get(name), dict):
            yield from (f"{name}.{inner}" for inner in new_fields(config[name], value))


def warn_of_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Warn of overrides that are neither in config.json (`names`) nor fields of the config's class
    (`known`). Not an error: code of the model's own may read them all the same."""
    for name in names:
        part, _, last = name.rpartition(".")
        siblings = [one for one in known if one.rpartition(".")[0] == part]
        if name in known or last in QUANTIZATION_KEYS or not siblings:
            continue  # or inside an object that is no config
        inside = [one for one in known if one.endswith(f".{last}")]
        nearest = inside[:1] or difflib.get_close_matches(name, siblings, n=1)
        log.warning(
            "hf_overrides: the model's config has no field %r, so this may have no effect%s",
            name,
            f"; did you mean {nearest[0]!r}?" if nearest else "",
        )


def with_overrides(model: Path, given: Mapping[str, Any]) -> Path:
    """The folder of a model whose config.json has the fields of `given`, created if necessary.

    Raises CheckpointError if config.json can't be read, or if the folder can't be written.
    """
    from llmc.startup.model_files import parse_json

    model = model.resolve()
    text = json.dumps(overridden(parse_json(model / _CONFIG), given), indent=2, allow_nan=False)
    names = sorted(file.name for file in model.iterdir() if file.name != _CONFIG)
    key = hashlib.sha256(json.dumps([str(model), names, text]).encode()).hexdigest()[:32]
    made = cache_dir() / "overridden" / key
    if made.is_dir():
        return made
    try:
        with new_folder(made.parent) as folder:
            (folder / _CONFIG).write_text(text, encoding="utf-8")
            for name in names:
                (folder / name).symlink_to(model / name)
            publish_folder(folder, made)
    except OSError as error:
        raise CheckpointError(f"hf_overrides need a folder in llmc's cache: {error}") from error
    return made
