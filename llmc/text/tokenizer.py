"""The tokenizer as the rest of the front sees it: text -> ids before a request, ids -> text after.

Wraps transformers' AutoTokenizer and calls the Rust tokenizer below it directly where there is
one: that path is free of transformers' per-call state (truncation, padding), so any thread may
use it. A tokenizer written in Python is used under a lock instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmc.cache_dir import cache_dir
from llmc.errors import CheckpointError, InvalidRequestError, reason_of
from llmc.text.tokenizer_cache import TokenizerCache
from llmc.text.tools.tool_format import ToolFormat

# Texts are encoded one at a time, so a thread pool in the tokenizer gains nothing, and it would
# warn at every fork afterwards (torch.compile forks workers).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Any of these makes a directory a plausible tokenizer; without them transformers' error is long.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
)


def check_tokenizer_files(folder: Path) -> None:
    """CheckpointError where a directory holds no tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} has no tokenizer (looked for {', '.join(TOKENIZER_FILES[:3])} ...); "
            "give one with tokenizer=DIR, or send token ids instead of text"
        )


class Tokenizer:
    """Encodes prompts and decodes output of one model. Made by `Tokenizer.load`."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self._lock = threading.Lock()
        self._copy: Any = None
        self._copy_lock = threading.Lock()
        self._backend = getattr(hf, "backend_tokenizer", None)
        if self._backend is not None:
            # A tokenizer.json may carry the truncation of its training run; prompts must not
            # be cut in silence.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.given_tool_format: ToolFormat | None = None  # None: learned from the template
        self.special_ids = frozenset(int(i) for i in hf.all_special_ids) | _special_added(hf)
        self.size = len(hf)

    @classmethod
    def load(cls, path: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Load from a local directory; CheckpointError says what is missing or broken."""
        folder = Path(path)
        check_tokenizer_files(folder)
        cache = None if trust_remote_code else TokenizerCache(cache_dir())
        hf = None if cache is None else cache.load(folder)
        if hf is None:
            hf = _load_anew(folder, trust_remote_code)
            if cache is not None:
                cache.save(folder, hf)
        if getattr(hf, "chat_template", None) is None:
            hf.chat_template = _template_of_processor(folder)
        return cls(hf)

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
    ) -> list[int]:
        """Token ids of `text`, with the tokenizer's own BOS or EOS unless asked otherwise.

        `pair` is a second text, which the tokenizer joins to the first in its own way. Beyond
        `max_length` tokens the texts are cut, as transformers does (its special tokens stay).
        """
        check_text(text, "prompt")
        if pair is not None:
            check_text(pair, "prompt")
        if max_length is not None:
            with self.isolated() as hf:
                cut = {"truncation": True, "max_length": max_length}
                return list(hf(text, pair, add_special_tokens=add_special_tokens, **cut).input_ids)
        if self._backend is not None:
            # Of the encode methods the one that lets other threads run, and that skips offsets.
            [encoding] = self._backend.encode_batch_fast(
                [text if pair is None else (text, pair)], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        with self._lock:
            return list(self.hf.encode(text, pair, add_special_tokens=add_special_tokens))

    def encode_pair(
        self,
        text: str,
        pair: str,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Ids as of `encode`, and for each of them 1 if it is of the second text, else 0."""
        check_text(text, "prompt")
        check_text(pair, "prompt")
        cut: dict[str, Any] = {} if max_length is None else {"truncation": True}
        with self.isolated() as hf:
            found = hf(
                text, pair, add_special_tokens=add_special_tokens, max_length=max_length, **cut
            )
        ids = list(found.input_ids)
        return ids, list(found.get("token_type_ids") or [0] * len(ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids that the tokenizer does not know decode to nothing."""
        if self._backend is not None:
            text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return str(text)
        with self._lock:
            known = [i for i in token_ids if 0 <= i < self.size]
            return str(self.hf.decode(known, skip_special_tokens=skip_special_tokens))

    @contextlib.contextmanager
    def isolated(self) -> Iterator[Any]:
        """A copy of the transformers tokenizer, for calls that switch settings of their backend.

        On the one in use they would change how other threads' prompts are read meanwhile.
        """
        with self._copy_lock:
            if self._copy is None:
                self._copy = copy.deepcopy(self.hf)
            yield self._copy

    @functools.cached_property
    def for_callers(self) -> Any:
        """The transformers tokenizer to hand out: what callers switch in it is theirs alone."""
        return copy.deepcopy(self.hf)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id, "" for an id that it does not have."""
        with self._lock:
            return [self.hf.convert_ids_to_tokens(int(i)) or "" for i in token_ids]

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts that encode to special tokens wherever they stand."""
        return tuple(filter(None, self.tokens(sorted(self.special_ids))))

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - one tokenizer lives as long as its engine
    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, special or not; U+FFFD where it is part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    @functools.lru_cache(maxsize=65536)  # noqa: B019
    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token, also of one that is part of a character; None where unknown."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode("utf-8")
        return _spelled_bytes(self.tokens([token_id])[0])

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that were added to the vocabulary, special or not, with their ids."""
        return {str(text): int(i) for text, i in self.hf.get_added_vocab().items()}

    @property
    def eos_token_id(self) -> int | None:
        return _optional_int(self.hf.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        return _optional_int(self.hf.bos_token_id)

    @property
    def chat_template(self) -> str | None:
        template = getattr(self.hf, "chat_template", None)
        if isinstance(template, dict):  # several named ones
            template = template.get("default")
        return template if isinstance(template, str) else None


def _load_anew(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer has classes for some models that put their own rules in place of a file's.
    loader: Any = PreTrainedTokenizerFast if _is_of_gguf(folder) else AutoTokenizer
    try:
        return loader.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    # The loaders below raise whatever their parsers raise (even bare Exception).
    except Exception as exc:
        reason = _needs_sentencepiece(folder) or reason_of(exc)
        raise CheckpointError(f"the tokenizer in {folder} can't be loaded: {reason}") from exc


def _is_of_gguf(folder: Path) -> bool:
    """Whether `write_tokenizer` of gguf_tokenizer.py made it."""
    return (folder / "gguf.json").is_file()


def _needs_sentencepiece(folder: Path) -> str:
    """Why a folder can't be read without that package, "" where it could be."""
    models = [name for name in ("tokenizer.model", "spiece.model") if (folder / name).is_file()]
    missing = [name for name in ("sentencepiece", "protobuf") if not _is_installed(name)]
    if (folder / "tokenizer.json").is_file() or not models or not missing:
        return ""
    return (
        f"there is no tokenizer.json, and to read {models[0]} takes packages that are not "
        f"installed: pip install {' '.join(missing)}"
    )


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _template_of_processor(folder: Path) -> str | None:
    """Models that also see or hear may keep their template with the processor, in a file alone."""
    try:
        stored = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = stored.get("chat_template") if isinstance(stored, dict) else None
    return template if isinstance(template, str) else None


def preload() -> None:
    """Import now what `Tokenizer.load` needs at a warm start."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401


def check_text(text: str, param: str) -> None:
    """Refuse what is not valid Unicode: a lone surrogate is a str, but no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"{param} holds a lone surrogate (U+{ord(text[exc.start]):04X}) at character "
            f"{exc.start}; send valid Unicode",
            param=param,
        ) from None


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _special_added(hf: Any) -> frozenset[int]:
    added = getattr(hf, "added_tokens_decoder", None) or {}
    return frozenset(int(i) for i, token in added.items() if getattr(token, "special", False))


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The byte-level BPE alphabet: printable bytes spell themselves, others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    letters.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return letters


def _spelled_bytes(token: str) -> bytes | None:
    """Bytes of a vocabulary entry: `<0xE2>` (byte fallback) or the byte-level alphabet."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    alphabet = _byte_of_letter()
    if token and all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return None
