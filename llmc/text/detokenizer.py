"""Token ids -> text while they are being generated, and the stop strings in that text.

One `Detokenizer` serves one sequence:

    ids -> IncrementalDecoder -> whole characters -> StopFinder -> text that is safe to show

Both parts hold back text that may still change: the decoder an incomplete character, the finder a
suffix that could become a stop string. Work per token is bounded, however long the output gets.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.text.partial import partial_length
from llmc.text.tokenizer import Tokenizer

# Prompt tokens that the decoder sees before the output, so that the first output token is decoded
# as in the middle of a text (some tokenizers drop the leading space of the first token).
CONTEXT_TOKENS = 6
# A character has at most four bytes, so at most four tokens. Many more pending ones mean that the
# output is invalid.
MAX_PENDING_TOKENS = 32
REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Turns tokens into text as soon as the text can no longer change.

    Keeps a short window of ids. Tokens before `_read` have been shown; decoding the window with
    and without the new ones gives the new text in its context. (tokenizers' DecodeStream does the
    same, but not for tokenizers in Python, and it can't recover from an "invalid prefix".)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset[int]()
        if skip_special_tokens:
            self._skipped = tokenizer.special_ids - shown_ids
        self._window = [i for i in context[-CONTEXT_TOKENS:] if i not in tokenizer.special_ids]
        self._read = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` completed; incomplete characters wait for the next call."""
        if len(token_ids) > MAX_PENDING_TOKENS // 2:  # many at once would look like invalid output
            half = len(token_ids) // 2
            return self.push(token_ids[:half]) + self.push(token_ids[half:])
        self._window.extend(i for i in token_ids if i not in self._skipped)
        if len(self._window) == self._read:
            return ""
        before, after = self._texts()
        pending = len(self._window) - self._read
        if after.endswith(REPLACEMENT) and pending <= MAX_PENDING_TOKENS:
            return ""
        if len(after) <= len(before) and pending <= MAX_PENDING_TOKENS:
            return ""
        self._advance()
        return after[len(before) :]

    def flush(self) -> str:
        """All pending text, complete or not. An incomplete character becomes U+FFFD."""
        if len(self._window) == self._read:
            return ""
        before, after = self._texts()
        self._advance()
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        shown = decode(self._window[: self._read], skip_special_tokens=False)
        return shown, decode(self._window, skip_special_tokens=False)

    def _advance(self) -> None:
        self._window = self._window[self._read :]
        self._read = len(self._window)


class StopFinder:
    """Searches for stop strings in text that arrives in pieces of any size.

    The one that is complete first wins, and of two that end at the same place the longer one, so
    the result does not depend on how the text is split into tokens.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is safe to show, and the stop string that ended it, if any."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include else start], stop
        keep = len(text) - max((partial_length(stop, text) for stop in self._stop), default=0)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """The text of one generated sequence, up to the first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),  # special tokens that are never skipped
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            shown_ids=shown_ids,
        )
        self._finder = StopFinder(stop, include=include_stop)
        self._tokens_before_stop = min_tokens  # stop strings in the first tokens don't count
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that can be shown. Once `stopped_by` is set, the text has ended."""
        if self.stopped_by is not None:
            return ""
        shown = ""
        if self._tokens_before_stop:
            free = token_ids[: self._tokens_before_stop]
            token_ids = token_ids[self._tokens_before_stop :]
            self._tokens_before_stop -= len(free)
            shown = self._decoder.push(free)
        return shown + self._search(self._decoder.push(token_ids))

    def finish(self) -> str:
        """The remaining text, when the sequence has ended."""
        if self.stopped_by is not None:
            return ""
        shown = self._search(self._decoder.flush())
        return shown if self.stopped_by is not None else shown + self._finder.flush()

    def _search(self, text: str) -> str:
        if not text:
            return ""
        shown, self.stopped_by = self._finder.push(text)
        return shown
