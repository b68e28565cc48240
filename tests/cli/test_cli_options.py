"""The table of engine flags: complete against EngineConfig, and every flag reaches its field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer

from llmc.cli.flag_names import name_flags
from llmc.cli.help import HelpCommand
from llmc.cli.options import ENGINE_OPTIONS, FLAG_OF_FIELD, engine_options, parse_size
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.speculative_config import SpeculativeConfig

# For each field: words of the command line, the value that must arrive.
EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "model": (["--model", "some/dir"], "some/dir"),
    "chat_template": (["--chat-template", "chat.jinja"], "chat.jinja"),
    "tool_format": (["--tool-format", "generic"], "generic"),
    "tokenizer": (["--tokenizer", "other"], "other"),
    "revision": (["--revision", "v2"], "v2"),
    "trust_remote_code": (["--trust-remote-code"], True),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "device": (["--device", "cpu"], "cpu"),
    "load_format": (["--load-format", "dummy"], "dummy"),
    "quantization": (["--quantization", "int8"], "int8"),
    "activation_bits": (["--activation-bits", "8"], 8),
    "task": (["--task", "embed"], "embed"),
    "pooling": (["--pooling", "mean"], "mean"),
    "normalize": (["--no-normalize"], False),
    "max_model_len": (["--max-model-len", "77"], 77),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "99"], 99),
    "max_num_queued": (["--max-queue", "5"], 5),
    "block_size": (["--block-size", "32"], 32),
    "kv_cache_dtype": (["--kv-cache-dtype", "fp8_e4m3"], "fp8_e4m3"),
    "kv_cache_memory": (["--kv-cache-memory", "512M"], 512 * 2**20),
    "swap_space": (["--swap-space", "2G"], 2 * 2**30),
    "tensor_parallel_size": (["--tensor-parallel-size", "2"], 2),
    "distributed_executor_backend": (["--distributed-executor-backend", "ray"], "ray"),
    "data_parallel_size": (["--data-parallel-size", "2"], 2),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "enable_prefix_caching": (["--no-enable-prefix-caching"], False),
    "async_scheduling": (["--no-async-scheduling"], False),
    "cuda_graph_buckets": (["--cuda-graph-buckets", "1,2, 8"], (1, 2, 8)),
    "scheduling_policy": (["--scheduling-policy", "priority"], "priority"),
    "speculative_config": (
        ["--speculative-config", '{"method":"ngram","num_speculative_tokens":3}'],
        SpeculativeConfig(num_speculative_tokens=3),
    ),
    "enable_lora": (["--enable-lora"], True),
    "max_loras": (["--max-loras", "3"], 3),
    "max_lora_rank": (["--max-lora-rank", "64"], 64),
    "max_lora_expert_rank": (["--max-lora-expert-rank", "8"], 8),
    "hf_overrides": (
        ["--hf-overrides", '{"max_position_embeddings": 512}'],
        {"max_position_embeddings": 512},
    ),
    "override_generation_config": (
        ["--override-generation-config", '{"top_p": 0.9}'],
        {"top_p": 0.9},
    ),
    "chat_template_kwargs": (["--chat-template-kwargs", '{"a": 1}'], {"a": 1}),
    "limit_mm_per_prompt": (["--limit-mm-per-prompt", '{"image": 2}'], {"image": 2}),
    "max_cpu_loras": (["--max-cpu-loras", "9"], 9),
    "opt_level": (["-O1"], 1),
    "passes": (["--disable-pass", "a", "--disable-pass", "b"], {"a": False, "b": False}),
    "extra_passes": (["--extra-pass", "a:b", "--extra-pass", "c.py:d"], ("a:b", "c.py:d")),
    "logits_processors": (["--logits-processor", "a:b"], ("a:b",)),
    "seed": (["--seed", "7"], 7),
}


def parse(*words: str, positional_model: bool = True) -> EngineConfig:
    """The config that a command with the engine's flags gets from `words`."""
    app = typer.Typer()
    seen: list[EngineConfig] = []

    @app.command(cls=HelpCommand)
    @engine_options(positional_model=positional_model)
    def command(config: EngineConfig) -> None:
        seen.append(config)

    app(list(words), standalone_mode=False)
    return seen[0]


def test_every_field_has_a_flag_and_an_example() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert {entry.field for entry in ENGINE_OPTIONS} == fields
    assert set(EXAMPLES) == fields
    flags = [flag for entry in ENGINE_OPTIONS for flag in entry.all_flags]
    assert len(flags) == len(set(flags))


def test_no_flags_give_the_default_config() -> None:
    assert parse() == EngineConfig()


@pytest.mark.parametrize("field", sorted(EXAMPLES))
def test_flag_sets_its_field_and_no_other(field: str) -> None:
    words, value = EXAMPLES[field]
    assert getattr(EngineConfig(), field) != value
    assert parse(*words) == dataclasses.replace(EngineConfig(), **{field: value})


@pytest.mark.parametrize("field", sorted(EXAMPLES))
def test_environment_variable_sets_the_field(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, value = EXAMPLES[field]
    given = [word for word in words if not word.startswith("-")]
    name = "LLMC_" + FLAG_OF_FIELD[field].removeprefix("--").replace("-", "_").upper()
    text = " ".join(given) if given else "1" if field == "opt_level" else str(value)
    monkeypatch.setenv(name, text)
    assert getattr(parse(), field) == value


def test_flag_beats_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_MAX_MODEL_LEN", "100")
    assert parse("--max-model-len", "50").max_model_len == 50


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 2**20), ("auto", None), ("-1", None)],
)
def test_tokens_are_counted_as_vllm_does(text: str, tokens: int | None) -> None:
    assert parse("--max-model-len", text).max_model_len == tokens
    if tokens is not None:
        assert parse("--max-num-batched-tokens", text).max_num_batched_tokens == tokens


def test_model_can_be_positional() -> None:
    assert parse("a/b").model == "a/b"
    assert parse("a/b", "--model", "a/b").model == "a/b"
    with pytest.raises(ConfigError, match="two models were given: 'a/b' and --model 'c/d'"):
        parse("a/b", "--model", "c/d")


@pytest.mark.parametrize("spelling", [["-O", "2"], ["-O2"], ["--opt-level", "2"],
                                      ["--optimization-level=2"]])  # fmt: skip
def test_optimization_level_spellings(spelling: list[str]) -> None:
    assert parse(*spelling).opt_level == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs must be a positive integer, got 0"),
        (["--block-size", "24"], "--block-size must be a power of two"),
        (["--cuda-graph-buckets", "1,x"], "--cuda-graph-buckets must be sizes such as 1,2,4,8"),
        (["--cuda-graph-buckets", "0"], "--cuda-graph-buckets must be a positive integer, got 0"),
        (["--max-model-len", "1.5K"], "--max-model-len must be a number of tokens such as"),
        (["--max-num-batched-tokens", "x"], "--max-num-batched-tokens must be a number of tokens"),
        (["-O9"], "--opt-level must be 0, 1, 2 or 3, got 9"),
        (["--dtype", "int3"], "unknown dtype 'int3'; choose one of auto"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory must be a positive integer, got 0"),
    ],
)
def test_bad_values_are_reported_by_flag(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    assert name_flags(str(caught.value)).startswith(message)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("block_size must be even", "--block-size must be even"),
        ("seed must be an integer", "--seed must be an integer"),
        (
            "this machine's memory is full; lower max_model_len or raise kv_cache_memory",
            "this machine's memory is full; lower --max-model-len or raise --kv-cache-memory",
        ),
        ("start it with enable_lora (--enable-lora)", "start it with --enable-lora"),
        (
            "the limit is limit_mm_per_prompt (--limit-mm-per-prompt '{\"image\": N}')",
            "the limit is --limit-mm-per-prompt '{\"image\": N}'",
        ),
        (
            "ssl_keyfile and ssl_ca_certs need a certificate: ssl_certfile",
            "--ssl-keyfile and --ssl-ca-certs need a certificate: --ssl-certfile",
        ),
        ("so max_model_len=64 works", "so --max-model-len=64 works"),
        ("batch_dir is not a folder", "--batch-dir is not a folder"),
        ("port 8000 is in use", "port 8000 is in use"),
    ],
)
def test_fields_in_messages_become_flags(message: str, shown: str) -> None:
    assert name_flags(message) == shown


@pytest.mark.parametrize(
    "message",
    [
        "no model in dtype/seed",
        "models are many",
        "model.safetensors is cut off",
        "tokenizer.chat_template is not a string",
        "unknown key 'block_size'; set it in \"block_size\"",
        "can't read /data/block_size/block_size.json",
        "my_block_size and --block_size",
    ],
)
def test_other_words_in_messages_stay(message: str) -> None:
    assert name_flags(message) == message


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("512M", 2**29), ("2G", 2**31), ("1.5g", 3 * 2**29), ("2GiB", 2**31),
     ("4kb", 4096)],
)  # fmt: skip
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "1e9", "2X", "G"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a number of bytes"):
        parse_size(text)
