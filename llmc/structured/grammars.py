"""Grammars: the matchers of one model's requests. Used by the engine and by the trial process."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import Literal

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from llmc.errors import InvalidRequestError, LlmcError
from llmc.structured.vocabulary import Vocabulary
from llmc.structured_outputs import StructuredOutputsParams

_MAX_KEPT = 64  # prototypes; a copy takes microseconds, a new one milliseconds

# Limits on the cost of a step and the size of a grammar: at most half of the library's defaults.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
)


_GBNF_RULE = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)

# White space in JSON: nothing, a space, or a newline with indentation. Without a bound, a small
# model may generate white space until it reaches max_tokens.
_WHITE_SPACE = r"(\n[ ]{0,16}|[ ])?"


class GrammarError(LlmcError):
    """A matcher failed. Its request must end, since it must never continue without a mask."""


def compile_grammar(spec: StructuredOutputsParams) -> str:
    """The grammar in the library's own format. InvalidRequestError if it can't be parsed."""
    try:
        if spec.kind in ("json", "json_object"):
            made = LLMatcher.grammar_from_json_schema(
                spec.text, defaults={"whitespace_pattern": _WHITE_SPACE}
            )
        else:
            made = str(llguidance.grammar_from(_format(spec), spec.text))
        return _after(spec.preamble, made) if spec.preamble else made
    except (ValueError, RecursionError) as error:
        raise _invalid(spec, str(error)) from error


def _format(spec: StructuredOutputsParams) -> Literal["gbnf", "lark", "regex", "choice"]:
    if spec.kind != "grammar":
        return "regex" if spec.kind == "regex" else "choice"
    return "gbnf" if _GBNF_RULE.search(spec.text) else "lark"


def _after(preamble: str, grammar: str) -> str:
    """Use a grammar, in the library's format or Lark, as the rule `@answer` of a preamble."""
    try:
        [answer] = json.loads(grammar)["grammars"]
    except ValueError:
        answer = {"lark_grammar": grammar}
    first = {"name": "preamble", "lark_grammar": preamble}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}]})


# Errors of the library that only its developers or its own options explain -> ours.
_PLAINLY = {
    "NoExtensionBias": "no finite text matches it: a rule (or `$ref`) leads only back to itself",
    "oneOf constraints are not supported": "several branches of a `oneOf` may match the same "
    "value, which is not supported; write `anyOf`",
}


def _invalid(spec: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    lines = reason.strip().splitlines() or ["it is not accepted"]
    causes = [line.strip() for line in lines[1:] if line.startswith("error: ")]  # of a regex
    param = f"structured_outputs.{spec.kind}"
    shown = " ".join((lines[0], *causes))[:500]
    shown = next((ours for theirs, ours in _PLAINLY.items() if shown.startswith(theirs)), shown)
    return InvalidRequestError(f"{param} can't be used: {shown}", param=param)


class Matcher:
    """Matches one sequence. `mask` and `accept` raise GrammarError and never fail open."""

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes

    def mask(self) -> bytes:
        """Bit v % 32 of little-endian int32 word v // 32: whether token v is allowed next.

        Once the grammar is complete and allows nothing more, only end tokens are allowed.
        """
        words = self._matcher.compute_bitmask()
        self._check()
        return words[: self._mask_bytes]  # the library may add an unused word

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarError(f"token {token} does not fit the grammar")

    @property
    def is_complete(self) -> bool:
        """Whether only an end token can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).strip().splitlines()
            raise GrammarError(f"the grammar failed: {reason[0] if reason else 'unknown reason'}")


class Grammars:
    """Creates matchers for one tokenizer; caches those of recently used grammars."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._mask_bytes = 4 * ((tokenizer.vocab_size + 31) // 32)
        self._kept: OrderedDict[tuple[str, str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, vocabulary: Vocabulary) -> Grammars:
        """Load a vocabulary. Takes about a second for 100,000 tokens. InvalidRequestError for a
        tokenizer that can't be used for grammars."""
        try:
            made = LLTokenizer(
                vocabulary.tokenizer,
                n_vocab=vocabulary.vocab_size,
                eos_token=list(vocabulary.eos_token_ids) or None,
            )
        except ValueError as error:
            raise InvalidRequestError(
                f"this model's tokenizer can't be used for structured outputs: {error}",
                param="structured_outputs",
            ) from error
        return cls(made)

    def start(self, spec: StructuredOutputsParams) -> Matcher:
        """A matcher at the start of an output. InvalidRequestError for an invalid grammar."""
        kept = self.copy_kept(spec)
        if kept is not None:
            return kept
        made = LLMatcher(self._tokenizer, compile_grammar(spec), log_level=0, limits=_LIMITS)
        made.compute_bitmask()  # much of the compilation happens here
        if made.is_error():
            raise _invalid(spec, made.get_error())
        with self._lock:
            self._kept[(spec.kind, spec.text, spec.preamble)] = made
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return Matcher(made.deep_copy(), self._mask_bytes)

    def copy_kept(self, spec: StructuredOutputsParams) -> Matcher | None:
        """The result of `start`, if the grammar is cached, so that it takes no time; else None."""
        key = (spec.kind, spec.text, spec.preamble)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            return Matcher(kept.deep_copy(), self._mask_bytes)
