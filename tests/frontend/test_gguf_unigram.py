"""Unigram vocabularies of GGUF files: spaces and bytes as SentencePiece treats them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmc.text.gguf_tokenizer import write_tokenizer
from llmc.text.tokenizer import Tokenizer

WORDS = {"\u2581": -3.0, "\u2581a": -2.0, "a": -4.0, "b": -2.5, "\u2581\u2581": -2.0}


def tokenizer(folder: Path, **fields: Any) -> Tokenizer:
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    metadata = {
        "model": "t5",
        "tokens": ["<unk>", "</s>", *WORDS, *bytes_of],
        "scores": [0.0, 0.0, *WORDS.values(), *[0.0] * 256],
        "token_type": [2, 3, *[1] * len(WORDS), *[6] * 256],
        "unknown_token_id": 0,
        "eos_token_id": 1,
        **fields,
    }
    assert write_tokenizer({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, folder)
    (folder / "gguf.json").write_text("{}")
    return Tokenizer.load(folder)


# What sentencepiece gives for the same pieces, whose names are joined by spaces here.
@pytest.mark.parametrize(
    ("removes", "prefix", "text", "pieces"),
    [
        (True, True, "  a   b ", "_a _ b"),
        (True, False, " ab", "a b"),
        (False, True, " a", "_ _a"),
        (False, True, "a  b", "_a __ b"),
        (False, False, "a ", "a _"),
        (True, True, "   ", ""),
    ],
)
def test_spaces_are_kept_or_removed_as_the_file_says(
    removes: bool, prefix: bool, text: str, pieces: str, tmp_path: Path
) -> None:
    given = tokenizer(tmp_path, remove_extra_whitespaces=removes, add_space_prefix=prefix)
    tokens = given.tokens(given.encode(text, add_special_tokens=False))
    assert [t.replace("\u2581", "_") for t in tokens] == pieces.split()


def test_bytes_of_unknown_characters_are_decoded(tmp_path: Path) -> None:
    given = tokenizer(tmp_path)
    text = "a \u00e9\U0001f600b"
    assert given.decode(given.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(("stated", "ends"), [(None, True), (True, True), (False, False)])
def test_text_is_ended_unless_the_file_says_otherwise(
    stated: bool | None, ends: bool, tmp_path: Path
) -> None:
    given = tokenizer(tmp_path, **({} if stated is None else {"add_eos_token": stated}))
    assert (given.encode("a")[-1] == 1) == ends
