"""Arguments of `LLM`'s callers: one prompt or many, and an option for all of them or for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from llmc.errors import InvalidRequestError
from llmc.frontend.inputs import Prompt
from llmc.text.chat import Message

T = TypeVar("T")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt becomes a list of one. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, list | tuple):
        if prompts and isinstance(prompts[0], int | float):
            return [cast(Prompt, prompts)]
        return list(prompts)
    raise InvalidRequestError(
        f"prompts must be text, token ids, a dict or a list of these; got {prompts!r:.80}",
        param="prompt",
    )


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation becomes a list of one."""
    if isinstance(messages, list | tuple):
        if not messages or isinstance(messages[0], Mapping):
            return [cast(Sequence[Message], messages)]
        if all(isinstance(chat, list | tuple) for chat in messages):
            return [cast(Sequence[Message], chat) for chat in messages]
    raise InvalidRequestError(
        f"messages must be a list of messages, or a list of such lists; got {messages!r:.80}",
        param="messages",
    )


def for_each(param: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """`given` for each of `count` prompts. InvalidRequestError if a list has another length."""
    if not isinstance(given, list | tuple):
        return [cast(T, given)] * count  # its type is checked with each request
    if len(given) != count:
        raise InvalidRequestError(
            f"{len(given)} {param} for {count} prompts; give one, or one for each", param=param
        )
    return given
