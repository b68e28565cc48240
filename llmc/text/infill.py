"""Prompts for text in the middle: what comes before and after it, between a model's own marks.

A model that was trained for this has tokens for it, which its tokenizer lists among the added ones.
Their names tell them apart, and the order that goes with them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.errors import InvalidRequestError
from llmc.text.tokenizer import Tokenizer, check_text


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillMarks:
    """Ids of the tokens before the text's beginning, before its end, and before the answer.

    Without `middle` the end of the text comes first, and the answer follows on its beginning.
    `ends` may not stand in an answer: it is over there.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]


# Names of the three, without case and signs. The last kind puts the end of the text first.
_KINDS = (
    ("fim prefix", "fim suffix", "fim middle"),
    ("fim begin", "fim hole", "fim end"),
    ("pre", "suf", "mid"),
    ("prefix", "suffix", ""),
)
_ENDS = ("fim pad", "eot", "middle", "file sep", "file separator")
_NO_LETTERS = re.compile(r"[^a-z]+")


def find_marks(added: Mapping[str, int]) -> InfillMarks | None:
    """The marks among a tokenizer's added tokens; None where the model has none."""
    found: dict[str, int] = {}
    for text, token in added.items():
        if not text[:1].isalpha():  # a mark is written in brackets
            found.setdefault(_NO_LETTERS.sub(" ", text.lower()).strip(), token)
    for prefix, suffix, middle in _KINDS:
        if prefix in found and suffix in found and (not middle or middle in found):
            marks = {found[name] for name in (prefix, suffix, middle) if name}
            ends = {found[name] for name in _ENDS if name in found}
            return InfillMarks(
                prefix=found[prefix],
                suffix=found[suffix],
                middle=found[middle] if middle else None,
                ends=frozenset(marks | ends),
            )
    return None


@functools.lru_cache(maxsize=4)  # one tokenizer lives as long as its engine
def _marks_of(tokenizer: Tokenizer) -> InfillMarks | None:
    return find_marks(tokenizer.added_tokens)


def has_marks(tokenizer: Tokenizer) -> bool:
    return _marks_of(tokenizer) is not None


def need_marks(tokenizer: Tokenizer, name: str) -> InfillMarks:
    """Raises InvalidRequestError for a model without marks; `name` is the model's."""
    marks = _marks_of(tokenizer)
    if marks is None:
        raise InvalidRequestError(
            f"{name} has no tokens for text in the middle (such as <|fim_prefix|>), so suffix "
            "can't be served; leave it out, or ask a chat model in words",
            param="suffix",
            code="unsupported_parameter",
        )
    return marks


def infill_prompt(
    tokenizer: Tokenizer,
    marks: InfillMarks,
    before: str,
    after: str,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Token ids after which the model writes what comes between the texts."""
    check_text(before, "prompt")
    check_text(after, "suffix")
    start = (
        tokenizer.encode("") if add_special_tokens else []
    )  # a BOS token, where the tokenizer begins texts with one
    first = [marks.prefix, *tokenizer.encode(before, add_special_tokens=False)]
    last = [marks.suffix, *tokenizer.encode(after, add_special_tokens=False)]
    start = start if start == [tokenizer.bos_token_id] else []
    if marks.middle is None:
        return [*start, *last, *first]
    return [*start, *first, *last, marks.middle]
