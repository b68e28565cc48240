"""What the user gives for chats: a template to replace the model's, and its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.errors import ConfigError

MAX_BYTES = 1024 * 1024
# a tag added by transformers, which plain Jinja does not know
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

# What chat_template_kwargs may not set: the arguments of the rendering itself.
RESERVED = frozenset(
    (
        *("conversation", "messages", "chat_template", "tools", "documents", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens", "bos_token", "eos_token", "unk_token"),
        *("pad_token", "raise_exception", "strftime_now"),
    )
)


def check_template_kwargs(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A template's variables for all requests, {} for None. ConfigError if they are invalid."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            'chat_template_kwargs must be a mapping such as {"enable_thinking": false}, '
            f"got {given!r:.200}"
        )
    if taken := sorted(RESERVED & given.keys()):
        raise ConfigError(f"chat_template_kwargs must not set {', '.join(taken)}")
    return given


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
