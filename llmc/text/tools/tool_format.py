"""`ToolFormat`: how one model writes calls of tools. Learned by learn.py, or given by the user
(given_format.py); parse.py reads answers by it.

section_begin (call_begin CALL call_end) between (call_begin CALL call_end) ... section_end

CALL "object"   {"name": ..., "arguments": {...}}                            keys may differ
     "named"    NAME middle {...}
     "keyed"    NAME middle (key_begin KEY key_end VALUE value_end) value_sep (...) ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ANY_ID = "\0"  # in a literal: where a call's id stands, whatever it is


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Literals are as the template writes them; who reads an answer ignores their white space."""

    kind: Literal["object", "named", "keyed"]
    section_begin: str
    call_begin: str
    call_end: str
    between: str | None  # None: the template knows one call a message alone
    section_end: str
    name_key: str = ""  # object
    arguments_key: str = ""  # object
    middle: str = ""  # named and keyed
    key_begin: str = ""  # keyed, as all below
    key_end: str = ""
    value_end: str = ""
    value_sep: str = ""
    values_are_json: bool = False  # or Python's literals; else texts stand as they are
    quote: str = ""  # around texts, where it is none of JSON's or Python's
    arguments_as_text: bool = False  # what the template takes for the arguments of a call

    @property
    def trigger(self) -> str:
        """What an answer that calls has first, up to white space; "" when that is the call."""
        return first_word(self.section_begin + self.call_begin)

    @property
    def is_anchored(self) -> bool:
        """Whether calls count only at the beginning of the answer, as their trigger is no word."""
        return not any(letter.isalpha() for letter in self.trigger)

    def marker_tokens(self, special_texts: Sequence[str]) -> tuple[str, ...]:
        """Those of the special tokens that stand in the literals."""
        whole = "\n".join(
            (self.section_begin, self.call_begin, self.call_end, self.between or "")
            + (self.section_end, self.middle, self.key_begin, self.key_end)
            + (self.value_end, self.value_sep, self.quote)
        )
        return tuple(text for text in special_texts if text in whole)


def first_word(literal: str) -> str:
    """A literal up to white space or an id."""
    words = literal.split(ANY_ID)[0].split()
    return words[0] if words else ""
