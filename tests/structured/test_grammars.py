"""Matchers over a tokenizer: masks, ends, errors; and the trial process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from many_files import many_open_files
from tiny_chat import tiny_chat_model

from llmc.errors import InvalidRequestError
from llmc.structured.grammars import GrammarError, Grammars, Matcher
from llmc.structured.trial import Trial
from llmc.structured.vocabulary import Vocabulary
from llmc.structured_outputs import StructuredOutputsParams
from llmc.text.tokenizer import Tokenizer

PATH = tiny_chat_model()
TOKENIZER = Tokenizer.load(PATH)
EOS = TOKENIZER.hf.eos_token_id
VOCAB = TOKENIZER.size + 40  # logits are often wider than the vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SPECS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "json_object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"[A-F]{3}-\d{2,4}( ok)?"),
    "choice": StructuredOutputsParams(choice=["yes", "no", "perhaps (ä)"]),
    "gbnf": StructuredOutputsParams(
        grammar='root ::= "<" item+ ">"\nitem ::= [a-c] | "(" item ")"'
    ),
    "lark that inlines": StructuredOutputsParams(
        grammar='// a rule\n%import common.INT\n?start: item+\n?item: "x" -> ex\n | "y" INT?'
    ),
    "lark": StructuredOutputsParams(grammar='start: "x" NUMBER\nNUMBER: /[0-9]{2}/'),
}


def vocabulary(vocab_size: int) -> Vocabulary:
    return Vocabulary.of(TOKENIZER, vocab_size=vocab_size, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars.load(vocabulary(VOCAB))


def allowed(matcher: Matcher) -> list[int]:
    words = np.frombuffer(matcher.mask(), "<u4")
    assert len(words) == (VOCAB + 31) // 32
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(i) for i in bits.nonzero()[0]]


def write_at_random(matcher: Matcher, seed: int, most: int = 300) -> str:
    """What a model that knows nothing would write under the mask; prefers to end."""
    draw, tokens = random.Random(seed), []
    for _ in range(most):
        options = allowed(matcher)
        assert options, "a mask that allows nothing"
        token = EOS if EOS in options else draw.choice(options)
        if token == EOS:
            return TOKENIZER.decode(tokens)
        assert token < TOKENIZER.size
        matcher.accept(token)
        tokens.append(token)
    return TOKENIZER.decode(tokens)


def fits(name: str, text: str) -> bool:
    if name == "json":
        value = json.loads(text)
        return set(value) == set(SCHEMA["properties"]) and 0 <= value["age"] <= 150  # type: ignore[arg-type]
    if name == "json_object":
        return isinstance(json.loads(text), dict)
    if name == "choice":
        return text in ("yes", "no", "perhaps (ä)")
    pattern = {"regex": r"[A-F]{3}-\d{2,4}( ok)?", "gbnf": r"<([a-c()])+>", "lark": r"x\d\d"}
    pattern["lark that inlines"] = r"(x|y\d*)+"
    return re.fullmatch(pattern[name], text) is not None


@pytest.mark.parametrize("name", ["json", "regex", "choice", "gbnf", "lark", "lark that inlines"])
def test_whatever_is_drawn_under_the_mask_fits(name: str, grammars: Grammars) -> None:
    for seed in range(5):
        text = write_at_random(grammars.start(SPECS[name]), seed)
        assert fits(name, text), text


def test_any_object_is_a_json_object(grammars: Grammars) -> None:
    matcher = grammars.start(SPECS["json_object"])
    for token in TOKENIZER.encode('{"a": [1, {"b": null}]}', add_special_tokens=False):
        assert token in allowed(matcher)
        matcher.accept(token)
    assert EOS in allowed(matcher)


def test_white_space_in_json_has_bounds(grammars: Grammars) -> None:
    matcher = grammars.start(SPECS["json"])
    for token in TOKENIZER.encode("{\n" + " " * 16, add_special_tokens=False):
        matcher.accept(token)
    texts = [TOKENIZER.decode([token]) for token in allowed(matcher)]
    assert texts and all(text.startswith('"') for text in texts)


def test_a_complete_output_allows_end_tokens_only(grammars: Grammars) -> None:
    matcher = grammars.start(SPECS["lark"])
    assert not matcher.is_complete
    for token in TOKENIZER.encode("x12", add_special_tokens=False):
        matcher.accept(token)
    assert allowed(matcher) == [EOS]
    assert matcher.is_complete


def test_a_token_that_does_not_fit_is_an_error_for_good(grammars: Grammars) -> None:
    matcher = grammars.start(SPECS["choice"])
    wrong = next(t for t in range(TOKENIZER.size) if t not in allowed(matcher))
    with pytest.raises(GrammarError):
        matcher.accept(wrong)
    with pytest.raises(GrammarError):
        matcher.mask()


@pytest.mark.parametrize("width", [32, 33, 64])
def test_a_mask_has_a_bit_for_each_logit_and_no_word_more(width: int) -> None:
    vocab_size = TOKENIZER.size // 64 * 64 + 64 + width
    made = Grammars.load(vocabulary(vocab_size))
    assert len(made.start(SPECS["regex"]).mask()) == 4 * ((vocab_size + 31) // 32)


def test_matchers_of_one_grammar_are_independent(grammars: Grammars) -> None:
    first, second = grammars.start(SPECS["choice"]), grammars.start(SPECS["choice"])
    before = second.mask()
    first.accept(allowed(first)[0])
    assert second.mask() == before != first.mask()


WRONG: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(a"},
    "grammar": {"grammar": "root ::= missing"},
    "schema": {"json": {"type": "nothing"}},
    "reference": {"json": {"$ref": "#/nowhere"}},
    "nested repeats": {"regex": "(((a{1000}){1000}){1000}){1000}"},
    "left recursion": {"grammar": "root ::= root"},
}


@pytest.mark.parametrize("name", ["regex", "grammar", "schema", "reference"])
def test_a_wrong_grammar_is_refused_in_one_line(name: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        grammars.start(StructuredOutputsParams(**WRONG[name]))
    assert "\n" not in str(caught.value)
    assert name != "regex" or "unclosed group" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"json": {"$ref": "#"}}, "no finite text matches it"),
        ({"grammar": "start: a\na: start"}, "no finite text matches it"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "write `anyOf`"),
    ],
)
def test_errors_of_the_library_are_said_plainly(
    wrong: dict[str, Any], words: str, grammars: Grammars
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        grammars.start(StructuredOutputsParams(**wrong))


# The trial


@pytest.fixture(scope="module")
def trial() -> Any:
    made = Trial(
        lambda: vocabulary(VOCAB), time_limit=10
    )  # a busy machine; what is wrong is wrong at once
    yield made
    made.close()


@pytest.mark.parametrize("name", SPECS)
def test_the_trial_accepts_what_works(name: str, trial: Trial) -> None:
    trial.check(SPECS[name])
    trial.check(SPECS[name])


@pytest.mark.parametrize("name", ["regex", "grammar", "schema", "reference"])
def test_the_trial_refuses_what_does_not(name: str, trial: Trial) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        trial.check(StructuredOutputsParams(**WRONG[name]))
    trial.check(SPECS["regex"])


@pytest.mark.parametrize("name", ["nested repeats", "left recursion"])
def test_a_costly_grammar_neither_hangs_nor_crashes_what_comes_after(
    name: str, trial: Trial
) -> None:
    """Accepted (grammars are expanded lazily) or refused: an answer comes, and the next too."""
    try:
        trial.check(StructuredOutputsParams(**WRONG[name]))
    except InvalidRequestError as error:
        assert "structured_outputs" in str(error)
    trial.check(StructuredOutputsParams(regex="after"))


def test_a_trial_beside_a_thousand_connections() -> None:
    trial = Trial(lambda: vocabulary(VOCAB), time_limit=10)
    with many_open_files():
        trial.check(StructuredOutputsParams(regex="a"))
        trial.close()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that trials start, in order."""
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def recorded(*args: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return started


def test_a_grammar_that_takes_too_long_is_refused_at_once_for_a_while(
    processes: list[subprocess.Popen[str]],
) -> None:
    trial = Trial(lambda: vocabulary(VOCAB), time_limit=1, retry_after=5)
    trial.check(StructuredOutputsParams(regex="before"))
    os.kill(processes[0].pid, signal.SIGSTOP)  # so that it can't answer before it is killed
    slow = StructuredOutputsParams(regex="slow")
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="took more than 1 s"):
            trial.check(slow)
    assert time.monotonic() - began < 2, "it was tried more than once"
    assert processes[0].poll() is not None, "a process that hangs is killed"
    time.sleep(5)
    trial.check(slow)  # nothing was wrong with it
    trial.close()
    assert len(processes) == 2


def test_a_grammar_that_is_known_waits_for_no_trial(
    processes: list[subprocess.Popen[str]],
) -> None:
    trial = Trial(lambda: vocabulary(VOCAB), time_limit=2)
    known = StructuredOutputsParams(regex="known")
    assert not trial.is_accepted(known)
    trial.check(known)
    with pytest.raises(InvalidRequestError):
        trial.check(StructuredOutputsParams(**WRONG["regex"]))
    os.kill(processes[0].pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        tried = pool.submit(trial.check, StructuredOutputsParams(regex="slow"))
        time.sleep(0.2)
        assert trial.is_accepted(known)
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            trial.is_accepted(StructuredOutputsParams(**WRONG["regex"]))
        assert not tried.done()
        with pytest.raises(InvalidRequestError, match="took more than 2 s"):
            tried.result()
    trial.close()


def test_a_process_that_has_died_is_started_again(
    processes: list[subprocess.Popen[str]],
) -> None:
    trial = Trial(lambda: vocabulary(VOCAB), time_limit=10)
    trial.check(StructuredOutputsParams(regex="before"))
    processes[0].kill()
    processes[0].wait()
    trial.check(StructuredOutputsParams(regex="after"))
    trial.close()
    assert len(processes) == 2


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
        {"type": "array", "contains": {"const": 1}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "string", "format": "iri"},
        {"type": "string", "pattern": "^(?!no).*$"},
        {"oneOf": [{"type": "string"}, {"maxLength": 4}]},
        {"if": {"const": 1}, "then": {"type": "integer"}},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_only_a_strict_schema_is_refused_for_what_can_not_be_enforced(
    schema: Any, grammars: Grammars
) -> None:
    grammars.start(StructuredOutputsParams(json=schema, strict=False))
    with pytest.raises(InvalidRequestError):
        grammars.start(StructuredOutputsParams(json=schema))
