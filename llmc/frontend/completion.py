"""One completion being generated: tokens in, text and log-probabilities out, and how it ended.

The text is kept in pieces and each reader has a position, so the cost of a delta depends only on
its new text. A reader that falls behind gets the pieces merged; nothing queues up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.engine.messages import RequestUpdate
from llmc.engine.plan import TokenLogprobs
from llmc.frontend.inputs import Input, LineLimits
from llmc.outputs import CompletionOutput, FinishReason, Logprob
from llmc.text.detokenizer import Detokenizer
from llmc.text.tokenizer import Tokenizer

PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What was added to one completion since the reader's last delta."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(slots=True)
class Cursor:
    """A reader's position in one completion."""

    pieces: int = 0
    tokens: int = 0
    finished: bool = False


class Completion:
    """One sequence being generated: its tokens, its text so far, and how it ended."""

    def __init__(self, index: int, source: Input, tokenizer: Tokenizer | None) -> None:
        sampling = source.sampling
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = [] if sampling.logprobs is not None else None
        self.cumulative_logprob = 0.0
        self._has_sum = sampling.logprobs is not None or sampling.best_of is not None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._pieces: list[str] = []
        self._include_stop = sampling.include_stop_str_in_output
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and sampling.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                source.prompt_token_ids,
                stop=sampling.stop_strings,
                include_stop=self._include_stop,
                skip_special_tokens=sampling.skip_special_tokens,
                shown_ids=source.shown_ids,
                min_tokens=sampling.min_tokens,
            )
        self._lines = None if source.line_limits is None else _Lines(source.line_limits)

    def apply(self, update: RequestUpdate) -> None:
        """Apply an update. Afterwards `finish_reason` may be set, possibly by a stop string."""
        self.token_ids.extend(update.new_token_ids)
        if self.logprobs is not None:
            self.logprobs += [position(item, self._tokenizer) for item in update.logprobs]
        self.cumulative_logprob += sum(item.logprob for item in update.logprobs)
        if self._detokenizer is None:
            self._end(update.finish_reason, update.stop_reason)
            return
        tokens = update.new_token_ids
        has_stop_token = update.finish_reason == "stop" and not update.is_whole
        if has_stop_token and not self._include_stop:
            tokens = tokens[:-1]  # the stop token is not part of the text
        text = self._detokenizer.push(tokens)
        if update.finish_reason is not None:
            text += self._detokenizer.finish()
        if self._lines is not None:
            text = self._lines.cut(text)
        self._append(text)
        if self._lines is not None and self._lines.ended:
            self._end("length", None)
        elif self._detokenizer.stopped_by is not None:
            self._end("stop", self._detokenizer.stopped_by)
        else:
            self._end(update.finish_reason, update.stop_reason)
        if self.finish_reason is None and self._lines is not None and self._lines.is_late:
            self._end("length", None)

    def abandon(self, reason: FinishReason) -> None:
        """End it on this side, after the caller aborted it or the engine died."""
        if self.finish_reason is None:
            if self._detokenizer is not None:
                self._append(self._detokenizer.finish())
            self._end(reason, None)

    def adopt(self, other: Completion) -> None:
        """Take over everything but the index from another completion."""
        self.token_ids, self.logprobs = other.token_ids, other.logprobs
        self.cumulative_logprob, self._pieces = other.cumulative_logprob, other._pieces
        self._end(other.finish_reason, other.stop_reason)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self._text(),
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if self._has_sum else None,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def delta(self, cursor: Cursor) -> CompletionDelta | None:
        """What was added after `cursor`, which is advanced. None if there is nothing new."""
        text = "".join(self._pieces[cursor.pieces :])
        token_ids = self.token_ids[cursor.tokens :]
        ended = self.finish_reason is not None and not cursor.finished
        if not text and not token_ids and not ended:
            return None
        logprobs = self.logprobs[cursor.tokens :] if self.logprobs is not None else ()
        cursor.pieces, cursor.tokens = len(self._pieces), len(self.token_ids)
        cursor.finished = self.finish_reason is not None
        return CompletionDelta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _append(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _text(self) -> str:
        return "".join(self._pieces)

    def _end(self, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        if reason is not None:
            self.finish_reason = reason
            self.stop_reason = stop_reason


class _Lines:
    """Applies LineLimits to an answer's text as it grows."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._began: float | None = None  # with the first token
        self._indent: int | None = None  # of a line with nothing else yet, after a line break
        self.ended = False  # by a line's indentation
        self.is_late = False  # the newest text has a line break, after the time is over

    def cut(self, text: str) -> str:
        """The new text, up to where `indent` ends the answer."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        for i, char in enumerate(text):
            if self._indent is not None and char in " \t":
                self._indent += 1
                continue
            if self._indent is not None and self._indent < self._limits.indent:
                self.ended = True
                return text[:i]
            self._indent = 0 if char == "\n" else None
        seconds = self._limits.seconds
        self.is_late = seconds is not None and "\n" in text and now - self._began > seconds
        return text


def position(item: TokenLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """The log-probabilities of one position by token id: the chosen and the most likely tokens."""

    def entry(token: int, value: float, rank: int) -> Logprob:
        text = tokenizer.token_text(token) if tokenizer is not None else None
        return Logprob(logprob=float(value), rank=rank, decoded_token=text)

    chosen = {item.token_id: entry(item.token_id, item.logprob, item.rank)}
    for rank, (token, value) in enumerate(
        zip(item.top_token_ids, item.top_logprobs, strict=True), start=1
    ):
        if token not in chosen:
            chosen[token] = entry(token, value, rank)
    return chosen
