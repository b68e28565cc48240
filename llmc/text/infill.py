"""Fill-in-the-middle prompts: the text before and after the gap, between the model's own tokens.

A model trained for this has special tokens for it among its tokenizer's added tokens. Their names
identify them, and the order in which they are used.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.errors import InvalidRequestError
from llmc.text.tokenizer import Tokenizer, check_text


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillMarks:
    """The ids of the tokens before the prefix, before the suffix, and before the answer.

    Without `middle`, the suffix comes first and the answer follows the prefix. The tokens `ends`
    end the answer. `repository` comes before the name of a repository and `file` before that of a
    file, in a prompt of several files (https://arxiv.org/abs/2409.12186, section 3.2).
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    repository: int | None = None
    file: int | None = None


# Names of the three, in lower case and letters only. The last kind puts the suffix first.
_KINDS = (
    ("fim prefix", "fim suffix", "fim middle"),
    ("fim begin", "fim hole", "fim end"),
    ("pre", "suf", "mid"),
    ("prefix", "suffix", ""),
)
_ENDS = ("fim pad", "eot", "middle", "file sep", "file separator")
_REPOSITORIES = ("repo name", "reponame")
_FILES = ("file sep", "file separator", "filename")
_NO_LETTERS = re.compile(r"[^a-z]+")


def find_marks(added: Mapping[str, int]) -> InfillMarks | None:
    """The fill-in-the-middle tokens among a tokenizer's added tokens; None if it has none."""
    found: dict[str, int] = {}
    for text, token in added.items():
        if not text[:1].isalpha():  # such tokens are written in brackets
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
                repository=next((found[name] for name in _REPOSITORIES if name in found), None),
                file=next((found[name] for name in _FILES if name in found), None),
            )
    return None


@functools.lru_cache(maxsize=4)  # one tokenizer lives as long as its engine
def _marks_of(tokenizer: Tokenizer) -> InfillMarks | None:
    return find_marks(tokenizer.added_tokens)


def has_infill_tokens(tokenizer: Tokenizer) -> bool:
    return _marks_of(tokenizer) is not None


def need_infill_tokens(tokenizer: Tokenizer, name: str) -> InfillMarks:
    """The tokens of a model called `name`; raises InvalidRequestError if it has none."""
    marks = _marks_of(tokenizer)
    if marks is None:
        raise InvalidRequestError(
            f"{name} has no fill-in-the-middle tokens (such as <|fim_prefix|>), so suffix "
            "is not supported; leave it out, or instruct a chat model in words",
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
    extra: Sequence[tuple[str, str]] = (),
    beginning: str = "",
    most: int | None = None,
) -> list[int]:
    """The token ids of a prompt to which the model responds with the text in between.

    `extra`: names and texts of other files, which precede it. `beginning`: how the text in between
    begins. `most`: the maximum number of tokens, beyond which the beginning of `extra` is cut off.
    """
    check_text(before, "prompt")
    check_text(after, "suffix")
    check_text(beginning, "beginning")
    start = (
        tokenizer.encode("") if add_special_tokens else []
    )  # a BOS token, if the tokenizer adds one
    first = [marks.prefix, *tokenizer.encode(before, add_special_tokens=False)]
    last = [marks.suffix, *tokenizer.encode(after, add_special_tokens=False)]
    start = start if start == [tokenizer.bos_token_id] else []
    begun = tokenizer.encode(beginning, add_special_tokens=False)
    if marks.middle is None:
        asked = [*last, *first, *begun]
    else:
        asked = [*first, *last, marks.middle, *begun]
    seen = _other_files(tokenizer, marks, extra)
    if most is not None:
        seen = seen[max(0, len(seen) + len(start) + len(asked) - most) :]
    return [*start, *seen, *asked]


def _other_files(
    tokenizer: Tokenizer, marks: InfillMarks, files: Sequence[tuple[str, str]]
) -> list[int]:
    """The token ids of other files, and of the mark that begins the one to fill in."""
    if not files:
        return []
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    for named in files:
        for text in named:
            check_text(text, "extra")
    if marks.repository is None or marks.file is None:
        return [token for _, text in files for token in encode(text)]
    made = [marks.repository, *encode("repository\n")]
    for name, text in files:
        made += [marks.file, *encode(f"{name}\n{text}\n")]
    return [*made, marks.file, *encode("file\n")]
