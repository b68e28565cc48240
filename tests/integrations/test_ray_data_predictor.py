"""LLMPredictor and its checkpoint, called as Ray Data calls them: without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the server's dependencies are not installed")

from tiny_chat import tiny_chat_model

from llmc.errors import ConfigError
from llmc.integrations.ray import LLMPredictor
from llmc.llm import LLM
from llmc.sampling_params import SamplingParams

PARAMS = {"max_tokens": 4, "temperature": 0.0}


def predictor(folder: Path | None = None, **changes: Any) -> LLMPredictor:
    options: dict[str, Any] = {"sampling_params": PARAMS, "opt_level": 0, "device": "cpu"}
    if folder is not None:
        options |= {"id_column": "id", "checkpoint_dir": str(folder)}
    return LLMPredictor(str(tiny_chat_model()), **{**options, **changes})


def batch(*prompts: Any, first: int = 0) -> dict[str, Any]:
    column = np.empty(len(prompts), object)
    column[:] = prompts
    return {"id": np.arange(first, first + len(prompts)), "prompt": column}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for path in folder.iterdir() for line in path.read_bytes().splitlines()
    ]


def test_columns_are_added_and_answers_are_those_of_the_llm() -> None:
    prompts = ["one", [5, 6, 7], "three"]
    chat = [{"role": "user", "content": "hello"}]
    with LLM(str(tiny_chat_model()), opt_level=0, device="cpu") as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        expected = llm.generate(prompts, params, progress=False)  # type: ignore[arg-type]
        [answer] = llm.chat(chat, params, progress=False)
    filled_in = [{"role": "user", "content": "hello", "tool_calls": None}]  # as Arrow does
    made = predictor()(batch(prompts[0], np.array(filled_in, object), *prompts[1:]))
    assert list(made) == [
        *("id", "prompt", "generated_text", "finish_reason"),
        *("num_prompt_tokens", "num_generated_tokens", "error"),
    ]
    texts = [output.outputs[0].text for output in expected]
    assert made["generated_text"] == [texts[0], answer.outputs[0].text, *texts[1:]]
    assert made["finish_reason"] == ["length"] * 4
    assert made["num_generated_tokens"] == [4] * 4
    assert made["num_prompt_tokens"][2] == 3
    assert made["error"] == [""] * 4


def test_a_prompt_that_cannot_be_served_has_its_reason_and_the_others_are_answered() -> None:
    predict = predictor()
    made = predict(batch("one", [], None, "four"))
    assert [bool(error) for error in made["error"]] == [False, True, True, False]
    assert [bool(text) for text in made["generated_text"]] == [True, False, False, True]
    made = predict(batch([10**9], []))  # none of them
    assert "token id" in made["error"][0]
    assert made["error"][0] != made["error"][1] != ""


def test_rows_of_a_run_before_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = predictor(tmp_path)(batch("a", "b", "c"))
    assert len(lines(tmp_path)) == 3
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b'{"key": "half')  # a worker that was killed
    again = predictor(tmp_path)
    asked: list[Any] = []
    generate = again._llm.generate

    def counted(prompts: list[Any], *args: Any, **named: Any) -> Any:
        asked.extend(prompts)
        return generate(prompts, *args, **named)

    monkeypatch.setattr(again._llm, "generate", counted)
    made = again(batch("b", "c", "d", first=1))
    assert asked == ["d"]
    assert made["generated_text"][:2] == first["generated_text"][1:]
    again(batch("b", "c", "d", first=1))  # now all are known
    assert asked == ["d"]
    again(batch("b", "changed", first=1))
    assert asked == ["d", "changed"]
    again(batch("a", "a", first=7))  # other rows of the same prompt
    assert asked == ["d", "changed", "a", "a"]


def test_other_sampling_parameters_have_other_answers(tmp_path: Path) -> None:
    predictor(tmp_path)(batch("a"))
    made = predictor(tmp_path, sampling_params={"max_tokens": 2, "temperature": 0.0})(batch("a"))
    assert made["num_generated_tokens"] == [2]
    assert len(lines(tmp_path)) == 2


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs id_column"):
        LLMPredictor("model", checkpoint_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="n must be 1, got 2"):
        LLMPredictor("model", sampling_params={"n": 2})
    with pytest.raises(ConfigError, match="there is no column 'text'; columns are id, prompt"):
        predictor(column="text")(batch("a"))
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="at byte 0: this is not a line of a checkpoint"):
        predictor(tmp_path)
