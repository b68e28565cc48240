"""Slash commands of the chat: each takes the conversation and an argument and returns a reply.

Errors are replies too: a typo must not end a chat.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

from llmc.cli.conversation import (
    ALTERNATIVES,
    BLOCK,
    SETTINGS,
    Conversation,
    check_settings,
    message_text,
    read_setting,
    stats_line,
)
from llmc.errors import InvalidRequestError

MAX_FILE_BYTES = 1024 * 1024
_PATH = re.compile(r'(?:"(?P<quoted>[^"]+)"|(?P<plain>\S+))(?P<rest>.*)', re.DOTALL)
MAX_TOKENS = 200  # shown by /tokens


class Action(Enum):
    """What the caller must do after a command."""

    STAY = "stay"
    ANSWER = "answer"  # generate an answer to the current messages
    EDIT = "edit"  # put the text into the next prompt for editing
    MODEL = "model"  # the chat's model has changed
    EXIT = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    text: str = ""
    action: Action = Action.STAY


def is_command(line: str) -> bool:
    """`/x` is a command, `//x` a message that begins with a slash."""
    return line.startswith("/") and not line.startswith("//")


def run_command(chat: Conversation, line: str) -> Reply:
    """Run one line that `is_command` accepts."""
    name, _, argument = line.strip().removeprefix("/").partition(" ")
    command = _COMMANDS.get(name.lower())
    if command is None:
        return Reply(text=_unknown(name))
    return command(chat, argument.strip())


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"did you mean /{nearest[0]}? " if nearest else ""
    return f"There is no command /{name}; {hint}/help lists commands, // sends a leading slash."


def _help(chat: Conversation, argument: str) -> Reply:
    width = max(len(usage) for usage, _ in _HELP)
    lines = [f"  {usage:<{width}}  {meaning}" for usage, meaning in _HELP]
    return Reply(text="\n".join(lines))


def _reset(chat: Conversation, argument: str) -> Reply:
    chat.turns.clear()
    chat.context_tokens = 0
    kept = " The system prompt is kept." if chat.system else ""
    return Reply(text="The conversation starts over." + kept)


def _system(chat: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply(text=f"System prompt: {chat.system}" if chat.system else "No system prompt.")
    if argument == "none":
        chat.system = None
        return Reply(text="The system prompt was removed.")
    chat.system = message_text(argument)
    return Reply(text="The system prompt is set; it applies from the next answer on.")


def _set(chat: Conversation, argument: str) -> Reply:
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if not name:
        return Reply(text=_settings_text(chat))
    if name not in SETTINGS:
        nearest = difflib.get_close_matches(name, SETTINGS, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        return Reply(text=f"Unknown setting {name!r}; {hint}Settings: {', '.join(SETTINGS)}.")
    if not value:
        return Reply(text=f"{name} = {chat.in_force(name)}")
    if value in ("default", "none"):
        chat.settings.pop(name, None)
        return Reply(text=f"{name} = {chat.in_force(name)}")
    try:
        chat.settings[name] = read_setting(name, value)
    except InvalidRequestError as error:
        return Reply(text=f"Not set: {error}.")
    return Reply(text=f"{name} = {chat.settings[name]}")


def _settings_text(chat: Conversation) -> str:
    return "\n".join(f"  {name} = {chat.in_force(name)}" for name in SETTINGS)


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
    answers = f"{len(chat.history)} answer{'s' if len(chat.history) > 1 else ''}"
    tokens = sum(stats.completion_tokens for stats in chat.history)
    seconds = sum(stats.total_s for stats in chat.history)
    return Reply(
        text=f"  last: {stats_line(chat.history[-1], chat.context_limit)}\n"
        f"  all: {answers}, {tokens} tokens in {seconds:.1f} s"
    )


def _save(chat: Conversation, argument: str) -> Reply:
    if not chat.turns:
        return Reply(text="Nothing to save yet.")
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
        return Reply(text="Write /load FILE, with a file written by /save.")
    path = Path(argument).expanduser()
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        turns = [{"role": str(m["role"]), "content": str(m["content"])} for m in saved["messages"]]
        settings = dict(saved.get("settings", chat.settings))
        if not settings.keys() <= SETTINGS.keys():
            raise ValueError(settings)
        check_settings(settings)
    except OSError as error:
        return Reply(text=f"Not loaded: {path}: {error.strerror}.")
    except InvalidRequestError as error:
        return Reply(text=f"Not loaded: {path}: {error}.")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Reply(text=f"Not loaded: {path} was not written by /save.")
    chat.settings = settings
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    chat.system = system[0] if system else None
    chat.turns = [turn for turn in turns if turn["role"] != "system"]
    chat.context_tokens = 0
    shown = ", ".join(f"{name} = {value}" for name, value in settings.items())
    return Reply(
        text=f"Loaded {len(chat.turns)} messages from {path}."
        + (f" Settings: {shown}." if shown else "")
    )


def _undo(chat: Conversation, argument: str) -> Reply:
    if not any(turn["role"] == "user" for turn in chat.turns):
        return Reply(text="Nothing to undo.")
    while chat.turns.pop()["role"] != "user":
        pass
    chat.context_tokens = 0
    return Reply(text="The last question and its answer were removed.")


def _regen(chat: Conversation, argument: str) -> Reply:
    if not any(turn["role"] == "user" for turn in chat.turns):
        return Reply(text="There is no question to answer again.")
    while chat.turns[-1]["role"] != "user":
        chat.turns.pop()
    return Reply(action=Action.ANSWER)


def _edit(chat: Conversation, argument: str) -> Reply:
    if not any(turn["role"] == "user" for turn in chat.turns):
        return Reply(text="There is no question to edit.")
    while (last := chat.turns.pop())["role"] != "user":
        pass
    chat.context_tokens = 0
    return Reply(text=last["content"], action=Action.EDIT)


def _file(chat: Conversation, argument: str) -> Reply:
    found = _PATH.match(argument)
    if found is None:
        return Reply(text='Write /file PATH, or /file PATH QUESTION; "quote a path" with spaces.')
    name, question = found["quoted"] or found["plain"], found["rest"].strip()
    path = Path(name).expanduser()
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            return Reply(text=f"Not read: {path} has {size} bytes; the limit is {MAX_FILE_BYTES}.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return Reply(text=f"Not read: {path}: {error.strerror}.")
    except UnicodeDecodeError:
        return Reply(text=f"Not read: {path} is not UTF-8 text.")
    chat.attachments.append(f"{path.name}:\n```\n{text.rstrip()}\n```")
    if not question:
        lines = text.count("\n") + 1
        return Reply(text=f"{path} ({lines} lines) will be sent with your next message.")
    chat.ask(question)
    return Reply(action=Action.ANSWER)


def _model(chat: Conversation, argument: str) -> Reply:
    if not argument:
        others = [name for name in chat.models if name != chat.model]
        more = f"; also available: {', '.join(others)}" if others else ""
        return Reply(text=f"Model: {chat.model}{more}.")
    if argument in chat.models:
        chat.model = argument
        return Reply(text=f"Now chatting with {argument}.", action=Action.MODEL)
    if not chat.models:
        return Reply(
            text=f"This chat runs {chat.model} in its own process. For another model, exit and "
            "start `llmc chat MODEL`; /save keeps the conversation."
        )
    return Reply(text=f"The server has no model {argument!r}; it has {', '.join(chat.models)}.")


def _tokens(chat: Conversation, argument: str) -> Reply:
    if argument in ("on", "off"):
        chat.keeps_tokens = argument == "on"
        return Reply(text=f"Recording of token probabilities is {argument}.")
    if argument:
        return Reply(text="Write /tokens, /tokens on or /tokens off.")
    if not chat.tokens:
        return Reply(text="/tokens on records the tokens of the next answer; /tokens shows them.")
    lines = []
    for token in chat.tokens[:MAX_TOKENS]:
        others = [(text, p) for text, p in token.alternatives if text != token.text]
        more = ", ".join(f"{text!r} {math.exp(p):.1%}" for text, p in others[:ALTERNATIVES])
        lines.append(f"  {math.exp(token.logprob):6.1%}  {token.text!r}  ({more})")
    left = len(chat.tokens) - MAX_TOKENS
    return Reply(text="\n".join(lines) + (f"\n  and {left} more" if left > 0 else ""))


def _exit(chat: Conversation, argument: str) -> Reply:
    return Reply(action=Action.EXIT)


_HELP = (
    ("/help", "this list"),
    ("/reset", "start over; keeps the system prompt (also /clear)"),
    ("/system [TEXT]", "show the system prompt or set it; `none` removes it"),
    ("/set [NAME VALUE]", "list the sampling settings or set one, e.g. /set temperature 0.7"),
    ("/show", "the model, the system prompt and all settings"),
    ("/stats [on|off]", "show speed and token counts, or turn them on or off after answers"),
    ("/undo", "remove the last question and answer"),
    ("/regen", "answer the last question again (also /retry)"),
    ("/edit", "move the last question back to the prompt for editing"),
    ("/file PATH [QUESTION]", "put a text file before this question, or before the next one"),
    ("/model [NAME]", "show the model; with --url, switch to another one of the server"),
    ("/tokens [on|off]", "show the last answer's tokens with their probabilities"),
    ("/save [FILE]", "save the conversation as JSON"),
    ("/load FILE", "continue a saved conversation, with its settings"),
    ("/exit", "exit (also /bye, Ctrl-D)"),
    (BLOCK, "begins and ends a multi-line message; Alt-Enter inserts a line break"),
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
    "retry": _regen,
    "edit": _edit,
    "file": _file,
    "model": _model,
    "tokens": _tokens,
    "save": _save,
    "load": _load,
    "exit": _exit,
    "bye": _exit,
    "quit": _exit,
}
COMMAND_NAMES = tuple("/" + name for name in _COMMANDS)
