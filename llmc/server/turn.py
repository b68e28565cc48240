"""The chat call behind every protocol: checks and renders a ChatBody, and splits the answer.

protocol's body -> ChatBody -> prepare_turn -> Turn -> GenerationResponse
answer's text -> Turn.reader() or Turn.read() -> reasoning, content, calls -> protocol's answer
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import InvalidRequestError
from llmc.frontend.completion import CompletionDelta
from llmc.frontend.inputs import Input
from llmc.outputs import CompletionOutput
from llmc.sampling_params import SamplingParams
from llmc.server.adapters import adapter_named
from llmc.server.models import model_name
from llmc.server.protocol import ChatBody, TemplateBody
from llmc.server.respond import Call, GenerationResponse, preparing
from llmc.server.sampling import cache_salt, priority, sampling_params
from llmc.server.structured import grammar_field, grammar_from
from llmc.server.tools import ToolUse, tool_use
from llmc.text.reasoning import ReasoningParser
from llmc.text.tools.arguments import decoded
from llmc.text.tools.parse import Delta, ToolParser

ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_LACK_CONTENT = ("assistant",)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A function call; `arguments` is a JSON object, or its beginning if max_tokens cut it."""

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        return isinstance(decoded(self.arguments), dict)

    def fields(self) -> dict[str, Any]:
        """The call as a chat message's JSON."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The parts of a complete answer."""

    reasoning: str
    content: str
    calls: Sequence[FunctionCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call that passed all checks: the input, and how to parse the answer."""

    llm: AsyncLLM
    model: str  # the name to respond with
    source: Input
    use: ToolUse | None = None  # of tools
    priority: int = 0

    @property
    def splits(self) -> bool:
        """Whether an answer can have other parts besides its content."""
        return self.use is not None or self.source.reasoning is not None

    def with_most(self, max_tokens: int) -> Turn:
        """The turn with at most this many tokens, of those that fit."""
        return dataclasses.replace(self, source=self.source.with_most(max_tokens))

    def reader(self, *, streams: bool = True) -> AnswerReader:
        return AnswerReader(self, streams=streams)

    def read(self, completion: CompletionOutput) -> Answer:
        reader = self.reader(streams=False)
        was_cut = completion.finish_reason == "length"
        deltas = (reader.push(completion.text), reader.finish(was_cut=was_cut))
        calls: dict[int, FunctionCall] = {}  # by index
        for call in (call for delta in deltas for call in delta.calls):
            if call.name is not None:
                assert call.id is not None, "it comes with the name"
                calls[call.index] = FunctionCall(id=call.id, name=call.name, arguments="")
            known = calls[call.index]
            arguments = known.arguments + call.arguments
            calls[call.index] = dataclasses.replace(known, arguments=arguments)
        return Answer(
            reasoning="".join(delta.reasoning for delta in deltas),
            content="".join(delta.content for delta in deltas),
            calls=list(calls.values()),
        )

    def num_reasoning_tokens(self, stream: Stream) -> int:
        """Number of reasoning tokens so far, over all completions."""
        reasoning = self.source.reasoning
        if reasoning is None:
            return 0
        tokenizer = self.llm.inputs.need_tokenizer("messages")
        return sum(
            reasoning.num_tokens(one.token_ids, self.read(one).reasoning, tokenizer)
            for one in stream.requests[0].output().outputs
        )

    def respond(self, request: Request, call: Call) -> GenerationResponse:
        state = request.app.state
        return GenerationResponse(
            self.llm, call, state.settings, state.metrics, priority=self.priority
        )


class AnswerReader:
    """Splits the text of one answer, which arrives in pieces, into its parts."""

    def __init__(self, turn: Turn, *, streams: bool) -> None:
        reasoning, use = turn.source.reasoning, turn.use
        self._reasoning = ReasoningParser(reasoning) if reasoning is not None else None
        self._tools: ToolParser | None = use.parser(streams=streams) if use is not None else None

    @property
    def has_called(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def read(self, delta: CompletionDelta) -> Iterator[Delta]:
        """The parts in a completion's new text, and at its end the text that was held back."""
        yield self.push(delta.text)
        if delta.finish_reason is not None:
            yield self.finish(was_cut=delta.finish_reason == "length")

    def push(self, text: str) -> Delta:
        said = ""
        if self._reasoning is not None:
            said, text = self._reasoning.push(text)
        delta = Delta(content=text) if self._tools is None else self._tools.push(text)
        delta.reasoning = said
        return delta

    def finish(self, *, was_cut: bool = False) -> Delta:
        """Flush at the end of the answer. `was_cut`: it hit the token limit."""
        said, text = self._reasoning.finish() if self._reasoning is not None else ("", "")
        if self._tools is None:
            return Delta(content=text, reasoning=said)
        first, last = self._tools.push(text), self._tools.finish(was_cut=was_cut)
        calls = [*first.calls, *last.calls]
        return Delta(content=first.content + last.content, reasoning=said, calls=calls)


# The image URL of a content part, in its protocol's format; None if it is not an image.
ImageOf = Callable[[str, Any], str | None]


def text_parts(
    where: str, content: Any, kinds: Sequence[str], image_of: ImageOf | None = None
) -> str | list[dict[str, Any]]:
    """A message's text or parts in chat format. `kinds`: the protocol's types of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where} must be text or a list of parts, got {content!r:.80}", param=where
        )
    return [
        content_part(f"{where}[{index}]", part, kinds, image_of)
        for index, part in enumerate(content)
    ]


def apart(
    content: str | list[dict[str, Any]],
) -> tuple[str | list[dict[str, Any]], list[dict[str, Any]]]:
    """A tool's output without its images, and these: chats have them in the user's messages."""
    if isinstance(content, str):
        return content, []
    images = [part for part in content if part["type"] != "text"]
    return [part for part in content if part["type"] == "text"], images


def content_part(
    where: str, part: Any, kinds: Sequence[str], image_of: ImageOf | None = None
) -> dict[str, Any]:
    """One part of a message; parts other than text and images are rejected."""
    url = None if image_of is None else image_of(where, part)
    if url is not None:
        return {"type": "image_url", "image_url": {"url": url}}
    kind = part.get("type") if isinstance(part, dict) else part
    if kind not in kinds:
        raise InvalidRequestError(
            f"{where} has type {kind!r:.80}; this server accepts text ({', '.join(kinds)})"
            f"{', and images if the model does,' if image_of is not None else ' only'} there",
            param=where,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be text, got {text!r:.80}", param=where)
    return {"type": "text", "text": text}


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors about a ChatBody's field name the protocol's field that it came from."""
    try:
        yield
    except InvalidRequestError as exc:
        given = exc.param or ""
        for ours, theirs in names.items():
            if given == ours or given.startswith((f"{ours}.", f"{ours}[")):
                # as a word: other names may contain it
                text = re.sub(rf"\b{re.escape(ours)}\b", theirs, str(exc), count=1)
                param = theirs + given.removeprefix(ours)
                raise InvalidRequestError(text, param=param, code=exc.code) from exc
        raise


async def prepare_turn(request: Request, body: ChatBody, *, submits: bool = True) -> Turn:
    """Check a chat call and render its prompt. `submits`: it is then submitted.

    InvalidRequestError names the invalid field of `body`; ApiError 404 an unknown model.
    """
    llm: AsyncLLM = request.app.state.llm
    model = model_name(request, body.model)
    llm.inputs.need_generation()
    with preparing(request, submits=submits):
        source, use = await _prepared(llm, body)
    return Turn(
        llm=llm,
        model=model,
        source=source.salted(cache_salt(request, body)).with_adapter(adapter_named(request, model)),
        use=use,
        priority=priority(llm, body),
    )


async def _prepared(llm: AsyncLLM, body: ChatBody) -> tuple[Input, ToolUse | None]:
    sampling = sampling_params(
        body,
        llm.inputs,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=body.num_logprobs,
    )
    extra = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        extra.setdefault("enable_thinking", body.enable_thinking)
    if body.reasoning_effort is not None:
        extra["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":  # most templates only have a switch, under either name
        extra = {"enable_thinking": False, "thinking": False, **extra}
    use = await tool_use(llm, body, sampling.structured_outputs)
    if use is not None:
        sampling = dataclasses.replace(sampling, structured_outputs=use.grammar)
    given = {"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {}
    field = grammar_field(body) if use is None else "tools"
    with renamed_params(given), grammar_from(field):
        source = await prepare_messages(
            llm,
            body,
            sampling,
            extra,
            use.tools if use is not None else (),
            splits_reasoning=True,
            max_reasoning_tokens=body.thinking_token_budget,
        )
    if use is not None:
        source = use.applied(source, llm.inputs.need_tokenizer("tools"))
    return source, use


async def prepare_messages(
    llm: AsyncLLM,
    body: ChatBody | TemplateBody,
    sampling: SamplingParams,
    extra: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    splits_reasoning: bool = False,
    max_reasoning_tokens: int | None = None,
) -> Input:
    messages = list(body.messages or ())
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message, is_last=message is messages[-1])
    begins = any(message.get(name) for message in messages[-1:] for name in _BEGINNINGS)
    continues = body.continue_final_message or begins
    messages = [{k: v for k, v in m.items() if k not in _BEGINNINGS} for m in messages]
    try:
        return await llm.prepare.chat(
            messages,
            sampling,
            tools=tools,
            documents=body.documents,
            # A new turn can't begin inside the one that is continued, whatever was requested.
            add_generation_prompt=body.add_generation_prompt and not continues,
            continue_final_message=continues,
            template_kwargs=extra,
            splits_reasoning=splits_reasoning,
            max_reasoning_tokens=max_reasoning_tokens,
        )
    except InvalidRequestError as exc:
        if exc.param == "prompt":  # the rendered one, which is no field of the body
            raise InvalidRequestError(str(exc), param="messages", code=exc.code) from exc
        raise


# Of a last message that the answer continues: hosted services have one name or the other.
_BEGINNINGS = ("prefix", "partial")


def _check_message(where: str, message: Mapping[str, Any], *, is_last: bool) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}",
            param=f"{where}.role",
        )
    if message.get("content") is None and role not in MAY_LACK_CONTENT:
        raise InvalidRequestError(
            f"{where}.content is missing; a message of role {role} needs text",
            param=f"{where}.content",
        )
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise InvalidRequestError(
            f"{where}.tool_call_id must be the id of the call that this answers, "
            f"got {message.get('tool_call_id')!r:.80}",
            param=f"{where}.tool_call_id",
        )
    for name in _BEGINNINGS:
        value = message.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(
                f"{where}.{name} must be true or false, got {value!r:.80}", param=f"{where}.{name}"
            )
        if value and not (is_last and role == "assistant"):
            raise InvalidRequestError(
                f"{where}.{name} is for a last message of role assistant, which the answer "
                "continues",
                param=f"{where}.{name}",
            )
    if role != "assistant" and message.get("tool_calls") not in (None, []):
        raise InvalidRequestError(
            f"{where}.tool_calls is for messages of role assistant", param=f"{where}.tool_calls"
        )
