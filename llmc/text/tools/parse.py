"""An answer's text -> its content and its tool calls, incrementally, according to a ToolFormat.

The text is read once. Only the start of what turns out not to be a call is read again, and that is
at most MAX_HEAD characters.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.text.partial import partial_length
from llmc.text.tools.arguments import decoded, from_literal, from_text
from llmc.text.tools.reader import Reader, Steps
from llmc.text.tools.tool_format import ToolFormat, first_word

MAX_HEAD = 1024
_NAME = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(slots=True)
class CallDelta:
    """A delta of one call: the first has the id and the name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """The parts found in new text."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser:
    """Reads one answer. With `streams`, arguments are emitted as they arrive; otherwise only whole
    calls are, and a malformed call stays content. Both emit the beginning of a call that was cut.

    `tools`: the parameter schema of each function that can be called, by name. Without `parallel`
    there is at most one call, and anything after it is dropped.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        streams: bool,
        parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        self._form = form
        self._tools = tools
        self._streams = streams
        self._parallel = parallel
        self._in = Reader()
        self._out = Delta()
        self._space = ""  # white space of the content, emitted when more content follows
        self._was_cut = False
        self._is_emitted = False  # whether the current call was emitted, at least its name
        self._name = ""
        self._arguments = ""
        self._begun = ""  # the part of them that has been read
        self._steps = self._answer()

    def push(self, text: str) -> Delta:
        self._in.text += text
        return self._advance()

    def finish(self, *, was_cut: bool = False) -> Delta:
        """Flush at the end of the text. If it `was_cut`, it may end in the middle of a call."""
        self._in.closed, self._was_cut = True, was_cut
        return self._advance()

    def _advance(self) -> Delta:
        next(self._steps, None)
        out, self._out = self._out, Delta()
        return out

    # ---- content ----

    def _answer(self) -> Generator[None, None, None]:
        trigger = "" if self._form.is_anchored else self._form.trigger
        if not trigger:  # then calls can only be at the beginning
            yield from self._in.skip_space()
            self._emit_content(self._in.at)
            yield from self._section()
        while True:
            start = self._in.text.find(trigger) if trigger else -1
            if start >= 0:
                self._emit_content(start)
                yield from self._section()
                continue
            self._emit_content(len(self._in.text) - partial_length(trigger, self._in.text))
            if self._in.closed:
                if self._was_cut:
                    self._in.text = self._in.text[: -partial_length(trigger, self._in.text) or None]
                self._emit_content(len(self._in.text))
                if not self.num_calls:
                    self._out.content += self._space
                return
            yield

    def _emit_content(self, end: int) -> None:
        """Emit the text before `end` as content; trailing white space is held back."""
        text = self._space + self._in.text[:end]
        self._in.at = end
        self._in.drop()
        trimmed = text.rstrip()
        self._space = text[len(trimmed) :]
        if not self._is_over:
            self._out.content += trimmed

    @property
    def _is_over(self) -> bool:
        return not self._parallel and self.num_calls > 0

    # ---- calls ----

    def _section(self) -> Generator[None, None, None]:
        """Read calls, starting at the first one."""
        form = self._form
        begin = form.section_begin + form.call_begin
        while (yield from self._call(begin)):
            yield from self._in.skip(form.call_end)
            self._in.drop()
            begin = (form.between or "") + form.call_begin
            if form.between is None or not begin.strip():
                break
            if not (yield from self._in.comes(begin, read=False)):
                break
        else:
            return
        yield from self._in.skip(form.section_end)
        self._in.drop()

    def _call(self, begin: str) -> Steps:
        """Read one call; returns whether it was one. If not, its text is content."""
        self._is_emitted, self._name, self._arguments, self._begun = False, "", "", ""
        read = {"object": self._object, "named": self._named, "keyed": self._keyed}
        self._in.ran_out = False
        has_begun = yield from self._in.match(begin)
        is_whole = has_begun and (yield from read[self._form.kind]())
        if is_whole and isinstance(decoded(self._arguments), dict):
            if not self._is_emitted:
                self._emit(self._arguments)
            self.num_calls += 1
            self._space = ""
            self._in.drop()
            return True
        is_cut = self._was_cut and has_begun and self._in.ran_out
        if is_cut and self._begun and not self._is_emitted:
            self._emit(self._begun)
        if self._is_emitted:  # what was emitted can't be retracted
            self.num_calls += 1
            self._in.drop()
            return False
        if is_cut and begin.strip():
            self._in.drop()
            return False
        num_read = self._in.put_back()
        self._emit_content(
            num_read if num_read > MAX_HEAD else min(num_read, len(first_word(begin)) or 1)
        )
        return False

    def _object(self) -> Steps:
        form, text = self._form, self._in
        arguments = None
        if not (yield from text.match("{")):
            return False
        is_empty = yield from text.comes("}")
        while not is_empty:
            key = decoded((yield from text.value()))
            if not isinstance(key, str) or not (yield from text.match(":")):
                return False
            if key == form.arguments_key and arguments is None:
                arguments = yield from text.value(self._stream if self._name else None)
            else:
                value = decoded((yield from text.value()))
                if key == form.name_key and not self._is_known(value):
                    return False
            if (yield from text.comes("}")):
                break
            if not (yield from text.match(",")):
                return False
        if arguments is None or arguments == "null":
            arguments = "{}"
        elif arguments.startswith('"'):
            arguments = decoded(arguments)
        self._arguments = str(arguments)
        return bool(self._name)

    def _named(self) -> Steps:
        if not (yield from self._known_name()):
            return False
        yield from self._in.skip_space()
        if not self._in.text.startswith("{", self._in.at):
            return False
        self._arguments = yield from self._in.value(self._stream)
        return True

    def _keyed(self) -> Steps:
        form, text = self._form, self._in
        if not (yield from self._known_name()):
            return False
        properties = self._tools[self._name].get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        end = first_word(form.call_end) or first_word(form.section_end)
        parts: list[str] = []
        while not (yield from text.comes(end, read=False)):
            separator = form.value_sep if parts else ""
            if not (yield from text.match(separator + form.key_begin)):
                return False
            key = yield from text.until(form.key_end)
            value = None if key is None else (yield from self._keyed_value(schemas, key.strip()))
            if key is None or value is None:
                return False
            name = json.dumps(key.strip(), ensure_ascii=False)
            parts.append(f"{', ' if parts else '{'}{name}: {value}")
            self._stream(parts[-1])
        parts.append("}" if parts else "{}")
        self._stream(parts[-1])
        self._arguments = "".join(parts)
        return True

    def _keyed_value(
        self, schemas: Mapping[str, Any], key: str
    ) -> Generator[None, None, str | None]:
        form, text = self._form, self._in
        if form.values_are_json:
            if form.quote:
                value = from_literal((yield from text.quoted_value(form.quote)))
            else:
                value = from_literal((yield from text.value()))
            return value if (yield from text.match(form.value_end)) else None
        written = yield from text.until(form.value_end)
        if written is None:
            return None
        # White space that the template itself writes around a value is not part of the value.
        before = form.key_end[len(form.key_end.rstrip()) :]
        after = form.value_end[: len(form.value_end) - len(form.value_end.lstrip())]
        return from_text(written.removeprefix(before).removesuffix(after), schemas.get(key))

    def _known_name(self) -> Steps:
        yield from self._in.skip_space()
        name = yield from self._in.run(_NAME)
        return self._is_known(name) and (yield from self._in.match(self._form.middle))

    def _is_known(self, name: object) -> bool:
        if isinstance(name, str) and name in self._tools and not self._name:
            self._name = name
        return bool(self._name) and self._name == name

    # ---- deltas of a call ----

    def _stream(self, text: str) -> None:
        self._begun += text
        if self._streams:
            self._emit(text)

    def _emit(self, text: str) -> None:
        if self._is_over:
            return
        index, calls = self.num_calls, self._out.calls
        if not self._is_emitted:
            self._is_emitted, self._space = True, ""
            calls.append(CallDelta(index, id=f"call_{uuid.uuid4().hex[:24]}", name=self._name))
        if not calls or calls[-1].index != index or calls[-1].name is not None:
            calls.append(CallDelta(index))
        calls[-1].arguments += text
