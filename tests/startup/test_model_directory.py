"""A model directory that can't be served is refused before any work, in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tiny_models import make_config, save_checkpoint

from llmc.compiler.build import build
from llmc.config import EngineConfig
from llmc.errors import CheckpointError, CompileError, ConfigError
from llmc.speculative_config import SpeculativeConfig
from llmc.startup.compile import build_as_stored
from llmc.startup.model_files import (
    generation_defaults,
    load_config,
    resolve_model,
    tokenizer_folder,
)
from llmc.startup.resolve import check_paths, resolve
from llmc.startup.start import start_engine


def start(path: Path | str, **options: Any) -> None:
    start_engine(EngineConfig(model=str(path), device="cpu", **options))


def refused(path: Path | str, *words: str, **options: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        start(path, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500, message
    for word in words:
        assert word in message, message


def write_config(path: Path, **fields: Any) -> Path:
    data = {**make_config("llama").to_dict(), "model_type": "llama", **fields}
    (path / "config.json").write_text(json.dumps(data))
    return path


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no model at", "nowhere", "give a directory with config.json")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(tmp_path / "model.safetensors", "is a file; give a .gguf file, or the directory")
    refused("/dev/null", "is neither a file nor a directory; give a .gguf file, or the directory")


def test_a_revision_of_a_local_model(tmp_path: Path) -> None:
    """It would be ignored, and another version served than the one that was asked for."""
    write_config(tmp_path)
    (tmp_path / "model.safetensors").touch()  # never read
    draft = SpeculativeConfig(method="draft_model", model=str(tmp_path), revision="v2")
    for options in ({"revision": "v2"}, {"speculative_config": draft}):
        with pytest.raises(ConfigError, match=f"'v2' is for models from the hub.*{tmp_path}"):
            start(tmp_path, **options)


def test_no_config(tmp_path: Path) -> None:
    refused(tmp_path, "has no config.json, so it is not a model directory")


@pytest.mark.parametrize("text", ["", "{", "\x00\x01", '{"a": 1,}', "[" * 100_000])
def test_a_config_that_is_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json can't be read")


def test_a_config_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xff")
    refused(tmp_path, "config.json can't be read")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "instead of an object")


def test_an_empty_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "config.json", load_format="dummy")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_type="no-such-model")
    refused(path, "can't be used", "no-such-model", load_format="dummy")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_attention_heads", "4", ("num_attention_heads", "expected int", "'4'")),
        ("hidden_act", "zelu", ("KeyError: 'zelu'",)),
    ],
)
def test_a_field_of_the_wrong_kind(
    tmp_path: Path, field: str, value: Any, words: tuple[str, ...]
) -> None:
    """transformers says in its second line what is wrong, or nothing but the key."""
    refused(write_config(tmp_path, **{field: value}), *words, load_format="dummy")


def test_an_encoder_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 32}))
    refused(tmp_path, "encoder-decoder model (t5)", "decoder-only", load_format="dummy")


def test_a_model_that_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refused(tmp_path, "can't build a causal language model", load_format="dummy")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", -1),
        ("vocab_size", 10**12),
        ("hidden_size", 0),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 4097),
        ("hidden_size", "wide"),
        ("num_attention_heads", 0),
        ("num_attention_heads", 7),
        ("num_attention_heads", -4),
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, field: str, value: Any) -> None:
    refused(write_config(tmp_path, **{field: value}), load_format="dummy")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnCode(LlamaForCausalLM):
    pass
"""


def with_own_code(path: Path, model_type: str, **auto_map: str) -> Path:
    """A checkpoint with the Python code of its model, as repositories have it."""
    save_checkpoint("llama", path)
    (path / "own.py").write_text(OWN_CODE)
    return write_config(path, model_type=model_type, auto_map=auto_map)


def test_code_of_the_model_runs_only_on_request(tmp_path: Path) -> None:
    path = with_own_code(
        tmp_path, "own", AutoConfig="own.OwnConfig", AutoModelForCausalLM="own.OwnModel"
    )
    refused(path, "no model_type 'own'", "its own Python code", "--trust-remote-code")
    config = EngineConfig(model=str(path), device="cpu", max_model_len=64, trust_remote_code=True)
    source = resolve(config, torch.device("cpu"))
    assert type(build_as_stored(source).module).__name__ == "OwnModel"


@pytest.mark.parametrize("trust", [False, True])
def test_code_for_an_architecture_that_transformers_has(tmp_path: Path, trust: bool) -> None:
    """Without trust transformers' own code is used, and nobody is asked."""
    path = with_own_code(tmp_path, "llama", AutoModelForCausalLM="own.OwnCode")
    config = EngineConfig(model=str(path), device="cpu", trust_remote_code=trust)
    hf_config = load_config(resolve_model(config), config)
    assert hasattr(hf_config, "auto_map") is trust
    module = build_as_stored(resolve(config, torch.device("cpu"))).module
    assert type(module).__name__ == ("OwnCode" if trust else "LlamaForCausalLM")


@pytest.mark.parametrize("trust", [False, True])
def test_only_the_option_lets_code_run(tmp_path: Path, trust: bool) -> None:
    """Not a config that names it."""
    path = with_own_code(tmp_path, "llama", AutoModelForCausalLM="own.OwnCode")
    hf_config = tf.AutoConfig.from_pretrained(path)
    assert hf_config.auto_map
    built = build(hf_config, torch.float32, trust_remote_code=trust)
    assert type(built.module).__name__ == ("OwnCode" if trust else "LlamaForCausalLM")


@pytest.mark.parametrize("trust", [False, True])
def test_code_that_a_config_inside_the_config_names(tmp_path: Path, trust: bool) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "own.OwnCode"}}
    fields = {"model_type": "gemma3", **code, "text_config": {"model_type": "gemma3_text", **code}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = EngineConfig(model=str(tmp_path), device="cpu", trust_remote_code=trust)
    loaded = load_config(resolve_model(config), config)
    parts = loaded, loaded.text_config
    assert [hasattr(part, "auto_map") for part in parts] == [trust, trust]


def test_no_weights(tmp_path: Path) -> None:
    refused(write_config(tmp_path), "has no model.safetensors", "--load-format dummy")


def test_weights_of_another_size(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    write_config(tmp_path, intermediate_size=128)
    refused(tmp_path, "does not fit its config.json", "instead of [128, 32]")


def test_an_error_of_a_config_is_an_error_of_the_callers(tmp_path: Path) -> None:
    """Exit code 2 and ValueError hang on these types."""
    assert issubclass(CheckpointError, ConfigError) and issubclass(CheckpointError, ValueError)
    assert not issubclass(CompileError, ValueError)


@pytest.mark.parametrize("model", ["no-slash", "./a/b", "/a/b", "~/a", "a/b/c", ""])
def test_a_name_that_is_no_hub_id_is_never_downloaded(model: str) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        resolve_model(EngineConfig(model=model))


def test_a_context_beyond_the_models_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 512 exceeds the model's context of 256"):
        start(write_config(tmp_path), max_model_len=512, load_format="dummy")


def test_a_model_that_states_no_context_has_the_one_that_is_asked_for(tmp_path: Path) -> None:
    tf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path))
    assert resolve(config, torch.device("cpu")).model_len == 2048
    longer = replace(config, max_model_len=8192)
    assert resolve(longer, torch.device("cpu")).model_len == 8192


def test_without_a_dtype_in_the_config_the_weights_say_it(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    weights = tmp_path / "model.safetensors"
    stored = {n: t.float() if "norm" in n else t for n, t in load_file(weights).items()}
    save_file({**stored, "a.table": torch.arange(4)}, weights)
    config, stated = EngineConfig(model=str(tmp_path)), tmp_path / "config.json"
    fields = {k: v for k, v in json.loads(stated.read_text()).items() if k != "dtype"}
    stated.write_text(json.dumps(fields))
    assert resolve(config, torch.device("cpu")).dtype == torch.bfloat16
    stated.write_text(json.dumps({**fields, "torch_dtype": "float16"}))
    assert resolve(config, torch.device("cpu")).dtype == torch.float16
    stated.write_text(json.dumps({**fields, "torch_dtype": "torch.float16"}))
    assert resolve(config, torch.device("cpu")).dtype == torch.float16
    stated.write_text(json.dumps({**fields, "dtype": "auto"}))
    assert resolve(config, torch.device("cpu")).dtype == torch.bfloat16
    stated.write_text(json.dumps(fields))
    weights.unlink()  # a config alone
    assert resolve(config, torch.device("cpu")).dtype == torch.float32


def test_an_unknown_pass_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown pass 'warp'; the pipeline has canonicalize"):
        start(write_config(tmp_path), passes={"warp": False}, load_format="dummy")


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_config(tmp_path, eos_token_id=5)))
    assert resolve(config, torch.device("cpu")).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert resolve(config, torch.device("cpu")).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config.json": {
                "eos_token": {"content": "<|end|>"},
                "added_tokens_decoder": {"9": {"content": "<|end|>"}},
            }
        },
        {
            "tokenizer_config.json": {"eos_token": "<|end|>"},
            "tokenizer.json": {"added_tokens": [3, {"id": 9, "content": "<|end|>"}], "model": {}},
        },
        {
            "special_tokens_map.json": {"eos_token": "<|end|>"},
            "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<|end|>"}]},
        },
        {
            "tokenizer_config.json": {"eos_token": "<|end|>"},
            "added_tokens.json": {"<|start|>": 8, "<|end|>": 9},
        },
    ],
)
def test_the_tokenizers_end_token_ends_too(tmp_path: Path, files: dict[str, Any]) -> None:
    """Fine-tunes often teach a new end of turn and leave the config as it was."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = EngineConfig(model=str(write_config(tmp_path, eos_token_id=5)))
    assert resolve(config, torch.device("cpu")).eos_token_ids == (5, 9)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"eos_token": 3}', '{"eos_token": "x"}'),
        '{"eos_token": "x", "added_tokens_decoder": {"\\u00b2": {"content": "x"}}}',  # a digit
        f'{{"eos_token": "x", "added_tokens_decoder": {{"{"9" * 5000}": {{"content": "x"}}}}}}',
    ],
)
def test_an_end_token_that_is_not_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": {')
    config = EngineConfig(model=str(write_config(tmp_path, eos_token_id=5)))
    assert resolve(config, torch.device("cpu")).eos_token_ids == (5,)


@pytest.mark.parametrize("trust", [False, True])
def test_what_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trust: bool) -> None:
    """Weights once, and a model's own code only for those who trust it."""
    files = ["config.json", "model.safetensors", "consolidated.safetensors", "modeling.py"]
    files += ["original/x.safetensors", "chat_template.jinja", "pytorch_model.bin"]
    chosen: list[str] = []

    def download(name: str, *, revision: Any, **patterns: Any) -> str:
        chosen.extend(huggingface_hub.utils.filter_repo_objects(files, **patterns))
        write_config(tmp_path)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model(EngineConfig(model="owner/name", trust_remote_code=trust))
    wanted = ["config.json", "model.safetensors", "chat_template.jinja"]
    assert sorted(chosen) == sorted(wanted + ["modeling.py"] * trust)


def test_where_the_tokenizer_is_before_anything_is_downloaded_or_converted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def at(model: Path | str) -> Path | None:
        return tokenizer_folder(EngineConfig(model=str(model), revision="main"))

    assert at(tmp_path) is at("/nowhere") is None, "they can't be served"
    assert at(write_config(tmp_path)) == tmp_path
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.file_download, "HF_HUB_CACHE", str(tmp_path), raising=False)
    assert at("owner/name") is None, "yet to be downloaded"
    kept = tmp_path / "models--owner--name" / "snapshots" / "abc"
    kept.mkdir(parents=True)
    write_config(kept)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("abc")
    assert at("owner/name") == kept


def test_weights_of_dense_modules_are_downloaded_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They lie in folders, of which nothing else is needed."""
    files = ["model.safetensors", "2_Dense/model.safetensors", "onnx/model.safetensors"]
    chosen: list[str] = []

    def download(name: str, *, revision: Any, **patterns: Any) -> str:
        chosen.extend(huggingface_hub.utils.filter_repo_objects(files, **patterns))
        write_config(tmp_path)
        kinds = {"0": "Transformer", "2_Dense": "Dense"}
        listed = [
            {"path": path, "type": f"sentence_transformers.models.{kind}"}
            for path, kind in kinds.items()
        ]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model(EngineConfig(model="owner/name"))
    assert chosen == ["model.safetensors", "2_Dense/model.safetensors"]


def test_an_adapter_instead_of_a_model(tmp_path: Path) -> None:
    """Some tools save the model's config.json with it."""
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "has an adapter", "--lora-modules NAME=DIR")
    write_config(tmp_path)
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        (tmp_path / name).touch()
        refused(tmp_path, "has an adapter", "--lora-modules NAME=DIR")


def test_a_broken_generation_config_does_no_harm(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_config(tmp_path)))
    (tmp_path / "generation_config.json").write_text("{")
    assert generation_defaults(resolve_model(config)) == {}


def test_what_greedy_models_recommend(tmp_path: Path) -> None:
    """The rest is for sampling, and transformers then leaves it out."""
    config = EngineConfig(model=str(write_config(tmp_path)), device="cpu")
    fields = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    want = {"temperature": 0.0, "repetition_penalty": 1.1}
    assert resolve(config, torch.device("cpu")).sampling_defaults() == want


def test_what_the_user_sets_in_place_of_it(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_config(tmp_path)),
        device="cpu",
        override_generation_config={"temperature": 0.7, "presence_penalty": 0.5},
    )
    fields = {"temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    want = {"temperature": 0.7, "presence_penalty": 0.5, "top_p": 0.9}
    assert resolve(config, torch.device("cpu")).sampling_defaults() == want


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_new_tokens": 3}, "can set temperature, .*got 'max_new_tokens'"),
        ({"top_p": 0}, r": top_p must be a number in \(0, 1\], got 0"),
        ({"top_k": "many"}, ": top_k must be a positive integer"),
        ([0.7], "must be a mapping such as"),
    ],
)
def test_what_the_user_can_not_set(given: Any, why: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "no model"), override_generation_config=given)
    with pytest.raises(ConfigError, match=f"override_generation_config ?{why}"):
        check_paths(config)


def recommended(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    config = EngineConfig(model=str(write_config(tmp_path)), device="cpu")
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    return resolve(config, torch.device("cpu")).sampling_defaults()


def test_stop_strings_and_suppressed_tokens_are_recommended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not for sampling alone, so they count for greedy models too."""
    found = recommended(
        tmp_path,
        do_sample=False,
        stop_strings="END",
        suppress_tokens=[3, -1],
        bad_words_ids=[[4, 5]],
    )
    assert found == {"temperature": 0.0, "stop": ["END"], "bad_words_token_ids": [[3], [4, 5]]}
    assert not caplog.records


@pytest.mark.parametrize("end", [5, [7, 5]])
def test_an_end_token_is_no_bad_word(tmp_path: Path, end: Any) -> None:
    """transformers leaves it out too; the model could not stop."""
    found = recommended(tmp_path, eos_token_id=end, bad_words_ids=[[5], [4, 5]])
    assert found == {"bad_words_token_ids": [[4, 5]]}


def test_what_is_not_applied_is_named_with_its_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    neutral: dict[str, Any] = {
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "forced_eos_token_id": None,
    }
    assert recommended(tmp_path, **neutral, begin_suppress_tokens=[2], typical_p=0.5) == {}
    [record] = caplog.records
    assert "begin_suppress_tokens=[2], typical_p=0.5" in record.getMessage()
    assert not any(name in record.getMessage() for name in neutral)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tekken.json", "tiktoken.model", "vocab.txt", "spiece.model"]
)
def test_any_tokenizer_that_can_be_loaded_is_one(tmp_path: Path, name: str) -> None:
    files = resolve_model(EngineConfig(model=str(write_config(tmp_path))))
    assert not files.has_tokenizer
    (tmp_path / name).write_text("")
    assert files.has_tokenizer
