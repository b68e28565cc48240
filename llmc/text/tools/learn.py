"""Learns the ToolFormat in which a chat template writes calls, or None if it writes none.

Renders conversations with made-up names, keys and values; the text around these is the format:

    content only    ... CONTENT end
    one call        ... CONTENT Z call Y end          Z: section_begin call_begin
    two calls       ... CONTENT Z call X call Y end   Y: call_end section_end
                                                      X: call_end between call_begin

The common suffix of X and Z begins a call, and the common prefix of X and Y ends it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.text.tools.tool_format import ANY_ID, ToolFormat, first_word

# (messages, tools, add_generation_prompt) -> text; None if the template rejects them.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str | None]

USER = "zuserz"
CONTENT = "\u017acontent\u017a"  # starts and ends unlike any marker
# Some templates accept only ids of nine characters.
IDS = ("zq1callid", "zq2callid")
NAMES = ("zfirstz", "zsecondz")
KEY_1, KEY_2 = "zkeyonez", "zkeytwoz"
TEXT, NUMBER = "zvaluez", 730915
ARGUMENTS = {KEY_1: TEXT, KEY_2: NUMBER}
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "zdescribedz",
            "parameters": {
                "type": "object",
                "properties": {
                    KEY_1: {"type": "string", "description": "zonez"},
                    KEY_2: {"type": "integer", "description": "ztwoz"},
                },
                "required": [KEY_1, KEY_2],
            },
        },
    }
    for name in NAMES
)
_WORDS = r"<[^<>]*>|\[[A-Z_/]+\]|\w+|\s|[^\w\s]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The position of a call in a text, its kind, and the literals inside it."""

    start: int
    end: int
    inside: Mapping[str, Any]


def learn_format(render: Render, special_texts: Sequence[str] = ()) -> ToolFormat | None:
    """The format; None for a template without tools or calls, or with calls in an unknown form."""
    question = [{"role": "user", "content": USER}]
    given, asked = render(question, TOOLS, False), render(question, TOOLS, True)
    if given is None or asked is None or any(name not in given for name in NAMES):
        return None
    turn = asked.removeprefix(given).strip()
    words = _splitter(special_texts)
    for as_text, content in itertools.product((False, True), (CONTENT, "")):
        found = _learn(render, words, as_text, content)
        if found is not None:
            # A call that is a separate turn does not start where the answer starts.
            is_turn = turn and turn in found.section_begin + found.call_begin
            return None if is_turn else found
    return None


def _splitter(special_texts: Sequence[str]) -> Callable[[str], list[str]]:
    special = "|".join(re.escape(text) for text in sorted(special_texts, key=len, reverse=True))
    return re.compile(f"{special}|{_WORDS}" if special else _WORDS).findall


def _learn(
    render: Render, words: Callable[[str], list[str]], as_text: bool, content: str
) -> ToolFormat | None:
    plain = render(_conversation(0, as_text, CONTENT), TOOLS, False)
    one = render(_conversation(1, as_text, content), TOOLS, False)
    if plain is None or one is None or CONTENT not in plain:
        return None
    tail = plain[plain.rindex(CONTENT) + len(CONTENT) :]
    head = _turn_start(plain, one)
    call = _find_call(one, head, NAMES[0])
    if call is None:
        return None
    before = words(one[head : call.start])  # Z
    after = words(one[call.end :])  # Y, with the end of the turn
    after = after[: len(after) - _common_end(after, words(tail))]
    literals = {
        "section_begin": "",
        "call_begin": "".join(before),
        "call_end": "".join(after),
        "between": None,
        "section_end": "",
    }
    two = render(_conversation(2, as_text, content), TOOLS, False)
    first = _find_call(two, head, NAMES[0]) if two is not None else None
    second = _find_call(two, first.end, NAMES[1]) if two is not None and first else None
    if two is not None and first is not None and second is not None:
        middle = words(two[first.end : second.start])  # X
        same = _common_end(middle, before)
        middle, begin = _cut(middle, len(middle) - same)
        ended = _common_start(middle, after)
        literals = {
            "section_begin": "".join(before[: len(before) - same]),
            "call_begin": "".join(begin),
            "call_end": "".join(after[:ended]),
            "between": "".join(middle[ended:]),
            "section_end": "".join(after[ended:]),
        }
    inside = dict(call.inside)
    made = {name: _with_any_id(text) for name, text in {**literals, **inside}.items()}
    found = ToolFormat(**made, arguments_as_text=as_text)
    return found if is_sound(found) else None


def _conversation(num_calls: int, as_text: bool, content: str) -> list[dict[str, Any]]:
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if num_calls:
        answer["tool_calls"] = [
            {
                "id": IDS[i],
                "type": "function",
                "function": {"name": NAMES[i], "arguments": arguments},
            }
            for i in range(num_calls)
        ]
    return [{"role": "user", "content": USER}, answer]


def _turn_start(plain: str, one: str) -> int:
    """Where the calls can start in the answer: after the content, if that is written."""
    at = one.rfind(CONTENT)
    if at >= 0:
        return at + len(CONTENT)
    same = 0
    while same < min(len(plain), len(one)) and plain[same] == one[same]:
        same += 1
    return same


def _find_call(text: str, start: int, name: str) -> _Call | None:
    at = text.find(name, start)
    if at < 0:
        return None
    return (
        _as_object(text, start, at, name) or _as_named(text, at, name) or _as_keyed(text, at, name)
    )


def _as_object(text: str, start: int, at: int, name: str) -> _Call | None:
    """The innermost object that has both the name and the arguments."""
    brace = text.rfind("{", start, at)
    while brace >= 0:
        value, end = _decode(text, brace)
        if isinstance(value, dict):
            name_key = next((key for key, one in value.items() if one == name), None)
            arguments = next((key for key, one in value.items() if _is_arguments(one)), None)
            if name_key is not None and arguments is not None:
                inside = {"kind": "object", "name_key": name_key, "arguments_key": arguments}
                return _Call(start=brace, end=end, inside=inside)
        brace = text.rfind("{", start, brace)
    return None


def _as_named(text: str, at: int, name: str) -> _Call | None:
    begin = at + len(name)
    brace = text.find("{", begin)
    while brace >= 0:
        value, end = _decode(text, brace)
        if value == ARGUMENTS:
            inside = {"kind": "named", "middle": text[begin:brace]}
            return _Call(start=at, end=end, inside=inside)
        brace = text.find("{", brace + 1)
    return None


def _as_keyed(text: str, at: int, name: str) -> _Call | None:
    """A call written key by key: a string, then a number, to detect whether strings are quoted."""
    pieces = []
    place = at + len(name)
    for sentinel in (KEY_1, TEXT, KEY_2, str(NUMBER)):
        found = text.find(sentinel, place)
        if found < 0:
            return None
        pieces.append(text[place:found])
        place = found + len(sentinel)
    opening, key_end, following, key_end_2 = pieces
    quote = key_end.removeprefix(key_end_2)
    if not (key_end.startswith(key_end_2) and following.startswith(quote)):
        return None
    key_end, following = key_end_2, following.removeprefix(quote)
    words = re.compile(_WORDS).findall
    first, second = words(opening), words(following)
    same = _common_end(first, second)
    # The end of a value is the text that follows both the first and the last one.
    gap = second[: len(second) - same]
    ended = _common_start(gap, words(text[place : place + len(following)]))
    value_end = "".join(gap[:ended])
    inside = {
        "kind": "keyed",
        "middle": "".join(first[: len(first) - same]),
        "key_begin": "".join(first[len(first) - same :]),
        "key_end": key_end,
        "value_end": value_end,
        "value_sep": "".join(gap[ended:]),
        "values_are_json": bool(quote),
        "quote": "" if quote in ("'", '"') else quote,
    }
    return _Call(start=at, end=place + len(value_end), inside=inside)


def _is_arguments(value: object) -> bool:
    if isinstance(value, str):
        value, _ = _decode(value, 0)
    return value == ARGUMENTS


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _common_start(first: Sequence[str], second: Sequence[str]) -> int:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


def _common_end(first: Sequence[str], second: Sequence[str]) -> int:
    return _common_start(first[::-1], second[::-1])


def _cut(words: list[str], at: int) -> tuple[list[str], list[str]]:
    return words[:at], words[at:]


def _with_any_id(text: Any) -> Any:
    for one in IDS if isinstance(text, str) else ():
        text = text.replace(one, ANY_ID)
    return text


def is_sound(found: ToolFormat) -> bool:
    """Whether answers can be parsed with the format: every part has a recognizable end."""
    literals = (found.section_begin, found.call_begin, found.call_end, found.between or "")
    inside = (found.middle, found.key_begin, found.key_end, found.value_end, found.value_sep)
    made_up = (USER, CONTENT, *NAMES, KEY_1, KEY_2, TEXT, str(NUMBER))
    if any(word in text for text in (*literals, *inside, found.section_end) for word in made_up):
        return False
    if found.kind == "object":
        return True
    if not found.trigger or found.middle[:1].isalnum():
        return False
    if found.kind == "keyed" and not first_word(found.call_end + found.section_end):
        return False
    if found.kind == "named":
        return bool(found.middle.strip())
    return bool(found.key_end.strip() and (found.values_are_json or found.value_end.strip()))
