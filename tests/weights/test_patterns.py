"""Patterns of checkpoints: which engine matches them, and what hostile ones end in."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from llmc.errors import CheckpointError
from llmc.weights import patterns
from llmc.weights.patterns import at_start, linear
from llmc.weights.quantized.quantization_config import read_quantization

NAMES = ("model.layers.0.mlp.gate", "model.layers.12.self_attn.q_proj", "lm_head", "a", "ab", "")
LONG = "model.layers.0." + "x" * 60
ENDLESS = r"(?=m)m.*(x|x\w|\wx)+[^\w]$"  # looks around
COUNTS = ("((a{1000}){1000}){1000}", "(?=a)a{9999999}")


@pytest.mark.parametrize(
    ("pattern", "is_linear"),
    [
        (r".*mlp\.gate$", True),
        (r"model\.layers\.(?:1[0-5])\..*", True),
        ("lm|a", True),
        ("(?i)LM_HEAD", True),
        ("", True),
        (r"^(?!.*(mlp|lm_head)).*", False),
        (r".*(?<!mlp)\.q_proj", False),
        (r".*layers\.(\d)\1?", False),
        (r"a{,2}b\Z", False),
    ],
)
def test_they_match_as_pythons_do(pattern: str, is_linear: bool) -> None:
    matches = at_start(pattern)
    assert [matches(name) for name in NAMES] == [bool(re.match(pattern, name)) for name in NAMES]
    if importlib.util.find_spec("pydantic_core") is None:
        pytest.skip("pydantic is not installed: all are matched by `regex`")
    assert isinstance(matches, patterns._Backtracking) is not is_linear
    if not is_linear:
        with pytest.raises(ValueError, match=r"regex parse error|look-around|backreferences"):
            linear(pattern)


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.parametrize("pattern", ["(", "a)|(b", "(" * 100_000, "a{99999999999}", "(?=a)[[:x:]]"])
def test_invalid_ones_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="not a valid regular expression"):
        at_start(pattern)


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "compressed-tensors", "ignore": ["re:" + ".*" * 40 + "z"]},
        {"quant_method": "fp8", "modules_to_not_convert": ["re:(.+.+)+[^x]"]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*x" * 30 + "z"]},
        {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:(\w+\.?)+-": {}}},
        {"quant_method": "torchao", "modules_to_not_convert": ["re:(x|xx|model|.)+-"]},
    ],
)
def test_hostile_ones_of_a_checkpoint_end_soon(fields: Any) -> None:
    found = read_quantization({"quantization_config": fields})
    assert found is not None
    found.expected(LONG, ())  # what comes of it does not matter


def test_those_that_look_around_have_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LIMIT_S", 0.2)
    fields: Any = {"quant_method": "compressed-tensors", "ignore": [f"re:{ENDLESS}"]}
    found = read_quantization({"quantization_config": fields})
    assert found is not None
    with pytest.raises(CheckpointError, match=r"quantization_config .*matching it takes more than"):
        found.expected(LONG, ())


@pytest.mark.parametrize("pattern", COUNTS)
def test_those_that_look_around_may_not_repeat_much(pattern: str) -> None:
    fields = {"quant_method": "compressed-tensors", "ignore": [f"re:{pattern}"]}
    with pytest.raises(CheckpointError, match=r"can't be used: it repeats too much"):
        read_quantization({"quantization_config": fields})


@pytest.fixture
def no_pydantic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pydantic_core", None)
    linear.cache_clear()
    at_start.cache_clear()
    yield
    linear.cache_clear()
    at_start.cache_clear()


@pytest.mark.usefixtures("no_pydantic")
def test_without_pydantic_all_have_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LIMIT_S", 0.2)
    assert [at_start(r".*mlp\.gate$")(name) for name in NAMES] == [True] + [False] * 5
    assert [linear(r"^(.*\.)?(q_proj|a)$")(name) for name in NAMES[1:4]] == [True, False, True]
    with pytest.raises(ValueError, match="matching it takes more than"):
        linear(f"^{ENDLESS}")(LONG)


@pytest.mark.usefixtures("no_pydantic")
@pytest.mark.parametrize("pattern", ["^(", pytest.param("^" + "(" * 9999, id="deep")])
def test_without_pydantic_invalid_ones_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="not a valid regular expression"):
        linear(pattern)
