"""The tokenizer as the frontend uses it: text -> ids before a request, ids -> text after.

Calls the Rust tokenizer inside transformers' directly if there is one. That path has none of
transformers' per-call state (truncation, padding), so any thread can use it. The transformers
object is loaded when something needs it. A tokenizer written in Python is used under a lock.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc.cache_dir import cache_dir
from llmc.errors import CheckpointError, InvalidRequestError, reason_of
from llmc.text.known_tokenizer import ChatTemplates, KnownTokenizer, without_truncation
from llmc.text.tekken import is_tekken_alone, load_tekken
from llmc.text.template import plain, render_template
from llmc.text.tokenizer_cache import TokenizerCache
from llmc.text.tokenizer_packages import missing_packages
from llmc.text.tools.tool_format import ToolFormat

log = logging.getLogger(__name__)

# Texts are encoded one at a time, so a thread pool in the tokenizer would gain nothing, and it
# would warn at every later fork (torch.compile forks workers).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_LONG = 10_000  # tokens, which take about a millisecond to decode
# A directory with any of these may hold a tokenizer; without them, transformers' error is long.
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
    """Raise CheckpointError if a directory holds no tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} has no tokenizer (looked for {', '.join(TOKENIZER_FILES[:3])} ...); "
            "give one with tokenizer=DIR, or send token ids instead of text"
        )


class Tokenizer:
    """Encodes prompts and decodes output of one model. Made by `Tokenizer.load`."""

    def __init__(self, hf: Any) -> None:
        """`hf`: a transformers tokenizer, or a KnownTokenizer, which loads one when needed."""
        known = hf if isinstance(hf, KnownTokenizer) else KnownTokenizer.of(hf)
        self.backend = known.backend
        self._facts, self._load = known.facts, known.load
        self._lock = threading.Lock()
        self._load_lock = threading.Lock()
        self._loaded: Any = None
        self._copy: Any = None
        self._copy_lock = threading.Lock()
        if self.backend is not None:
            without_truncation(self.backend)
        self._templates: ChatTemplates = known.facts.chat_template
        self._renders_alike = known.facts.renders_alike
        self.template_defaults: Mapping[str, Any] = {}  # variables that a request does not set
        self.given_tool_format: ToolFormat | None = None  # None: learned from the template
        self.special_ids = frozenset(known.facts.special_ids)
        self.size = known.facts.size

    @classmethod
    def load(cls, path: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Load from a local directory; CheckpointError says what is missing or broken."""
        folder = Path(path)
        check_tokenizer_files(folder)
        cache = None if trust_remote_code else TokenizerCache(cache_dir())
        known = None if cache is None else cache.load(folder)
        if known is not None:
            tokenizer = cls(known)
        else:
            hf = _load_anew(folder, trust_remote_code)
            if getattr(hf, "chat_template", None) is None:
                hf.chat_template = _template_of_processor(folder)
            tokenizer = cls(hf)
            if cache is not None:
                cache.save(folder, hf)
        if tokenizer.chat_template is None:
            _log_missing_template(folder)
        return tokenizer

    @property
    def hf(self) -> Any:
        """The transformers tokenizer. It is imported and loaded on first use."""
        with self._load_lock:
            if self._loaded is None:
                self._loaded = self._load()
                self._loaded.chat_template = self._templates
            return self._loaded

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
    ) -> list[int]:
        """Token ids of `text`, with the tokenizer's BOS or EOS if `add_special_tokens`.

        `pair` is a second text, which the tokenizer joins to the first. Texts longer than
        `max_length` tokens are truncated as transformers does it (special tokens are kept).
        """
        check_text(text, "prompt")
        if pair is not None:
            check_text(pair, "prompt")
        if max_length is not None:
            with self.isolated() as hf:
                cut = {"truncation": True, "max_length": max_length}
                return list(hf(text, pair, add_special_tokens=add_special_tokens, **cut).input_ids)
        if self.backend is not None:
            # The only encode method that releases the GIL and skips offsets.
            [encoding] = self.backend.encode_batch_fast(
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
        """The ids of `encode`, and for each id 1 if it belongs to the second text, else 0."""
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
        """Text of `token_ids`. Unknown ids decode to nothing."""
        if self.backend is not None:
            ids = list(token_ids)
            if len(ids) <= _LONG:
                return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
            # The only decode method that releases the GIL, at some cost for a few tokens.
            [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return str(text)
        with self._lock:
            known = [i for i in token_ids if 0 <= i < self.size]
            return str(self.hf.decode(known, skip_special_tokens=skip_special_tokens))

    @contextlib.contextmanager
    def isolated(self) -> Iterator[Any]:
        """A copy of the transformers tokenizer, for calls that change settings of its backend.

        On the shared one they would change how other threads' prompts are encoded.
        """
        with self._copy_lock:
            if self._copy is None:
                self._copy = copy.deepcopy(self.hf)
            yield self._copy

    @functools.cached_property
    def for_callers(self) -> Any:
        """A copy of the transformers tokenizer that callers may modify."""
        return copy.deepcopy(self.hf)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary entry of each id, "" for unknown ids."""
        if self.backend is not None:
            return [self.backend.id_to_token(int(i)) or "" for i in token_ids]
        with self._lock:
            return [self.hf.convert_ids_to_tokens(int(i)) or "" for i in token_ids]

    def ids_of(self, tokens: Sequence[str]) -> list[int]:
        """Ids of vocabulary entries, all of which must exist."""
        if self.backend is not None:
            return [self.backend.token_to_id(token) for token in tokens]
        return [self.hf.convert_tokens_to_ids(token) for token in tokens]

    def vocabulary(self) -> dict[str, int]:
        """Ids by vocabulary entry, including added tokens."""
        if self.backend is not None:
            return dict(self.backend.get_vocab(with_added_tokens=True))
        return dict(self.hf.get_vocab())

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts that always encode to special tokens."""
        return tuple(filter(None, self.tokens(sorted(self.special_ids))))

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - one tokenizer lives as long as its engine
    def token_text(self, token_id: int) -> str:
        """Text of a single token, special or not; U+FFFD if it is part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    @functools.lru_cache(maxsize=65536)  # noqa: B019
    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of a single token, even if it is part of a character; None if unknown."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode("utf-8")
        return _spelled_bytes(self.tokens([token_id])[0])

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of tokens that were added to the vocabulary, special or not."""
        return self._facts.added_tokens

    @property
    def eos_token_id(self) -> int | None:
        return self._facts.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        return self._facts.bos_token_id

    @property
    def chat_template(self) -> str | None:
        return self.template_for(tools=False)

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        """Replace the model's own template."""
        with self._load_lock:
            self._templates = template
            self._renders_alike = False
            if self._loaded is not None:
                self._loaded.chat_template = template

    def template_for(self, *, tools: bool) -> str | None:
        """The template for conversations with or without tools, chosen as transformers does."""
        if not isinstance(self._templates, dict):
            return self._templates
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        return self._templates.get(name)

    @property
    def named_templates(self) -> tuple[str, ...]:
        """The names of the templates, if there are several or none is the default."""
        return tuple(sorted(self._templates)) if isinstance(self._templates, dict) else ()

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation with the chat template, or with the given one.

        Objects that are not plain data do not reach the template, which could call their methods.
        Raises what templates raise: jinja2.TemplateError, and errors of their arithmetic.
        """
        chat_template = chat_template or self.template_for(tools=tools is not None)
        conversation, tools, variables = plain(list(conversation)), plain(tools), plain(variables)
        documents = plain(documents)
        if self._renders_alike and chat_template and not continue_final_message:
            return render_template(
                str(chat_template),
                conversation,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                variables={**self._facts.special_tokens, **variables},
            )
        text: str = self.hf.apply_chat_template(
            conversation,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            return_dict=False,
            **variables,
        )
        return text


def _load_anew(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer has classes for some models that put their own rules in place of a file's.
    loader: Any = PreTrainedTokenizerFast if _is_of_gguf(folder) else AutoTokenizer
    try:
        hf = loader.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        if is_tekken_alone(folder) and not trust_remote_code:
            return load_tekken(folder, hf)
        if trust_remote_code or isinstance(hf, PreTrainedTokenizer | PreTrainedTokenizerFast):
            return hf
        # If a vendor's package is installed, AutoTokenizer can return a wrapper of its tokenizer,
        # which has no chat template and lacks methods of these classes.
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    # The loaders below raise whatever their parsers raise (even bare Exception).
    except Exception as exc:
        reason = _needs_packages(folder) or reason_of(exc)
        raise CheckpointError(f"the tokenizer in {folder} can't be loaded: {reason}") from exc


def _is_of_gguf(folder: Path) -> bool:
    """Whether `write_tokenizer` of gguf_tokenizer.py made it."""
    return (folder / "gguf.json").is_file()


def _needs_packages(folder: Path) -> str:
    """Why a folder can't be read without certain packages; "" if they are not the reason."""
    name, missing = missing_packages(folder)
    if not missing:
        return ""
    return (
        f"there is no tokenizer.json, and to read {name} takes packages that are not "
        f"installed: pip install {' '.join(missing)}"
    )


def _log_missing_template(folder: Path) -> None:
    """Say how to get the chat template that a vendor's package makes from its own file."""
    _, missing = missing_packages(folder)
    if missing and is_tekken_alone(folder):
        log.warning(
            "the model has no chat template; install %s, which makes one from tekken.json, or give "
            "one with --chat-template FILE",
            " ".join(missing),
        )


def _template_of_processor(folder: Path) -> str | None:
    """Multimodal models may keep their template with the processor, in a separate file."""
    try:
        stored = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = stored.get("chat_template") if isinstance(stored, dict) else None
    return template if isinstance(template, str) else None


def preload(folder: Path | None) -> None:
    """Import what loading the tokenizer in `folder` will need: transformers, if it is not cached.

    `folder`: None if it is not known yet.
    """
    if folder is None or not TokenizerCache(cache_dir()).has(folder):
        from transformers import PreTrainedTokenizerFast  # noqa: F401


def check_text(text: str, param: str) -> None:
    """Reject a str that is not valid Unicode because it has a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"{param} holds a lone surrogate (U+{ord(text[exc.start]):04X}) at character "
            f"{exc.start}; send valid Unicode",
            param=param,
        ) from None


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The byte-level BPE alphabet: printable bytes map to themselves, others to U+0100 and up."""
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
