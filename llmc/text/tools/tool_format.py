"""`ToolFormat`: how one model writes tool calls. Learned by learn.py, or given by the user
(given_format.py); used by parse.py to read answers.

section_begin (call_begin CALL call_end) between (call_begin CALL call_end) ... section_end

CALL "object"   {"name": ..., "arguments": {...}}                            keys can differ
     "named"    NAME middle {...}
     "keyed"    NAME middle (key_begin KEY key_end VALUE value_end) value_sep (...) ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ANY_ID = "\0"  # in a literal: a placeholder for any call id


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Literals are as the template writes them; their white space is ignored in answers."""

    kind: Literal["object", "named", "keyed"]
    section_begin: str
    call_begin: str
    call_end: str
    between: str | None  # None: the template supports only one call per message
    section_end: str
    name_key: str = ""  # object
    arguments_key: str = ""  # object
    middle: str = ""  # named and keyed
    key_begin: str = ""  # keyed, as all below
    key_end: str = ""
    value_end: str = ""
    value_sep: str = ""
    values_are_json: bool = False  # or Python literals; otherwise strings are unquoted
    quote: str = ""  # around strings, if it differs from those of JSON and Python
    arguments_as_text: bool = False  # whether the template expects a call's arguments as text

    @property
    def trigger(self) -> str:
        """The start of an answer that calls, up to white space; "" if it starts with the call."""
        return first_word(self.section_begin + self.call_begin)

    @property
    def is_anchored(self) -> bool:
        """Whether only calls at the start of an answer count, because the trigger is not a word."""
        return not any(letter.isalpha() for letter in self.trigger)

    def marker_tokens(self, special_texts: Sequence[str]) -> tuple[str, ...]:
        """The special tokens that occur in the literals."""
        whole = "\n".join(
            (self.section_begin, self.call_begin, self.call_end, self.between or "")
            + (self.section_end, self.middle, self.key_begin, self.key_end)
            + (self.value_end, self.value_sep, self.quote)
        )
        return tuple(text for text in special_texts if text in whole)


def first_word(literal: str) -> str:
    """The first word of a literal, up to white space or an id."""
    words = literal.split(ANY_ID)[0].split()
    return words[0] if words else ""
