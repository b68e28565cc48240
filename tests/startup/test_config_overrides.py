"""`hf_overrides`: a model with other fields in config.json, from the same files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import save_checkpoint
from transformers import AutoModelForCausalLM

from llmc import LLM, SamplingParams
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.startup.config_facts import FactsCache, class_fields
from llmc.startup.config_overrides import new_fields, overridden, warn_of_unknown
from llmc.startup.model_files import resolve_model
from llmc.startup.resolve import check_paths, resolve

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
IDS = [(7 * i) % 90 + 1 for i in range(200)]


@pytest.mark.parametrize(
    ("stated", "given", "made"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1, "y": {"z": 2}}}, {"a": {"y": {"z": 3}}}, {"a": {"x": 1, "y": {"z": 3}}}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        # the two names of a field are one
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            {"rope_scaling": {"rope_type": "linear"}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0}},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5.0},
            {"rope_parameters": {"factor": 4}},
            {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 5.0},
        ),
        (
            {"rope_scaling": None, "rope_theta": 5.0},
            {"rope_parameters": {"rope_type": "yarn"}},
            {"rope_scaling": None, "rope_theta": 5.0, "rope_parameters": {"rope_type": "yarn"}},
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0}},
            {"rope_theta": 6.0},
            {"rope_parameters": {"rope_theta": 6.0}, "rope_theta": 6.0},
        ),
    ],
)
def test_fields_of_objects_are_replaced_one_by_one(
    stated: dict[str, Any], given: dict[str, Any], made: dict[str, Any]
) -> None:
    before = json.dumps(stated)
    assert overridden(stated, given) == made
    assert json.dumps(stated) == before


def test_fields_that_no_config_has_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time: a start with caches does not read the config with transformers."""
    save_checkpoint("llama", tmp_path, own_field=1)
    given = {
        "own_field": 2,  # of the checkpoint's config alone
        "mlp_bias": False,  # of the class alone
        "rope_theta": 5e3,
        "torch_dtype": "float32",
        "rope_parameters": {"factor": 1.0},
        "quantization_config": None,
        "max_positon_embeddings": 512,
        "zzz": 1,
    }
    config = EngineConfig(model=str(tmp_path), hf_overrides=given)
    cache = FactsCache(tmp_path / "facts")
    source = resolve(config, torch.device("cpu"), facts_cache=cache)
    assert source.facts.context == 256, "the misspelled field changes nothing"
    wanted = [
        "no field 'max_positon_embeddings', so this may have no effect; did you mean "
        "'max_position_embeddings'?",
        "no field 'zzz', so this may have no effect",
    ]
    prefix = "hf_overrides: the model's config has "
    said = [one for one in caplog.messages if one.startswith(prefix)]
    assert said == [prefix + one for one in wanted]
    monkeypatch.delitem(sys.modules, "transformers")
    assert cache.load(source.files, config) == source.facts


def test_a_field_of_a_part_is_not_one_of_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    known = list(class_fields(tf.Gemma3Config()))
    stated = {"text_config": {"vocab_size": 9}}
    text = {"max_position_embeddings": 9, "vocab_size": 8, "quantization_config": None}
    right = {"text_config": text, "dtype": "float16"}
    warn_of_unknown(new_fields(stated, right), known)
    assert not caplog.messages
    flat = list(class_fields(tf.LlamaConfig()))
    warn_of_unknown(new_fields({}, {"num_labels": 3, "text_config": right["text_config"]}), flat)
    assert caplog.messages[0].endswith("no field 'text_config', so this may have no effect")
    caplog.clear()
    wrong = {"max_position_embeddings": 9, "text_config": {"max_length_": 1}}
    warn_of_unknown(new_fields(stated, wrong), known)
    assert "did you mean 'text_config.max_position_embeddings'" in caplog.messages[0]
    assert "no field 'text_config.max_length_'" in caplog.messages[1]


def test_answers_are_those_of_a_model_with_such_a_config(tmp_path: Path) -> None:
    save_checkpoint("qwen2", tmp_path, max_position_embeddings=64)
    text = (tmp_path / "config.json").read_text()
    options: Any = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    with pytest.raises(ConfigError, match="exceeds the model's context of 64"):
        LLM(str(tmp_path), **options)
    with LLM(str(tmp_path), **options, hf_overrides={"rope_scaling": YARN}) as llm:
        assert llm.info.name == tmp_path.name
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        [answer] = llm.generate({"prompt_token_ids": IDS}, params)
    assert (tmp_path / "config.json").read_text() == text
    fields = json.loads(text)
    fields["rope_parameters"] |= YARN
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    known = model.generate(
        torch.tensor([IDS]), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert list(answer.outputs[0].token_ids) == known[0, len(IDS) :].tolist()


def test_the_folder_is_made_once_for_the_same_config_and_files(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)

    def folder(**given: Any) -> Path:
        return resolve_model(EngineConfig(model=str(tmp_path), hf_overrides=given)).path

    assert folder() == tmp_path
    made = folder(max_position_embeddings=512)
    assert made != tmp_path and folder(max_position_embeddings=512) == made
    assert folder(max_position_embeddings=511) != made
    assert json.loads((made / "config.json").read_text())["max_position_embeddings"] == 512
    assert (made / "model.safetensors").samefile(tmp_path / "model.safetensors")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert (folder(max_position_embeddings=512) / "tokenizer_config.json").is_file()


@pytest.mark.parametrize("given", [[1], "a", {"a": object()}, {"a": float("nan")}])
def test_what_json_has_not_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="hf_overrides"):
        check_paths(EngineConfig(hf_overrides=given))
