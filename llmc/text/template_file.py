"""A chat template that the user gives instead of the model's own: a file, or the text itself."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.errors import ConfigError

MAX_BYTES = 1024 * 1024
# a tag of transformers' own, which plain Jinja does not know
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def read_template(given: str) -> str:
    """`given` is a path, or a template where it holds a brace. ConfigError says what is wrong."""
    text = given if "{" in given else _read(Path(given).expanduser())
    # tags that templates of models use; what they do is transformers' part, when one is rendered
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.parse(_GENERATION.sub("", text))
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError(f"the chat template has a mistake in line {e.lineno}: {e.message}") from e
    return text


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"the chat template {path} has more than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"the chat template {str(path)!r} can't be read ({e}); give a Jinja file"
        ) from e
