"""Messages -> prompt token ids, by the chat template that came with the model.

The template runs in transformers' immutable jinja2 sandbox. Requests can't bring their own, and
their extra variables can't replace what the renderer itself is told (RESERVED). Text of a message
that spells a control token is encoded as plain text where transformers can do that, so a user
can't forge a turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from llmc.errors import InvalidRequestError
from llmc.text.tokenizer import Tokenizer, check_text

Message = Mapping[str, Any]

# What chat_template_kwargs may not set.
RESERVED = frozenset(
    (
        *("conversation", "messages", "chat_template", "tools", "documents", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens", "bos_token", "eos_token", "unk_token"),
        *("pad_token", "raise_exception", "strftime_now"),
    )
)

# What a template's own arithmetic, lookups and macros raise.
_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the conversation, ready to generate the next turn from."""
    if tokenizer.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template; use completions with a prompt instead",
            param="messages",
            code="no_chat_template",
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message needs add_generation_prompt=false: the last message is "
            "either continued or answered",
            param="continue_final_message",
        )
    conversation = [_flat(index, message) for index, message in enumerate(messages)]
    if not conversation:
        raise InvalidRequestError("messages must not be empty", param="messages")
    extra = dict(template_kwargs or {})
    if taken := sorted(RESERVED & extra.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {', '.join(taken)}", param="chat_template_kwargs"
        )
    extra["add_generation_prompt"] = add_generation_prompt
    extra["continue_final_message"] = continue_final_message
    if _spells_control_token(tokenizer, conversation) and can_sanitize(tokenizer.hf):
        # Transformers marks the text while rendering, so it must tokenize too.
        with tokenizer.isolated() as hf:
            ids = _apply(hf, conversation, tokenize=True, sanitize_control_tokens=True, **extra)
        return [int(i) for i in ids]
    text = _apply(tokenizer.hf, conversation, tokenize=False, **extra)
    return tokenizer.encode(text, add_special_tokens=False)  # the template wrote them


def _apply(hf: Any, conversation: list[dict[str, Any]], **options: Any) -> Any:
    try:
        return hf.apply_chat_template(conversation, return_dict=False, **options)
    # What a template refuses (its own raise_exception, an undefined name, a bad type, a range
    # beyond the sandbox's limit) or trips over (it computes with what it is given) is about these
    # messages, not about the server.
    except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as exc:
        raise InvalidRequestError(
            f"the model's chat template refused the messages: {str(exc)[:300]}",
            param="messages",
            code="chat_template_error",
        ) from exc


def _flat(index: int, message: Message) -> dict[str, Any]:
    """The message with text parts joined: templates of text models expect a string."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object, got {message!r:.80}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role.isidentifier():
        raise InvalidRequestError(
            f"{where}.role must be a name such as user or assistant, got {role!r:.80}",
            param=f"{where}.role",
        )
    flat = dict(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
        flat["content"] = content
    if content is not None and not isinstance(content, str):
        raise InvalidRequestError(
            f"{where}.content must be text, got {content!r:.80}", param=f"{where}.content"
        )
    check_text(content or "", f"{where}.content")
    return flat


def _part(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise InvalidRequestError(
        f"{where} has type {kind!r:.80}; this model takes text parts only", param=where
    )


def _spells_control_token(tokenizer: Tokenizer, conversation: list[dict[str, Any]]) -> bool:
    texts = [value for message in conversation for value in message.values()]
    return any(
        special in text
        for text in texts
        if isinstance(text, str)
        for special in tokenizer.special_texts
    )


def can_sanitize(hf: Any) -> bool:
    """Newer transformers only; before, such text is encoded as the control token it spells."""
    return "sanitize_control_tokens" in inspect.signature(hf.apply_chat_template).parameters
