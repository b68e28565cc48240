"""Messages -> prompt token ids, with the chat template that comes with the model.

The template runs in jinja2's immutable sandbox. Requests can't replace it, and their extra
variables can't replace the renderer's own arguments (RESERVED). If the text of a message spells a
control token, it is encoded as plain text (if transformers supports that), so a user can't forge a
turn.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from llmc.errors import InvalidRequestError
from llmc.text.learn_reasoning import KEYS, learn_reasoning
from llmc.text.reasoning import ReasoningFormat
from llmc.text.template import plain
from llmc.text.template_file import RESERVED
from llmc.text.tokenizer import Tokenizer, check_text
from llmc.text.tools.generic import GENERIC, as_plain_turns
from llmc.text.tools.history import with_arguments
from llmc.text.tools.learn import learn_format
from llmc.text.tools.tool_format import ToolFormat

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Document = Mapping[str, str]  # such as {"title": ..., "text": ...}

IMAGE_PART = {"type": "image"}  # a part of a message, as templates know it
# Errors raised by a template's arithmetic, lookups, filters and macros. SyntaxError: Python can't
# compile a template with too many nested blocks.
_TEMPLATE_FAULTS = (
    TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
    MemoryError, SyntaxError,
)  # fmt: skip


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    documents: Sequence[Document] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the conversation, from which the next turn can be generated."""
    conversation, extra = _conversation(
        tokenizer,
        messages,
        tools,
        documents,
        add_generation_prompt,
        continue_final_message,
        template_kwargs,
    )
    given = [conversation, extra["tools"], extra["documents"]]
    if _spells_control_token(tokenizer, given) and can_sanitize(tokenizer.hf):
        # Transformers marks the text while rendering, so it must tokenize too.
        with tokenizer.isolated() as hf, _as_request_errors():
            ids = hf.apply_chat_template(
                conversation,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
                **extra,
            )
        return [int(i) for i in ids]
    text = _render(tokenizer, conversation, **extra)
    return tokenizer.encode(text, add_special_tokens=False)  # the template wrote them


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    documents: Sequence[Document] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation with {"type": "image"} parts, with special tokens. The template
    writes a placeholder for each image."""
    conversation, extra = _conversation(
        tokenizer,
        messages,
        tools,
        documents,
        add_generation_prompt,
        continue_final_message,
        template_kwargs,
    )
    if _spells_control_token(tokenizer, [conversation, extra["tools"], extra["documents"]]):
        raise InvalidRequestError(
            "a message spells a control token of the model, which can't be distinguished from a "
            "real one if there are images; leave it out",
            param="messages",
        )
    return _render(tokenizer, conversation, **extra)


def _conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    documents: Sequence[Document] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation in the form that the template reads, and the template's other variables."""
    template = _template(tokenizer, tools)
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message needs add_generation_prompt=false: the last message is "
            "either continued or answered",
            param="continue_final_message",
        )
    parts = _reads_parts_alone(tokenizer, template)
    conversation = [_flat(index, message, parts) for index, message in enumerate(messages)]
    if "developer" not in template:
        # OpenAI's newer name; a template without it drops or misreads such a message
        for message in conversation:
            message["role"] = {"developer": "system"}.get(message["role"], message["role"])
    if any("tool_calls" in message for message in conversation):
        calls = tool_format(tokenizer)
        as_text = calls is not None and calls.arguments_as_text
        conversation = [
            with_arguments(f"messages[{index}]", message, as_text=as_text)
            for index, message in enumerate(conversation)
        ]
    if any(key in message for message in conversation for key in KEYS):
        form = reasoning_format(tokenizer)
        conversation = [
            _with_reasoning(f"messages[{index}]", message, form.key if form is not None else None)
            for index, message in enumerate(conversation)
        ]
    if tools:
        check_tools(tokenizer, tools)
    if _needs_plain_turns(conversation, tools) and tool_format(tokenizer) is GENERIC:
        takes_system = _takes_system(tokenizer, _template(tokenizer, None))
        conversation = as_plain_turns(conversation, tools or (), takes_system=takes_system)
        tools = None
    if not conversation:
        raise InvalidRequestError("messages must not be empty", param="messages")
    extra = {**tokenizer.template_defaults, **(template_kwargs or {})}
    if taken := sorted(RESERVED & extra.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {', '.join(taken)}", param="chat_template_kwargs"
        )
    extra["add_generation_prompt"] = add_generation_prompt
    extra["continue_final_message"] = continue_final_message
    extra["tools"] = list(tools) if tools else None
    extra["documents"] = _documents(tokenizer, template, documents) if documents else None
    return plain(conversation), plain(extra)


def reads_documents(tokenizer: Tokenizer) -> bool:
    """Whether the chat template has a place for documents."""
    return _reads_documents(tokenizer.chat_template or "")


def _reads_documents(template: str) -> bool:
    return "documents" in template


def _documents(
    tokenizer: Tokenizer, template: str, documents: Sequence[Document]
) -> list[Document]:
    if not _reads_documents(template):
        raise InvalidRequestError(
            "the model's chat template has no place for documents; send their text in a message, "
            "or give another template with --chat-template",
            param="documents",
            code="unsupported_parameter",
        )
    for index, document in enumerate(documents):
        for name, text in document.items():
            check_text(name, f"documents[{index}]")
            check_text(text, f"documents[{index}].{name}")
            if _spells_control_token(tokenizer, name):  # only values are encoded as plain text
                raise InvalidRequestError(
                    f"documents[{index}] has a field named {name!r:.80}, which spells a control "
                    "token of the model; rename it",
                    param=f"documents[{index}]",
                )
    return list(documents)


def _template(tokenizer: Tokenizer, tools: Sequence[Tool] | None) -> str:
    """The chat template for these tools. InvalidRequestError if the model has none."""
    template = tokenizer.template_for(tools=bool(tools))
    if template is not None:
        return template
    reason = "no chat template; give one with --chat-template FILE, or use completions"
    if names := tokenizer.named_templates:
        only = "only for tools" if "tool_use" in names else "none of them the default"
        reason = (
            f"chat templates named {', '.join(names)}, {only}; give the right one with "
            "--chat-template FILE"
        )
    raise InvalidRequestError(f"this model has {reason}", param="messages", code="no_chat_template")


def _render(tokenizer: Tokenizer, conversation: list[dict[str, Any]], **options: Any) -> str:
    with _as_request_errors():
        return tokenizer.render(conversation, **options)


@contextlib.contextmanager
def _as_request_errors() -> Iterator[None]:
    """Turn a template's errors into InvalidRequestError: they are about the messages.

    Templates raise errors themselves (raise_exception), use undefined names, exceed the sandbox's
    limits, or fail to compute with the values that they get.
    """
    try:
        yield
    except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as exc:
        raise InvalidRequestError(
            "the model's chat template refused the messages: "
            f"{str(exc)[:300] or type(exc).__name__}",
            param="messages",
            code="chat_template_error",
        ) from exc


def check_tools(tokenizer: Tokenizer, tools: Sequence[Tool]) -> ToolFormat:
    """The tool call format. InvalidRequestError if these tools can't be rendered."""
    form = tool_format(tokenizer)
    if form is None:
        raise InvalidRequestError(
            "this model has no chat template, so it can't use tools; leave them out",
            param="tools",
            code="no_chat_template",
        )
    try:
        text = json.dumps([dict(tool) for tool in tools], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequestError(
            f"tools must be a list of JSON objects: {str(exc)[:200]}", param="tools"
        ) from exc
    check_text(text, "tools")
    if form is GENERIC:  # llmc renders these itself; chat templates have their own rules
        for index, tool in enumerate(tools):
            if not isinstance(dict(tool).get("function"), Mapping):
                raise InvalidRequestError(
                    f"tools[{index}] has no function; a tool is "
                    '{"type": "function", "function": {"name": ..., "parameters": ...}}',
                    param="tools",
                )
    return form


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """How the model writes tool calls: the user's format, otherwise the one inferred once from the
    chat template, or GENERIC if that has no readable one. None without a template."""
    template = tokenizer.template_for(tools=True)
    if template is None:
        return None
    return tokenizer.given_tool_format or _learned(tokenizer, template)


@functools.lru_cache(maxsize=8)
def _learned(tokenizer: Tokenizer, template: str) -> ToolFormat:
    parts = _reads_parts_alone(tokenizer, template)

    def render(messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str | None:
        flat = [_flat(index, message, parts) for index, message in enumerate(messages)]
        try:
            return _render(tokenizer, flat, tools=list(tools), add_generation_prompt=prompt)
        except InvalidRequestError:
            return None

    return learn_format(render, tokenizer.special_texts) or GENERIC


def _needs_plain_turns(messages: Sequence[Message], tools: Sequence[Tool] | None) -> bool:
    """Whether there are tools, calls or results, which a template without tools can't render."""
    return bool(tools) or any("tool_calls" in m or m.get("role") == "tool" for m in messages)


def reasoning_format(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """How the model marks its reasoning, inferred once; None if its template has no marks."""
    template = tokenizer.chat_template
    return None if template is None else _learned_reasoning(tokenizer, template)


@functools.lru_cache(maxsize=8)
def _learned_reasoning(tokenizer: Tokenizer, template: str) -> ReasoningFormat | None:
    parts = _reads_parts_alone(tokenizer, template)

    def render(messages: Sequence[Message], prompt: bool, thinking: bool | None) -> str | None:
        flat = [_flat(index, message, parts) for index, message in enumerate(messages)]
        extra = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return _render(tokenizer, flat, add_generation_prompt=prompt, **extra)
        except InvalidRequestError:
            return None

    return learn_reasoning(render, template, tokenizer.added_tokens)


def _with_reasoning(where: str, message: dict[str, Any], key: str | None) -> dict[str, Any]:
    """The message with its reasoning in the field `key` that the template reads; None drops it."""
    given = {name: message[name] for name in KEYS if name in message}
    if not given:
        return message
    for name, text in given.items():
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{where}.{name} must be text, got {text!r:.80}", param=f"{where}.{name}"
            )
        check_text(text, f"{where}.{name}")
    rest = {name: value for name, value in message.items() if name not in KEYS}
    text = next(filter(None, given.values()), "")
    return {**rest, key: text} if key is not None and text else rest


@functools.lru_cache(maxsize=8)
def _takes_system(tokenizer: Tokenizer, template: str) -> bool:
    """Whether the template renders system messages, determined by rendering one."""
    word, parts = "wordofaprobe", _reads_parts_alone(tokenizer, template)
    messages = [{"role": "system", "content": word}, {"role": "user", "content": "a"}]
    flat = [_flat(index, message, parts) for index, message in enumerate(messages)]
    try:
        text = _render(tokenizer, flat, chat_template=template)
    except InvalidRequestError:
        return False
    return word in text


@functools.lru_cache(maxsize=8)
def _reads_parts_alone(tokenizer: Tokenizer, template: str) -> bool:
    """Whether content has to be a list of parts: the template renders nothing of a string.

    Templates of multimodal models may loop over the parts. Determined by rendering both forms.
    """
    word = "wordofaprobe"

    def writes(content: Any) -> bool:
        message = {"role": "user", "content": content}
        try:
            text = _render(tokenizer, [message], chat_template=template)
        except InvalidRequestError:
            return False
        return word in text

    return not writes(word) and writes([{"type": "text", "text": word}])


def _flat(index: int, message: Message, parts: bool) -> dict[str, Any]:
    """The message with its text in one string, or as `parts` if the template expects those."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object, got {message!r:.80}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role.isidentifier():
        raise InvalidRequestError(
            f"{where}.role must be a name such as user or assistant, got {role!r:.80}",
            param=f"{where}.role",
        )
    # Null, or no calls, means absent; templates test whether the key exists.
    flat = {
        key: value
        for key, value in message.items()
        if key == "content" or not (value is None or (key == "tool_calls" and value == []))
    }
    content = message.get("content")
    if content is None and role == "assistant" and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if content is None:
        if "tool_calls" in flat or role == "assistant":
            flat["content"] = [] if parts else ""
        return flat
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list | tuple) and IMAGE_PART in content:
        kept = [
            part
            if part == IMAGE_PART
            else {"type": "text", "text": _part(f"{where}.content[{i}]", part)}
            for i, part in enumerate(content)
        ]
        check_text("".join(part.get("text", "") for part in kept), f"{where}.content")
        return {**flat, "content": kept}
    elif isinstance(content, list | tuple):
        refuses = role == "assistant"
        texts = [_part(f"{where}.content[{i}]", part, refuses) for i, part in enumerate(content)]
    else:
        raise InvalidRequestError(
            f"{where}.content must be text, got {content!r:.80}", param=f"{where}.content"
        )
    for text in texts:
        check_text(text, f"{where}.content")
    if parts:
        flat["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        flat["content"] = "\n".join(texts)
    return flat


def _part(where: str, part: Any, refuses: bool = False) -> str:
    """The text of a part. `refuses`: it can be a refusal, as those of the assistant's answers."""
    kind = part.get("type") if isinstance(part, Mapping) else part
    if isinstance(part, Mapping) and (kind == "text" or (refuses and kind == "refusal")):
        text = part.get(kind)
        if isinstance(text, str):
            return text
        raise InvalidRequestError(f"{where}.{kind} must be text, got {text!r:.80}", param=where)
    raise InvalidRequestError(
        f"{where} has type {kind!r:.80}; this model takes text parts only", param=where
    )


def _spells_control_token(tokenizer: Tokenizer, given: Any) -> bool:
    return any(special in text for text in _texts(given) for special in tokenizer.special_texts)


def _texts(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for value in given.values():
            yield from _texts(value)
    elif isinstance(given, list | tuple):
        for value in given:
            yield from _texts(value)


def can_sanitize(hf: Any) -> bool:
    """Whether transformers can encode such text as plain text; older versions can't."""
    return "sanitize_control_tokens" in inspect.signature(hf.apply_chat_template).parameters
