"""Structured outputs, bad words and scored prompts in one batch with everything else: each answer
is the one that its request gets alone, with one step in flight and with two."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_chat import tiny_chat_model

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.errors import InvalidRequestError
from llmc.llm import LLM
from llmc.outputs import Logprob, RequestOutput
from llmc.sampling_params import SamplingParams
from llmc.startup.start import Started, start_engine
from llmc.structured.begin import GrammarStarter
from llmc.structured_outputs import StructuredOutputsParams
from llmc.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
ARITHMETIC = 'root ::= num ("+" num)+\nnum ::= [0-9] | [0-9] [0-9]'
SPECS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=r"[A-F]{3}-\d{2,4}"),
    "choice": StructuredOutputsParams(choice=["a pass", "a kernel", "neither"]),
    "grammar": StructuredOutputsParams(grammar=ARITHMETIC),
}
TEXT = "A pass is a function from graph to graph, and the graph"


CONFIG = EngineConfig(
    model=str(tiny_chat_model()),
    opt_level=0,
    dtype="float32",
    max_num_seqs=12,
    max_model_len=512,
    async_scheduling=True,
)


@pytest.fixture(scope="module")
def started() -> Started:
    return start_engine(CONFIG)


@pytest.fixture(scope="module", params=[1, 2], ids=["sync", "async"])
def llm(request: pytest.FixtureRequest, started: Started) -> Iterator[LLM]:
    """With one and with two steps in flight, over the same runner."""
    with make_llm(started, depth=request.param) as made:
        yield made


def make_llm(started: Started, depth: int, num_blocks: int | None = None) -> LLM:
    info = started.info
    path = info.tokenizer_path
    grammars = GrammarStarter(path, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
    engine = EngineCore(
        started.runner,
        EngineLimits(
            num_blocks=num_blocks or info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=CONFIG.max_num_seqs,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        ),
        EngineFeatures(
            eos_token_ids=info.eos_token_ids, async_scheduling=depth == 2, grammars=grammars
        ),
    )
    assert path is not None and started.runner.max_in_flight == 2
    one = dataclasses.replace(started, engine=engine)
    return LLM.from_started(one, CONFIG, Tokenizer.load(path))


def fits(kind: str, text: str) -> bool:
    if kind == "json":
        value = json.loads(text)
        return (
            set(value) == set(SCHEMA["properties"])  # type: ignore[call-overload]
            and isinstance(value["name"], str)
            and len(value["name"]) <= 8
            and type(value["age"]) is int
            and 0 <= value["age"] <= 99
            and value["kind"] in ("cat", "dog")
        )
    if kind == "choice":
        return text in ("a pass", "a kernel", "neither")
    pattern = r"[A-F]{3}-\d{2,4}" if kind == "regex" else r"\d{1,2}(\+\d{1,2})+"
    return re.fullmatch(pattern, text) is not None


def answers(output: RequestOutput) -> list[tuple[Any, ...]]:
    assert output.error is None, output.error
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in output.outputs]


def mixed(rng: random.Random) -> dict[str, tuple[str, SamplingParams]]:
    """One request of every feature, with chance in what does not matter."""
    base = SamplingParams(temperature=0.8, seed=1, max_tokens=60)
    grammars = {
        name: dataclasses.replace(base, structured_outputs=spec, seed=rng.randrange(99))
        for name, spec in SPECS.items()
    }
    plain = dataclasses.replace(base, max_tokens=rng.randint(8, 16))
    params = {
        **grammars,
        "three": dataclasses.replace(base, structured_outputs=SPECS["json"], n=3, logprobs=1),
        "greedy": dataclasses.replace(plain, temperature=0.0),
        "words": dataclasses.replace(plain, bad_words=["graph", "the"], ignore_eos=True),
        "scored": dataclasses.replace(plain, prompt_logprobs=2, n=2),
        "biased": dataclasses.replace(
            plain, logit_bias={40: 5.0}, presence_penalty=1.0, min_p=0.05
        ),
        "penalized": dataclasses.replace(plain, repetition_penalty=1.3, top_k=20, logprobs=2),
        "stopped": dataclasses.replace(plain, stop=["e"], min_tokens=3),
    }
    items = [(name, (TEXT[: rng.randint(5, len(TEXT))], one)) for name, one in params.items()]
    rng.shuffle(items)
    return dict(items)


def test_a_mixed_batch_is_as_each_request_alone(llm: LLM) -> None:
    requests = mixed(random.Random(0))
    prompts = [prompt for prompt, _ in requests.values()]
    params = [one for _, one in requests.values()]
    together = dict(zip(requests, llm.generate(prompts, params, progress=False), strict=True))
    for name, (prompt, one) in requests.items():
        [alone] = llm.generate(prompt, one, progress=False)
        assert answers(together[name]) == answers(alone), name
    for name in SPECS:
        [(_, text, reason, _)] = answers(together[name])
        assert reason == "length" or fits(name, text), (name, text)
    reasons = [answers(together[name])[0][2] for name in SPECS]
    assert reasons.count("stop") >= 3, reasons
    texts = [text for _, text, reason, _ in answers(together["three"]) if reason == "stop"]
    assert texts and all(fits("json", text) for text in texts)
    assert "graph" not in answers(together["words"])[0][1]
    engine = llm._engine
    assert engine is not None
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks and stats.num_failed_steps == 0


def test_a_batch_that_is_preempted_is_as_each_request_alone(started: Started) -> None:
    made = mixed(random.Random(1))
    requests = {}
    for name in ("words", "scored", "grammar", "json", "three"):  # the last is preempted first
        prompt, one = made[name]
        requests[name] = prompt, dataclasses.replace(one, max_tokens=60, ignore_eos=True)
    prompts = [prompt for prompt, _ in requests.values()]
    params = [one for _, one in requests.values()]
    with make_llm(started, 2, num_blocks=9) as small:
        together = small.generate(prompts, params, progress=False)
        assert small._engine is not None and small._engine.stats().num_preemptions > 1
    with make_llm(started, 2) as large:
        for name, one, (prompt, asked) in zip(requests, together, requests.values(), strict=True):
            [alone] = large.generate(prompt, asked, progress=False)
            assert answers(one) == answers(alone), name
            assert (one.prompt_logprobs is None) == (alone.prompt_logprobs is None)
            assert list(map(ranks, one.prompt_logprobs or ())) == list(
                map(ranks, alone.prompt_logprobs or ())
            )


def ranks(position: dict[int, Logprob] | None) -> dict[int, int | None]:
    return {token: reported.rank for token, reported in (position or {}).items()}


def test_scores_of_a_prompt_are_those_of_its_tokens_when_drawn(llm: LLM) -> None:
    """What is drawn greedily is the likeliest at its place; as a prompt it is scored so."""
    [drawn] = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=12, logprobs=1))
    tokens = drawn.prompt_token_ids + drawn.outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scored, again = llm.generate([tokens, tokens], params, progress=False)
    for output in (scored, again):  # the second one finds its prompt in the prefix cache
        reported = output.prompt_logprobs
        assert reported is not None and reported[0] is None and len(reported) == len(tokens)
        assert all(
            list(position or ())[0] == t
            for t, position in zip(tokens, reported, strict=True)
            if position is not None
        )
        assert all(
            position[t].logprob <= 0
            for t, position in zip(tokens, reported, strict=True)
            if position
        )
    given = drawn.outputs[0].logprobs
    assert given is not None and scored.prompt_logprobs is not None
    for token, was, now in zip(
        drawn.outputs[0].token_ids, given, scored.prompt_logprobs[-12:], strict=True
    ):
        assert now is not None and now[token].rank == 1
        assert math.isclose(was[token].logprob, now[token].logprob, abs_tol=1e-4)


def test_a_complete_answer_ends_with_its_last_token(llm: LLM) -> None:
    spec = StructuredOutputsParams(choice=["yes"])
    params = SamplingParams(structured_outputs=spec, max_tokens=9, min_tokens=8, ignore_eos=True)
    [output] = llm.generate(TEXT, params, progress=False)
    [one] = output.outputs
    assert (one.text, one.finish_reason, one.stop_reason) == ("yes", "stop", None)


def test_an_optional_end_is_drawn_and_not_shown(llm: LLM) -> None:
    spec = StructuredOutputsParams(regex="(yes)+")
    eos = llm.info.eos_token_ids[0]
    params = SamplingParams(structured_outputs=spec, logit_bias={eos: 100.0}, max_tokens=20)
    [output] = llm.generate(TEXT, params, progress=False)
    assert output.outputs[0].text == "yes"
    assert output.outputs[0].token_ids[-1] == eos


def test_max_tokens_cuts_it(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=SPECS["json"], max_tokens=2, temperature=0)
    [output] = llm.generate(TEXT, params, progress=False)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text.lstrip().startswith("{")


def test_a_grammar_whose_words_are_all_banned_ends_with_an_error(llm: LLM) -> None:
    bad, good = llm.generate(
        [TEXT, TEXT],
        [
            SamplingParams(
                structured_outputs=StructuredOutputsParams(regex="x"), bad_words=["x"], max_tokens=5
            ),
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"), max_tokens=5),
        ],
        progress=False,
    )
    assert bad.error is not None and "no token was left to sample" in bad.error
    assert good.outputs[0].text == "x"


def test_wrong_grammars_are_refused_and_the_others_served(llm: LLM) -> None:
    wrong = StructuredOutputsParams(regex="(a")
    params = [SamplingParams(structured_outputs=wrong), SamplingParams(max_tokens=3)]
    refused, served = llm.generate([TEXT, TEXT], params, progress=False)
    assert refused.error is not None and "structured_outputs.regex" in refused.error
    assert len(served.outputs[0].token_ids) == 3


def test_bad_words_are_tokenized_as_they_begin_and_as_they_follow(llm: LLM) -> None:
    tokenizer = llm._inputs.tokenizer
    assert tokenizer is not None
    sampling = SamplingParams(bad_words=["graph", " graph"], bad_words_token_ids=[[3]])
    made = llm._inputs.process(TEXT, sampling).sampling
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in ("graph", " graph")]
    assert made.bad_words is None
    assert [list(word) for word in made.bad_words_token_ids or ()] == [[3], *expected]
    with pytest.raises(InvalidRequestError, match="the limit is 16") as caught:
        llm._inputs.process(TEXT, SamplingParams(bad_words=["~" * 200]))
    assert caught.value.param == "bad_words"
    with pytest.raises(InvalidRequestError, match="token ids are 0 to"):
        llm._inputs.process(TEXT, SamplingParams(bad_words_token_ids=[[10**6]]))
