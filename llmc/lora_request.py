"""LoRARequest: the LoRA adapter that a request uses."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmc.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,199}", re.ASCII)
_MAX_PATH = 4096  # characters
HIGHEST_RAISED_RANK = 512  # up to which `llmc serve` raises max_lora_rank for its adapters


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter: its name, a number from 1, and its files: a directory in PEFT's format, a
    GGUF file for a model in a GGUF file, or a hub id.

    Adapters that differ in any of the three are distinct and share no cached prefixes. If an
    adapter's files change, give it another number. InvalidRequestError for an invalid value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        name, number, path = self.lora_name, self.lora_int_id, self.lora_path
        if (
            not isinstance(name, str)
            or _NAME.fullmatch(name) is None
            or any(part in ("", ".", "..") for part in name.split("/"))
        ):
            raise InvalidRequestError(
                f"the adapter's name {name!r:.80} must be 1 to 200 letters, digits and any of "
                "_ . : / -, and must not contain '.' or '..' as a path component",
                param="lora_name",
            )
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
            raise InvalidRequestError(
                f"lora_int_id must be an integer from 1, got {number!r:.80}", param="lora_int_id"
            )
        if not isinstance(path, str) or not 0 < len(path) <= _MAX_PATH or "\0" in path:
            raise InvalidRequestError(
                f"lora_path must be a path or a hub id, got {path!r:.80}", param="lora_path"
            )
