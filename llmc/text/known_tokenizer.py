"""A tokenizer as its Rust backend and a few facts; its transformers object is loaded on demand.

Importing transformers takes as long as the rest of a warm start, and encoding, decoding and chat
templates do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

ChatTemplates = str | dict[str, str] | None  # one, or several by name


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """Plain data about a tokenizer, which the cache keeps as JSON."""

    special_ids: tuple[int, ...]  # named special tokens, and added tokens marked as special
    size: int  # vocabulary size, including added tokens
    added_tokens: dict[str, int]  # ids of tokens added to the vocabulary, special or not
    special_tokens: dict[str, str]  # by name ("eos_token"); chat templates see them as variables
    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: ChatTemplates
    renders_alike: bool = False  # `template.render_template` may render that template

    @classmethod
    def of(cls, hf: Any, *, renders_alike: bool = False) -> TokenizerFacts:
        """The facts of a transformers tokenizer."""
        decoder = getattr(hf, "added_tokens_decoder", None) or {}
        added = {int(i) for i, token in decoder.items() if getattr(token, "special", False)}
        return cls(
            special_ids=tuple(sorted(added.union(map(int, hf.all_special_ids)))),
            size=len(hf),
            added_tokens={str(text): int(i) for text, i in hf.get_added_vocab().items()},
            special_tokens={k: str(v) for k, v in hf.special_tokens_map.items()},
            eos_token_id=_optional_int(hf.eos_token_id),
            bos_token_id=_optional_int(hf.bos_token_id),
            chat_template=getattr(hf, "chat_template", None),
            renders_alike=renders_alike,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TokenizerFacts:
        """Raises ValueError, TypeError or KeyError if the text is not such a record."""
        fields = json.loads(text)
        return cls(**{**fields, "special_ids": tuple(fields["special_ids"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTokenizer:
    """What a `Tokenizer` is built from."""

    backend: Any | None  # tokenizers.Tokenizer; None if the tokenizer is written in Python
    facts: TokenizerFacts
    load: Callable[[], Any]  # -> the transformers tokenizer

    @classmethod
    def of(cls, hf: Any) -> KnownTokenizer:
        backend = getattr(hf, "backend_tokenizer", None)
        return cls(backend=backend, facts=TokenizerFacts.of(hf), load=lambda: hf)


def without_truncation(backend: Any) -> Any:
    """Disable truncation and padding of a backend, and return it. A tokenizer.json may contain the
    truncation of its training run, and prompts must not be cut silently."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) else None
