"""The tokenizer described in a GGUF file -> the files that transformers' tokenizers load.

There are four kinds of vocabulary: byte-level BPE, SentencePiece BPE, unigram and WordPiece. How
text is split before BPE is a separate rule, which a file only names (`tokenizer.ggml.pre`).
gguf_splits.json has the rules and the names of the kinds. Under `spaced` it has the rules of
vocabularies that are named byte-level, but spell spaces as SentencePiece does.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError, reason_of

log = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_SENTENCEPIECE = {"unknown": _UNKNOWN, "bos": _CONTROL, "eos": _CONTROL}  # its first tokens
_SPACE = "\u2581"
_BRACKETED = re.compile(r"\[\w+\]")  # special tokens of WordPiece vocabularies
# The default, or one of other names, which become those of files.
_TEMPLATE = re.compile(r"tokenizer\.chat_template(?:\.(\w{1,64}))?", re.ASCII)
_TOKEN_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_TAG = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


@cache
def _rules() -> Mapping[str, Any]:
    text = files(__package__).joinpath("gguf_splits.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def write_tokenizer(
    metadata: Mapping[str, Any], folder: Path, end_ids: Collection[int] = ()
) -> bool:
    """Write the tokenizer's files; False if there is none. CheckpointError if it is unusable.

    `end_ids`: tokens that end a turn. They are special whatever type the file gives them.
    """
    from transformers import PreTrainedTokenizerFast

    source = _Vocabulary(metadata, frozenset(end_ids))
    if source.kind in ("", "none", "no_vocab"):
        return False
    templates = source.templates()
    try:
        backend = source.build()
        special: dict[str, Any] = {
            f"{name}_token": source.token(key)
            for name, key in (
                ("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")
            )
        }  # fmt: skip
        if source.kind == "wordpiece":
            special["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
        )
        tokenizer.chat_template = templates
        tokenizer.save_pretrained(folder)
    except (CheckpointError, OSError):
        raise
    except Exception as e:  # tokenizers raises bare Exception
        if "(os error " in str(e):  # its file could not be written
            raise OSError(reason_of(e)) from e
        raise CheckpointError(f"the file's tokenizer can't be used: {reason_of(e)}") from e
    return True


def with_special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata without ids of special tokens that are outside the vocabulary, and with
    SentencePiece's own if the file has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids = ((k, n) for k, n in metadata.items() if _TOKEN_ID.fullmatch(k) and type(n) is int)
        if outside := {key: number for key, number in ids if not 0 <= number < len(tokens)}:
            log.warning("ignoring ids beyond the file's %s tokens: %s", len(tokens), outside)
            metadata = {key: value for key, value in metadata.items() if key not in outside}
    kind, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "token_type"))
    is_named = isinstance(kind, str) and _rules()["kinds"].get(kind) == "sentencepiece"
    if not is_named or not isinstance(kinds, list) or kinds[:3] != list(_SENTENCEPIECE.values()):
        return dict(metadata)
    own = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(_SENTENCEPIECE)}
    return {**own, **metadata}


def _checked_template(key: str, template: Any) -> str:
    from jinja2 import Environment, TemplateSyntaxError

    if not isinstance(template, str) or "\0" in template:
        raise CheckpointError(f"{key} is not a string")
    try:
        # Parsed, not run. transformers adds a tag, which marks the assistant's messages.
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAG.sub("", template))
    except (TemplateSyntaxError, RecursionError) as e:
        raise CheckpointError(f"{key} is not a Jinja template: {reason_of(e)}") from e
    return template


class _Vocabulary:
    """The fields `tokenizer.ggml.*`, each checked when it is read."""

    def __init__(self, metadata: Mapping[str, Any], end_ids: frozenset[int]) -> None:
        self._data, self._end_ids = metadata, end_ids
        kind = self._get("model", "")
        if not isinstance(kind, str):
            raise CheckpointError("tokenizer.ggml.model is not a string")
        self.kind = _rules()["kinds"].get(kind, kind)
        spaced = _rules()["spaced"].get(str(self._get("pre"))) if self.kind == "bytes" else None
        self._spaced: Mapping[str, bool] = spaced or {}
        if spaced is not None:  # byte-level by name only
            self.kind = "sentencepiece"

    def _get(self, key: str, default: Any = None) -> Any:
        return self._data.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
            raise CheckpointError(f"tokenizer.ggml.{key} is not a list of the right type")
        return value

    @property
    def tokens(self) -> list[str]:
        return self._list("tokens", str)

    def token(self, key: str) -> str | None:
        """The text of a special token."""
        number, tokens = self._get(f"{key}_token_id"), self.tokens
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key}_token_id is {str(number)[:80]}, but there are "
                f"{len(tokens)} tokens"
            )
        return tokens[number]

    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or several by name. CheckpointError if one is not valid Jinja."""
        found: dict[str, str] = {}
        for key, value in self._data.items():
            named = _TEMPLATE.fullmatch(key)
            if named is not None and value is not None:
                found[named[1] or "default"] = _checked_template(key, value)
        return found["default"] if found.keys() == {"default"} else found or None

    def build(self) -> Any:
        """The Rust tokenizer."""
        makers = {
            "bytes": self._byte_level,
            "sentencepiece": self._sentencepiece,
            "unigram": self._unigram,
            "wordpiece": self._wordpiece,
        }
        if self.kind not in makers:
            raise CheckpointError(
                f"the file's tokenizer is of kind {self.kind[:80]!r}; llmc supports "
                f"{', '.join(_rules()['kinds'])}; use another with --tokenizer DIR"
            )
        tokens = self.tokens
        if not tokens or len(set(tokens)) != len(tokens):
            raise CheckpointError("tokenizer.ggml.tokens is empty or has duplicates")
        backend, adds_bos = makers[self.kind]()
        self._add_special(backend)
        self._add_ends(backend, adds_bos)
        return backend

    def _byte_level(self) -> tuple[Any, bool]:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        rule = self._get("pre", "default")
        split = _rules()["splits"].get(rule)
        if split is None:
            log.warning("unknown pre-tokenizer rule %r: using the most common one", rule)
            split = _rules()["splits"]["gpt-2"]
        splits = [
            pre_tokenizers.Split(Regex(_rules()["patterns"].get(p, p)), behavior="isolated")
            for p in split["patterns"]
        ]
        merges = [self._pair(m) for m in self._list("merges", str)]
        backend = Tokenizer(
            models.BPE(
                vocab={token: i for i, token in enumerate(self.tokens)},
                merges=merges,
                ignore_merges=split.get("whole_words", False),
            )
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if split.get("composed"):
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend, split.get("adds_bos", False)

    def _pair(self, merge: str) -> tuple[str, str]:
        left, _, right = merge.partition(" ") if merge[:1] != " " else merge[1:].partition(" ")
        return left, right

    def _sentencepiece(self) -> tuple[Any, bool]:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        tokens = self._respelled()
        vocab = {token: i for i, token in enumerate(tokens)}
        merges = self._list("merges", str)
        backend = Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=[self._pair(m) for m in merges] or list(self._implied(vocab)),
                unk_token=self._unknown(tokens),
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        blank = normalizers.Replace(" ", _SPACE)
        prefixed = self._is_prefixed()
        if self._spaced.get("by_word"):  # a space before each line, unless it begins with one
            begin = normalizers.Replace(Regex(f"(?<![^\\n])(?=[^\\n{_SPACE}])"), _SPACE)
            backend.normalizer = normalizers.Sequence([blank, begin] if prefixed else [blank])
            word = Regex(f"\\n+|{_SPACE}?[^{_SPACE}\\n]+|{_SPACE}")
            backend.pre_tokenizer = pre_tokenizers.Split(word, "isolated")
        else:
            before = [normalizers.Prepend(_SPACE)] if prefixed else []
            backend.normalizer = normalizers.Sequence([*before, blank])
        backend.decoder = self._spaces_and_bytes(decoders, prefixed)
        return backend, self._spaced.get("adds_bos", True)

    def _is_prefixed(self) -> bool:
        """Whether a space is put before text. Some kinds of files need not say that none is."""
        default = self._get("model") not in _rules()["unprefixed"]
        return bool(self._get("add_space_prefix", self._spaced.get("by_word", default)))

    def _respelled(self) -> list[str]:
        """Replace runs of spaces, as spelled in some vocabularies, by the marker used in text."""
        known = set(self.tokens)
        marks = (_SPACE * len(t) if t and not t.strip(" ") else t for t in self.tokens)
        return [m if m not in known else t for m, t in zip(marks, self.tokens, strict=True)]

    def _implied(self, vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Merges ordered by the scores of their results; equal ones by id."""
        if self._data.get("general.architecture") in _rules()["merged_by_id"]:
            scores = [-i for i in range(len(vocab))]  # a file need not have any
        else:
            scores = self._list("scores", (int, float))
        if len(scores) != len(vocab):
            raise CheckpointError(
                f"tokenizer.ggml.scores has {len(scores)} scores for {len(vocab)} tokens"
            )
        found = []
        for token, i in vocab.items():
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in vocab and right in vocab:
                    found.append((-scores[i], i, vocab[left], vocab[right], left, right))
        found.sort()
        return ((left, right) for *_, left, right in found)

    def _unknown(self, tokens: list[str]) -> str | None:
        named = self.token("unknown")
        pairs = zip(tokens, self._get("token_type", []), strict=False)
        return named or next((token for token, kind in pairs if kind == _UNKNOWN), None)

    def _unigram(self) -> tuple[Any, bool]:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers

        tokens, scores = self.tokens, self._list("scores", (int, float))
        if len(scores) != len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.scores has {len(scores)} scores for {len(tokens)} tokens"
            )
        unknown = self._unknown(tokens)
        backend = Tokenizer(
            models.Unigram(
                list(zip(tokens, scores, strict=True)),
                unk_id=tokens.index(unknown) if unknown in tokens else None,
                byte_fallback="<0x00>" in tokens,
            )
        )
        steps: list[Any] = []
        if charsmap := self._get("precompiled_charsmap"):
            steps.append(normalizers.Precompiled(bytes(b & 255 for b in charsmap)))
        if self._get("remove_extra_whitespaces", False):
            steps.append(normalizers.Replace(Regex("^ +| +$"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        prefixed = self._is_prefixed()
        steps += [normalizers.Prepend(_SPACE)] if prefixed else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        backend.decoder = self._spaces_and_bytes(decoders, prefixed)
        return backend, False

    def _wordpiece(self) -> tuple[Any, bool]:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        tokens = [self._as_wordpiece(i, token) for i, token in enumerate(self.tokens)]
        plain = (t for t in tokens if not _BRACKETED.fullmatch(t))
        named = self._unknown(self.tokens)
        unknown = "[UNK]" if named is None else tokens[self.tokens.index(named)]
        if unknown not in tokens:
            raise CheckpointError(
                "tokenizer.ggml.unknown_token_id is missing, and there is no token [UNK]"
            )
        backend = Tokenizer(
            models.WordPiece(
                {token: i for i, token in enumerate(tokens)},
                unk_token=unknown,
                max_input_chars_per_word=100,
            )
        )
        # Files do not state whether text is lowercased, which also removes accents.
        backend.normalizer = normalizers.BertNormalizer(
            lowercase=all(t == t.lower() for t in plain)
        )
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        return backend, True

    def _as_wordpiece(self, number: int, token: str) -> str:
        """Files mark the pieces that begin a word, and the others are marked in the vocabulary."""
        kinds = self._get("token_type", [])
        is_special = kinds[number : number + 1] in ([_CONTROL], [_UNKNOWN])
        if is_special or _BRACKETED.fullmatch(token):
            return token
        return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"

    def _spaces_and_bytes(self, decoders: Any, prefixed: bool) -> Any:
        strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
        return decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )

    def _add_special(self, backend: Any) -> None:
        """Add special tokens (unknown, control, ends) and unsplittable user-defined tokens."""
        from tokenizers import AddedToken

        kinds = self._list("token_type", int)
        if kinds and len(kinds) != len(self.tokens):
            raise CheckpointError("tokenizer.ggml.token_type does not have one entry per token")
        added = []
        for i, (token, kind) in enumerate(zip(self.tokens, kinds, strict=False)):
            is_special = kind in (_UNKNOWN, _CONTROL) or i in self._end_ids
            if is_special or kind == _USER_DEFINED:
                added.append(AddedToken(token, normalized=False, special=is_special))
        backend.add_tokens(added)  # at once: each call takes as long as all tokens so far

    def _add_ends(self, backend: Any, adds_bos: bool) -> None:
        """Add the tokens before and after every prompt."""
        from tokenizers import processors

        first = self.token("bos") if self._get("add_bos_token", adds_bos) else None
        # the format's default, where a file does not state it
        adds_eos = self._get("add_eos_token", self.kind == "unigram")
        last = self.token("eos") if adds_eos else None
        if self.kind == "wordpiece":
            first = self.token("cls") if first is None and adds_bos else first
            last = last or (self.token("seperator") if self._get("add_sep_token", True) else None)
        named = [t for t in (first, last) if t is not None]
        if not named:
            if self.kind == "bytes":
                backend.post_processor = processors.ByteLevel(trim_offsets=False)
            return
        before, after = [first] if first else [], [last] if last else []
        one = [*before, "$A", *after]
        if self.kind == "wordpiece":  # the second text and what ends it are of another type
            two = [*one, "$B:1", *(f"{token}:1" for token in after)]
        else:
            two = [*one, *after, "$B", *after]
        backend.post_processor = processors.TemplateProcessing(
            single=one,
            pair=two,
            special_tokens=[(t, backend.token_to_id(t)) for t in dict.fromkeys(named)],
        )
