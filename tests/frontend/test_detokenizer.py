"""Incremental text: whole characters only, stop strings however the text was cut, bounded work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import make_hf_tokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from llmc.text.detokenizer import Detokenizer, IncrementalDecoder, StopFinder
from llmc.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_hf_tokenizer())


def sentencepiece_like() -> Tokenizer:
    """Words start with U+2581, bytes fall back to <0x..>, and a leading space is dropped."""
    words = ["<unk>", "<s>", "</s>", "\u2581Hello", "\u2581world", "!"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    rust = RustTokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>")
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    )


def stream(decoder: IncrementalDecoder, ids: list[int]) -> tuple[list[str], str]:
    return [decoder.push([i]) for i in ids], decoder.flush()


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_text(text: str) -> None:
    pieces, rest = stream(IncrementalDecoder(TOKENIZER), TOKENIZER.encode(text))
    # Special tokens that the text happens to spell are skipped, as in decode().
    assert "".join(pieces) + rest == TOKENIZER.decode(TOKENIZER.encode(text))


def test_no_piece_has_half_a_character() -> None:
    text = "h\u00e9 \U0001f642 \u4f60\u597d"
    pieces, rest = stream(IncrementalDecoder(TOKENIZER), TOKENIZER.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert rest == ""


def test_half_a_character_at_the_end_is_flushed() -> None:
    ids = TOKENIZER.encode("ok\U0001f642")[:-1]
    pieces, rest = stream(IncrementalDecoder(TOKENIZER), ids)
    assert "".join(pieces) == "ok"
    assert set(rest) == {"\ufffd"}


def test_context_keeps_the_space_of_the_first_word() -> None:
    tokenizer = sentencepiece_like()
    pieces, _ = stream(IncrementalDecoder(tokenizer, [1, 3]), [4, 5])
    assert "".join(pieces) == " world!"
    pieces, _ = stream(IncrementalDecoder(tokenizer, []), [3, 4])
    assert "".join(pieces) == "Hello world"


def test_byte_fallback_waits_for_the_character() -> None:
    tokenizer = sentencepiece_like()
    ids = [6 + byte for byte in "\U0001f642".encode()]
    pieces, _ = stream(IncrementalDecoder(tokenizer, [3]), ids)
    assert pieces == ["", "", "", "\U0001f642"]


@pytest.mark.parametrize("token", [399, 1, 6 + 0xC3], ids=["unknown", "special", "broken byte"])
def test_endless_output_without_text_keeps_a_small_window(token: int) -> None:
    decoder = IncrementalDecoder(TOKENIZER if token != 6 + 0xC3 else sentencepiece_like())
    for _ in range(2000):
        decoder.push([token])
    assert len(decoder._window) < 100


def test_window_stays_small_on_long_output() -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    for token in TOKENIZER.encode("some words and more of them " * 200):
        decoder.push([token])
    assert len(decoder._window) < 20


def expected_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The meaning of stop strings: read one character at a time, the first complete one ends it."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=24),
)
@settings(max_examples=400, deadline=None)
def test_stop_does_not_depend_on_the_cuts(text: str, stop: list[str], cuts: list[int]) -> None:
    finder, shown, match, rest = StopFinder(stop), "", None, text
    for cut in [*cuts, len(text)]:
        piece, rest = rest[:cut], rest[cut:]
        if piece and match is None:
            new, match = finder.push(piece)
            shown += new
            assert text.startswith(shown)  # nothing shown is ever taken back
    shown += finder.flush() if match is None else ""
    assert (shown, match) == expected_stop(text, stop)


def detokenize(text: str, stop: list[str], **options: object) -> tuple[str, str | None]:
    detokenizer = Detokenizer(TOKENIZER, [], stop=stop, **options)  # type: ignore[arg-type]
    shown = ""
    for token in TOKENIZER.encode(text):
        shown += detokenizer.push([token])
        if detokenizer.stopped_by is not None:
            return shown, detokenizer.stopped_by
    return shown + detokenizer.finish(), detokenizer.stopped_by


def test_stop_across_tokens_is_trimmed() -> None:
    assert detokenize("one two, three", ["o, t"]) == ("one tw", "o, t")


def test_stop_may_be_included() -> None:
    assert detokenize("one two, three", ["o, t"], include_stop=True) == ("one two, t", "o, t")


def test_stop_of_a_split_character() -> None:
    assert detokenize("a \U0001f642 b", ["\U0001f642"]) == ("a ", "\U0001f642")


def test_held_text_comes_out_at_the_end() -> None:
    assert detokenize("one two", ["two!"]) == ("one two", None)


def test_stop_waits_for_min_tokens() -> None:
    text = "ab ab ab"
    early = len(TOKENIZER.encode("ab ab"))
    assert detokenize(text, ["ab"]) == ("", "ab")
    assert detokenize(text, ["ab"], min_tokens=early) == ("ab ab ", "ab")
