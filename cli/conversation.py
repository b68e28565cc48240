"""State of a chat, without a terminal: messages, settings, token counts and times.

`chat_commands` changes it, `chat_terminal` shows it, `chat_backends` answers it. This module
depends on none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams

Message = dict[str, str]
BLOCK = '"""'
ALTERNATIVES = 3  # shown per token
SETTINGS: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "stop": str,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "repeat_last_n": int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """Counts and times of one answer. A count is None where the backend does not report it."""

    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int
    ttft_s: float
    total_s: float
    finish_reason: str | None

    @property
    def tokens_per_s(self) -> float:
        """Decode speed, excluding the time to the first token."""
        decode_s = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / decode_s if decode_s > 0 else 0.0

    @property
    def context_tokens(self) -> int | None:
        if self.prompt_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """A token of an answer with its log-probability, and the most likely ones at its position."""

    text: str
    logprob: float
    alternatives: Sequence[tuple[str, float]] = ()


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The messages so far, the sampling settings, and the statistics of past answers."""

    model: str
    context_limit: int | None = None
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    history: list[TurnStats] = field(default_factory=list)
    show_stats: bool = True
    context_tokens: int = 0  # prompt and answer of the last turn, as far as known
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of settings, where known
    models: Sequence[str] = ()  # to choose from; empty: there is only one
    attachments: list[str] = field(default_factory=list)  # sent before the next question
    keeps_tokens: bool = False  # request the tokens of answers, with their probabilities
    tokens: list[ShownToken] = field(default_factory=list)  # of the last answer

    def __post_init__(self) -> None:
        check_settings(self.settings)

    @property
    def asked_settings(self) -> dict[str, Any]:
        """Settings for the backend, including the number of alternatives per token."""
        return {**self.settings, **({"logprobs": ALTERNATIVES} if self.keeps_tokens else {})}

    def in_force(self, name: str) -> str:
        """The value of a setting for the next answer, and whether it is a default."""
        if name in self.settings:
            return str(self.settings[name])
        if name not in self.defaults:
            return "the server's default" if not self.defaults else "none"
        value = self.defaults[name]
        return "none" if value in (None, "", ()) else f"{value} (default)"

    @property
    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def ask(self, question: str) -> None:
        text = "\n\n".join([*self.attachments, question])
        self.attachments.clear()
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str, stats: TurnStats) -> None:
        self.turns.append({"role": "assistant", "content": text})
        self.history.append(stats)
        self.context_tokens = stats.context_tokens or 0

    def drop_question(self) -> str:
        """Remove a question that got no answer, and return it."""
        assert self.turns and self.turns[-1]["role"] == "user", "no open question"
        return self.turns.pop()["content"]

    def status(self) -> str:
        """One line for the bottom of the screen: speed and context use."""
        parts = [self.model]
        if self.history:
            parts.append(f"{self.history[-1].tokens_per_s:.1f} tok/s")
        limit = f"/{self.context_limit}" if self.context_limit else ""
        parts.append(f"context {self.context_tokens}{limit} tokens")
        if self.context_limit and self.context_tokens > 0.9 * self.context_limit:
            parts.append("nearly full: /undo, /reset")
        return "  |  ".join(parts)


def is_open_block(text: str) -> bool:
    """Whether the text begins with three quotes that are not closed yet."""
    return text.lstrip().startswith(BLOCK) and text.count(BLOCK) % 2 == 1


def message_text(entered: str) -> str:
    """The message for the typed text: without a block's quotes, and with `//` as `/`."""
    text = entered.strip()
    if text.startswith(BLOCK):
        return text.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return text[1:] if text.startswith("//") else text


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError (naming the value and the rule) if a setting is invalid."""
    SamplingParams(**dict(settings))
    if settings.get("max_tokens") == 0:  # valid in the API, for the log-probabilities of a prompt
        raise InvalidRequestError("max_tokens must be at least 1, got 0", param="max_tokens")


def read_setting(name: str, value: str) -> Any:
    """Parse the value of `/set NAME VALUE` and check its range."""
    kind = SETTINGS[name]
    try:
        parsed = kind(value)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise InvalidRequestError(f"{name} must be {wanted}, got {value!r}", param=name) from None
    check_settings({name: parsed})
    return parsed


def stats_line(stats: TurnStats, context_limit: int | None) -> str:
    """`TTFT 0.12 s | 34.1 tok/s | 57 prompt (48 cached) + 120 answer | context 177/1024`."""
    parts = [f"TTFT {stats.ttft_s:.2f} s", f"{stats.tokens_per_s:.1f} tok/s"]
    if stats.prompt_tokens is None:
        parts.append(f"{stats.completion_tokens} answer tokens")
    else:
        cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens is not None else ""
        parts.append(f"{stats.prompt_tokens} prompt{cached} + {stats.completion_tokens} answer")
    if stats.context_tokens is not None:
        limit = f"/{context_limit}" if context_limit else ""
        parts.append(f"context {stats.context_tokens}{limit}")
    return " | ".join(parts)


_LARGER = "For a larger context, restart with a higher --max-model-len."


def why_it_ended(
    stats: TurnStats, chat: Conversation, *, is_interactive: bool = True
) -> str | None:
    """The message for an answer that was cut off, with advice; None if it was not."""
    if stats.finish_reason != "length":
        return None
    used, limit = stats.context_tokens, chat.context_limit
    if used is not None and limit is not None and used >= limit:
        full = f"The answer stopped: the context of {limit} tokens is full."
        return context_full(full) if is_interactive else f"{full} {_LARGER}"
    stopped = f"The answer stopped at {stats.completion_tokens} tokens; "
    if not is_interactive:
        return stopped + "a higher --max-tokens allows more (without it: as many as fit)."
    return (
        stopped
        + "`/set max_tokens NUMBER` allows more (`/set max_tokens default`: as many as fit)."
    )


def context_full(reason: str) -> str:
    return f"{reason}\n/undo removes the last question and answer, /reset starts over. {_LARGER}"
