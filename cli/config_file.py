"""`--config FILE` of `llmc serve`: options in YAML, expanded into command-line words.

As in vLLM, keys are options with or without their dashes, `model` is the model, and switches are
true or false. Options on the command line come later and take precedence.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from llmc.errors import ConfigError

_MAX_BYTES = 1 << 20


def expand(words: Sequence[str], opposites: Container[str]) -> list[str]:
    """Replace `--config FILE` in `words` with the options of the file, before all others.

    `opposites`: the options that turn a switch off, such as --no-access-log.
    Raises ConfigError if the file can't be read or is not a mapping of options.
    """
    rest: list[str] = []
    path: str | None = None
    given = iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name != "--config":
            rest.append(word)
            continue
        if path is not None:
            raise ConfigError("--config is given twice; write all options into one file")
        path = value if equals else next(given, None)
        if not path:
            raise ConfigError("--config needs a file")
    if path is None:
        return rest
    model, options = _read(Path(path), opposites)
    has_model = bool(rest) and not rest[0].startswith("-")
    first = [rest.pop(0)] if has_model else [model] if model else []
    return [*first, *options, *rest]


def _read(path: Path, opposites: Container[str]) -> tuple[str | None, list[str]]:
    """Return the model named in the file, and its options as words."""
    import yaml

    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"--config {path}: the file is larger than {_MAX_BYTES} bytes")
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: can't be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"--config {path}: must be lines of `option: value`")
    options = {key.lstrip("-").replace("_", "-"): value for key, value in found.items()}
    model = options.pop("model", options.pop("model-tag", None))
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"--config {path}: model must be a string, got {model!r}")
    words: list[str] = []
    for key, value in options.items():
        off = f"--no-{key}"
        words += [off] if value is False and off in opposites else _words(f"--{key}", value)
    return model, words


def _words(flag: str, value: Any) -> list[str]:
    """An option as words: a switch is present or absent; a list repeats the option."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [word for one in value for word in _words(flag, one)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
