"""A chat template given by the user to replace the model's: a file, or the text itself."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.errors import ConfigError

MAX_BYTES = 1024 * 1024
# a tag added by transformers, which plain Jinja does not know
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def read_template(given: str) -> str:
    """The template. `given` is a path, or the text if it has a brace. ConfigError if invalid."""
    text = given if "{" in given else _read(Path(given).expanduser())
    # An extension whose tags models' templates use; transformers implements them when rendering.
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.parse(_GENERATION.sub("", text))
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError(f"the chat template has an error in line {e.lineno}: {e.message}") from e
    return text


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"the chat template {path} has more than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"the chat template {str(path)!r} can't be read ({e}); pass a Jinja file"
        ) from e
