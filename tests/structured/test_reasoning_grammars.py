"""A grammar of an answer that begins behind the model's reasoning."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer
from reasoning_templates import STYLES, Style
from scripted_engine import VOCAB_WIDTH, make_hf_tokenizer

from llmc.errors import InvalidRequestError
from llmc.structured.grammars import GrammarError, Grammars
from llmc.structured_outputs import StructuredOutputsParams
from llmc.text.chat import render_chat
from llmc.text.reasoning import find_reasoning
from llmc.text.tokenizer import Tokenizer

SPECS = [
    (StructuredOutputsParams(regex="[A-F]{3}"), "BAD", "bad"),
    (StructuredOutputsParams(json={"type": "boolean"}), "true", "1"),
    (StructuredOutputsParams(choice=["one", "two"]), "two", "three"),
    (StructuredOutputsParams(grammar='root ::= "<" [a-c] ">"'), "<b>", "b"),
    (StructuredOutputsParams(grammar='start: "x" /[0-9]/'), "x7", "y"),
]


def prompt_of(tokenizer: Tokenizer, kind: Style) -> list[int]:
    user = {"role": "user", "content": "1 + 1?"}
    return render_chat(tokenizer, [user], template_kwargs={"enable_thinking": kind.thinking})


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("spec", "good", "bad"), SPECS, ids=lambda value: str(value)[:60])
def test_it_holds_behind_the_reasoning(
    style: str, spec: StructuredOutputsParams, good: str, bad: str
) -> None:
    kind = STYLES[style]
    hf = make_hf_tokenizer(kind.template, kind.special_tokens)
    hf.add_tokens(list(kind.added_tokens))
    tokenizer = Tokenizer(hf)
    ids = prompt_of(tokenizer, kind)
    reasoning = find_reasoning(kind.form, tokenizer, ids)
    assert reasoning is not None
    made = StructuredOutputsParams(
        **{spec.kind: getattr(spec, spec.kind)}, preamble=reasoning.preamble()
    )
    grammars = Grammars(
        LLTokenizer(hf.backend_tokenizer.to_str(), n_vocab=VOCAB_WIDTH, eos_token=1)
    )

    def accepts(text: str) -> bool:
        matcher = grammars.start(made)
        try:
            for token in tokenizer.encode(text, add_special_tokens=False):
                matcher.accept(token)
        except GrammarError:
            return False
        return bool(matcher.mask()[0] & 2)  # the end token may follow

    said = kind.answer.removesuffix("Two")
    if reasoning.starts == "inside":
        said = said.removeprefix("<think>")
        assert not accepts(good)
    else:
        assert accepts(good) and not accepts(bad)
    assert accepts(said + good)
    assert not accepts(said + bad) and not accepts(said) and not accepts(said[:-3] + good)


def test_the_same_grammar_without_a_preamble_is_another() -> None:
    grammars = Grammars(
        LLTokenizer(
            make_hf_tokenizer().backend_tokenizer.to_str(), n_vocab=VOCAB_WIDTH, eos_token=1
        )
    )
    grammars.start(StructuredOutputsParams(regex="a", preamble='start: "b" @answer'))
    assert grammars.copy_kept(StructuredOutputsParams(regex="a")) is None
    with pytest.raises(InvalidRequestError, match="regex can't be used"):
        grammars.start(StructuredOutputsParams(regex="a", preamble="start: nothing @answer"))


@pytest.mark.parametrize("style", STYLES)
def test_a_limit_forces_the_end_of_the_reasoning(style: str) -> None:
    kind = STYLES[style]
    hf = make_hf_tokenizer(kind.template, kind.special_tokens)
    hf.add_tokens(list(kind.added_tokens))
    tokenizer = Tokenizer(hf)
    ids = prompt_of(tokenizer, kind)
    reasoning = find_reasoning(kind.form, tokenizer, ids)
    assert reasoning is not None
    if style in ("plain text", "channels", "an empty block"):  # marks of several tokens
        with pytest.raises(InvalidRequestError, match="single tokens"):
            reasoning.preamble(3)
        return
    made = StructuredOutputsParams(grammar=reasoning.free_answer(), preamble=reasoning.preamble(3))
    backend = hf.backend_tokenizer.to_str()
    matcher = Grammars(LLTokenizer(backend, n_vocab=VOCAB_WIDTH, eos_token=1)).start(made)
    begin, end = tokenizer.added_tokens[kind.form.begin], tokenizer.added_tokens[kind.form.end]

    def allowed(token: int) -> bool:
        return bool(matcher.mask()[token // 8] & 1 << token % 8)

    if reasoning.starts == "before":
        assert allowed(begin)
        matcher.accept(begin)
    word = tokenizer.encode("one", add_special_tokens=False)[0]
    for _ in range(3):
        assert allowed(word) and allowed(end)
        matcher.accept(word)
    assert allowed(end) and not allowed(word)
    matcher.accept(end)
    for token in (word, 2, word):  # also marks of tools
        assert allowed(token)
        matcher.accept(token)
    assert allowed(1) and allowed(begin) == (reasoning.starts == "inside")
