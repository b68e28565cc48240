"""State of a chat and its slash commands, without a terminal: text in, text and an action out.

`chat_terminal` shows it, `chat_backends` answer it; neither is known here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams

Message = dict[str, str]
BLOCK = '"""'
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
}


class Action(Enum):
    """What the caller does after a command."""

    STAY = "stay"
    ANSWER = "answer"  # generate an answer to the messages as they are now
    EXIT = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    text: str = ""
    action: Action = Action.STAY


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """Counts and times of one answer. A count is None where the backend does not tell."""

    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int
    ttft_s: float
    total_s: float
    finish_reason: str | None

    @property
    def tokens_per_s(self) -> float:
        """Of decoding: the first token's wait is not in it."""
        decode_s = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / decode_s if decode_s > 0 else 0.0

    @property
    def context_tokens(self) -> int | None:
        if self.prompt_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The messages so far, how the next answer is sampled, and what the last ones cost."""

    model: str
    context_limit: int | None = None
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    history: list[TurnStats] = field(default_factory=list)
    show_stats: bool = True
    context_tokens: int = 0  # of the prompt and answer of the last turn, as far as known

    def __post_init__(self) -> None:
        check_settings(self.settings)

    @property
    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def ask(self, question: str) -> None:
        self.turns.append({"role": "user", "content": question})

    def answered(self, text: str, stats: TurnStats) -> None:
        self.turns.append({"role": "assistant", "content": text})
        self.history.append(stats)
        self.context_tokens = stats.context_tokens or 0

    def drop_question(self) -> str:
        """Take back a question that got no answer, and return it."""
        assert self.turns and self.turns[-1]["role"] == "user", "no open question"
        return self.turns.pop()["content"]

    def run(self, line: str) -> Reply:
        """Run one slash command. Errors are text: a typo must not end the chat."""
        name, _, argument = line.strip().removeprefix("/").partition(" ")
        command = _COMMANDS.get(name.lower())
        if command is None:
            return Reply(text=_unknown(name))
        return command(self, argument.strip())

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


def is_command(line: str) -> bool:
    """`/x` is a command, `//x` a message that begins with a slash."""
    return line.startswith("/") and not line.startswith("//")


def is_open_block(text: str) -> bool:
    """Whether the text began with three quotes that are not closed yet."""
    return text.lstrip().startswith(BLOCK) and text.count(BLOCK) % 2 == 1


def message_text(entered: str) -> str:
    """What is sent of what was typed: without the quotes of a block, `//` as `/`."""
    text = entered.strip()
    if text.startswith(BLOCK):
        return text.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return text[1:] if text.startswith("//") else text


def check_settings(settings: Mapping[str, Any]) -> None:
    """InvalidRequestError (which names the value and the rule) unless they can be sampled with."""
    SamplingParams(**dict(settings))


def read_setting(name: str, value: str) -> Any:
    """The value of `/set NAME VALUE`, of the right type and inside its range."""
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


def why_it_ended(stats: TurnStats, chat: Conversation) -> str | None:
    """What to tell the user when an answer was cut off, and what to do about it."""
    if stats.finish_reason != "length":
        return None
    used, limit = stats.context_tokens, chat.context_limit
    if used is not None and limit is not None and used >= limit:
        return context_full(f"The answer stopped: the context of {limit} tokens is full.")
    return (
        f"The answer stopped at {stats.completion_tokens} tokens; "
        "`/set max_tokens NUMBER` allows more (`/set max_tokens default` as many as fit)."
    )


def context_full(reason: str) -> str:
    return (
        f"{reason}\n/undo takes back the last question and answer, /reset starts over; "
        "a larger context needs a restart with a higher --max-model-len."
    )


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, _COMMANDS, n=1)
    guess = f"did you mean /{nearest[0]}? " if nearest else ""
    return f"There is no command /{name}; {guess}/help lists them, // sends a leading slash."


def _help(chat: Conversation, argument: str) -> Reply:
    width = max(len(usage) for usage, _ in _HELP)
    lines = [f"  {usage:<{width}}  {meaning}" for usage, meaning in _HELP]
    return Reply(text="\n".join(lines))


def _reset(chat: Conversation, argument: str) -> Reply:
    chat.turns.clear()
    chat.context_tokens = 0
    kept = " The system prompt stays." if chat.system else ""
    return Reply(text="The conversation starts over." + kept)


def _system(chat: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply(text=f"System prompt: {chat.system}" if chat.system else "No system prompt.")
    if argument == "none":
        chat.system = None
        return Reply(text="The system prompt is gone.")
    chat.system = message_text(argument)
    return Reply(text="The system prompt is set and counts from the next answer on.")


def _set(chat: Conversation, argument: str) -> Reply:
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if not name:
        return Reply(text=_settings_text(chat))
    if name not in SETTINGS:
        nearest = difflib.get_close_matches(name, SETTINGS, n=1)
        guess = f"did you mean {nearest[0]}? " if nearest else ""
        return Reply(text=f"There is no setting {name!r}; {guess}They are {', '.join(SETTINGS)}.")
    if not value:
        return Reply(text=f"{name} = {chat.settings.get(name, 'default')}")
    if value in ("default", "none"):
        chat.settings.pop(name, None)
        return Reply(text=f"{name} is at its default.")
    try:
        chat.settings[name] = read_setting(name, value)
    except InvalidRequestError as error:
        return Reply(text=f"Not set: {error}.")
    return Reply(text=f"{name} = {chat.settings[name]}")


def _settings_text(chat: Conversation) -> str:
    return "\n".join(f"  {name} = {chat.settings.get(name, 'default')}" for name in SETTINGS)


def _show(chat: Conversation, argument: str) -> Reply:
    limit = f" of {chat.context_limit}" if chat.context_limit else ""
    return Reply(
        text=f"  model: {chat.model}\n"
        f"  system prompt: {chat.system or 'none'}\n"
        f"  turns: {sum(turn['role'] == 'user' for turn in chat.turns)}, "
        f"{chat.context_tokens}{limit} tokens of context\n" + _settings_text(chat)
    )


def _stats(chat: Conversation, argument: str) -> Reply:
    if argument in ("on", "off"):
        chat.show_stats = argument == "on"
        return Reply(text=f"Statistics after each answer are {argument}.")
    if argument:
        return Reply(text="Write /stats, /stats on or /stats off.")
    if not chat.history:
        return Reply(text="No answer yet.")
    tokens = sum(stats.completion_tokens for stats in chat.history)
    seconds = sum(stats.total_s for stats in chat.history)
    return Reply(
        text=f"  last: {stats_line(chat.history[-1], chat.context_limit)}\n"
        f"  all: {len(chat.history)} answers, {tokens} tokens in {seconds:.1f} s"
    )


def _save(chat: Conversation, argument: str) -> Reply:
    if not chat.turns:
        return Reply(text="There is nothing to save yet.")
    name = argument or f"chat-{datetime.now():%Y%m%d-%H%M%S}.json"
    path = Path(name).expanduser()
    saved = {"model": chat.model, "settings": chat.settings, "messages": chat.messages}
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(saved, file, indent=2, ensure_ascii=False)
            file.write("\n")
    except FileExistsError:
        return Reply(text=f"Not saved: {path} exists; choose another name.")
    except OSError as error:
        return Reply(text=f"Not saved: {path}: {error.strerror}.")
    return Reply(text=f"Saved to {path}.")


def _load(chat: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply(text="Write /load FILE, with a file that /save made.")
    path = Path(argument).expanduser()
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        turns = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
    except OSError as error:
        return Reply(text=f"Not loaded: {path}: {error.strerror}.")
    except (ValueError, KeyError, TypeError):
        return Reply(text=f"Not loaded: {path} is not a file that /save made.")
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    chat.system = system[0] if system else None
    chat.turns = [turn for turn in turns if turn["role"] != "system"]
    chat.context_tokens = 0
    return Reply(text=f"Loaded {len(chat.turns)} messages from {path}.")


def _undo(chat: Conversation, argument: str) -> Reply:
    if not any(turn["role"] == "user" for turn in chat.turns):
        return Reply(text="There is nothing to take back.")
    while chat.turns.pop()["role"] != "user":
        pass
    chat.context_tokens = 0
    return Reply(text="The last question and its answer are gone.")


def _regen(chat: Conversation, argument: str) -> Reply:
    if not any(turn["role"] == "user" for turn in chat.turns):
        return Reply(text="There is no question to answer again.")
    while chat.turns[-1]["role"] != "user":
        chat.turns.pop()
    return Reply(action=Action.ANSWER)


def _exit(chat: Conversation, argument: str) -> Reply:
    return Reply(action=Action.EXIT)


_HELP = (
    ("/help", "this list"),
    ("/reset", "start over; the system prompt stays (also /clear)"),
    ("/system [TEXT]", "show the system prompt or set it; `none` removes it"),
    ("/set [NAME VALUE]", "list the sampling settings or set one, e.g. /set temperature 0.7"),
    ("/show", "the model, the system prompt and all settings"),
    ("/stats [on|off]", "speed and token counts; on and off: after each answer"),
    ("/undo", "take back the last question and answer"),
    ("/regen", "answer the last question again"),
    ("/save [FILE]", "save the conversation as JSON"),
    ("/load FILE", "go on with a saved conversation"),
    ("/exit", "leave (also /bye, Ctrl-D)"),
    (BLOCK, "begins and ends a message of several lines; Alt-Enter breaks a line"),
    ("Ctrl-C", "stops the answer, not the program"),
)
_COMMANDS: Mapping[str, Callable[[Conversation, str], Reply]] = {
    "help": _help,
    "?": _help,
    "reset": _reset,
    "clear": _reset,
    "system": _system,
    "set": _set,
    "show": _show,
    "stats": _stats,
    "undo": _undo,
    "regen": _regen,
    "save": _save,
    "load": _load,
    "exit": _exit,
    "bye": _exit,
    "quit": _exit,
}
COMMAND_NAMES = tuple("/" + name for name in _COMMANDS)
