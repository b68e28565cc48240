"""Command lines of `vllm serve`: what llmc makes of each flag."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from llmc.cli.main import app, main
from llmc.cli.ported_flags import hint, port
from llmc.cli.serve import _lora_modules
from llmc.errors import ConfigError
from llmc.frontend.engine_options import make_config
from llmc.frontend.ported_options import (
    NOT_NEEDED,
    NOT_NEEDED_WITH_VALUE,
    REFUSED,
    RENAMED,
    VALUES,
    WRITTEN,
)

LINES = {
    "m -tp 2 -pp 1 --enforce-eager": "m --tensor-parallel-size 2 -O0",
    "m --pipeline_parallel_size=1 --max_seq_len=99": "m --max-model-len 99",
    "m --quantization awq --kv-cache-dtype fp8": "m --kv-cache-dtype fp8_e4m3",
    "m --quantization=int8 --kv-cache-dtype auto": "m --quantization int8 --kv-cache-dtype auto",
    "m --swap-space 4 --port 9": "m --swap-space 4G --port 9",
    "m --swap-space 4G": "m --swap-space 4G",
    "m --swap-space 1048576": "m --swap-space 1048576",
    "m --served-model-name a b --port 9": "m --served-model-name a --served-model-name b --port 9",
    "--served-model-name a m": "--served-model-name a m",
    "m --api-key -a b --port 9": "m --api-key -a --api-key b --port 9",
    "m --api_key=-a --port 9": "m --api-key=-a --port 9",
    "m --port 9 --api-key": "m --port 9 --api-key",  # typer refuses it: never no key
    "m --disable-log-requests --uvicorn-log-level error": "m --no-access-log --log-level error",
    "m --enable-auto-tool-choice --tool-call-parser hermes": "m",
    "m --runner pooling": "m --task pooling",
    "m --runner auto --convert embed": "m --task embed",
    "m --api-server-count 2 --generation-config auto": "m --api-workers 2",
    "m --generation-config=vllm --top_k 20 --port 9": (
        'm --port 9 --override-generation-config={"temperature":1.0,"top_p":1.0,"top_k":20,'
        '"min_p":0.0,"repetition_penalty":1.0}'
    ),
    'm --override-generation-config={"temperature":0.7} --generation-config vllm': (
        'm --override-generation-config={"temperature":0.7,"top_p":1.0,"top_k":0,"min_p":0.0,'
        '"repetition_penalty":1.0}'
    ),
    "-m m --temp 0.7 --top-k=-1 --repeat-penalty 1.1": (
        '--model m --override-generation-config={"temperature":0.7,"top_k":-1,'
        '"repetition_penalty":1.1}'
    ),
    "-m m --repeat-penalty 1.1 --repeat-last-n 0": (
        '--model m --override-generation-config={"repetition_penalty":1.1,"repeat_last_n":0}'
    ),
    "-hf a/b:Q4_K_M --jinja --alias c": ("--model a/b:Q4_K_M --served-model-name c"),
    "m --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768": (
        'm --hf-overrides={"rope_parameters":{"rope_type":"yarn","factor":4,'
        '"original_max_position_embeddings":32768}}'
    ),
    'm --rope-scaling {"rope_type":"yarn","factor":4.0} --rope-theta=5e5 --hf-overrides {"a":1}': (
        'm --hf-overrides={"rope_parameters":{"rope_type":"yarn","factor":4.0,'
        '"rope_theta":500000.0},"a":1}'
    ),
    "m --hf-overrides.text_config.a 2": 'm --hf-overrides={"text_config":{"a":2}}',
    "m --override-generation-config x": "m --override-generation-config x",
    'm --preferred-sampling-params {"top_p":0.5}': 'm --override-generation-config={"top_p":0.5}',
    "m --default-chat-template-kwargs.enable_thinking false": (
        'm --default-chat-template-kwargs={"enable_thinking":false}'
    ),
    "--model m --served-model-name a b": "--model m --served-model-name a --served-model-name b",
    "-m m -ngl 99 -c 8k --jinja -fa on": "--model m --max-model-len 8k",
    "-m m -c 0 --timeout 600 --keep -1 --mmap --api-prefix /x": (
        "--model m --max-model-len auto --root-path /x"
    ),
    "m --ctx-size=0": "m --max-model-len auto",
    "-m m -ctk f16": "--model m --kv-cache-dtype float16",
    "m --cache-type-v=bf16": "m --kv-cache-dtype bfloat16",
    "m -ctk q8_0 -ctv q8_0": "m --kv-cache-dtype int8 --kv-cache-dtype int8",
    "m --kv-cache-dtype int8_per_token_head": "m --kv-cache-dtype int8",
    "m --limit-mm-per-prompt.image 2": 'm --limit-mm-per-prompt={"image":2}',
    "m --structured-outputs-config.backend=x": "m",
    "m --max_batch_size 8 --max_num_tokens=64 --pp_size 1 --backend pytorch": (
        "m --max-num-seqs 8 --max-num-batched-tokens 64"
    ),
    "--model-path m --page-size 32 --disable-overlap-schedule --ep-size 1": (
        "--model m --block-size 32 --no-async-scheduling"
    ),
    "-m m -fa -ngl 99 --mm-processor-cache-gb -1 --port 9": "--model m --port 9",
    "m --enable-chunked-prefill=True --enforce-eager true": "m -O0",
    "m --language-model-only --mm-encoder-tp-mode data": 'm --limit-mm-per-prompt {"image":0}',
    "m --speculative-config.method ngram --speculative_config.num_speculative_tokens=3": (
        'm --speculative-config={"method":"ngram","num_speculative_tokens":3}'
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_written_as_ours(line: str) -> None:
    words = [re.sub(r"\s", "", word) for word in port(line.split()).words]
    assert words == LINES[line].split()


def test_every_word_of_ours_is_an_option_of_serve() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    mine = {*RENAMED.values(), *(words[0] for words in WRITTEN.values())}
    assert {flag[:2] if flag.startswith("-O") else flag for flag in mine} <= known | {"-O"}
    theirs = {*RENAMED, *WRITTEN, *NOT_NEEDED, *NOT_NEEDED_WITH_VALUE, *VALUES, *REFUSED}
    assert not theirs & known, "an option of ours needs no translation"
    assert all(hint(flag) for flag in theirs)


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        port(
            [
                "m",
                "--enable-expert-parallel",
                "--hf-config-path",
                "a",
                "b",
                "-pp",
                "4",
                "--download-dir",
                "k",
                "--port",
                "9",
            ]
        )
    names = ("--enable-expert-parallel", "--hf-config-path", "-pp 4", "--download-dir")
    for name in (f"{name} (" for name in names):
        assert name in str(caught.value)


REFUSED_LINES = [
    "--hf-repo a/b --hf-file c.gguf",
    "-m m --cache-type-k q4_0 -ctv q4_0",
    "m -O.cudagraph_mode=FULL",
    "m --cudagraph-capture-sizes 1 2 4",
    "m --enable-chunked-prefill False",
    "m --ep-size 8 --nnodes 2",
    "m --kv_cache_free_gpu_memory_fraction 0.9 --extra_llm_api_options x.yml",
]


@pytest.mark.parametrize("line", REFUSED_LINES)
def test_lines_of_other_engines_are_refused_with_advice_for_each_flag(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        port(line.split(), {"-O": True, "-h": False, "--help": False})
    told = str(caught.value)
    assert "has no option" not in told, told
    for flag in (word.partition("=")[0] for word in line.split() if word[0] == "-"):
        named = "-cc" if flag.startswith("-O.") else flag.replace("_", "-")
        assert flag in ("-m", "--hf-repo") or re.search(rf"{named}\b.*\(\w+", told), told


def test_unknown_short_flags_are_told_too() -> None:
    options = {"-O": True, "-h": False, "--port": True}
    with pytest.raises(ConfigError, match="no option -x, -dev, --foo"):
        port(["m", "-O3", "-x", "-dev", "none", "--port", "-1", "--foo"], options)


def test_flags_that_nobody_knows_are_told_with_those_that_are_refused() -> None:
    options = {"--port": True, "--max-num-seqs": True, "--enable-lora": False}
    line = "m --foo 1 --max_num_seqs=3 --bar=2 --port --x --max-num-sqs 4 --hf-config-path a"
    with pytest.raises(ConfigError) as caught:
        port(line.split(), options)
    told = "--foo, --bar, --max-num-sqs (did you mean --max-num-seqs?)"
    assert f"no option {told}; and it does not support --hf-config-path (" in str(caught.value)
    known = "m --max_num_seqs=3 --enable_lora --port 9"
    assert port(known.split(), options).words == known.replace("_", "-").split()


def test_a_factor_for_rotary_embeddings_needs_a_kind() -> None:
    with pytest.raises(ConfigError, match="needs --rope-scaling linear or yarn"):
        port(["m", "--rope-scale", "4"])
    for wrong in ("dynamic", "[1]"):
        with pytest.raises(ConfigError, match="must be none, linear, yarn or a JSON object"):
            port(["m", "--rope-scaling", wrong])


def test_adapters_may_stand_in_a_row() -> None:
    words = ["m", "--enable-lora", "--lora-modules", "a=b", "c=d", "--max-lora-rank", "9"]
    want = ["m", "--enable-lora", "--lora-modules", "a=b", "--lora-modules", "c=d"]
    assert port(words).words == [*want, "--max-lora-rank", "9"]


def test_adapters_may_stand_in_a_row_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step=9").mkdir()
    for first in (["--lora-modules", "a=b"], ["--lora-modules=a=b"]):
        words = ["--enable-lora", *first, "c=d", '{"name": "e", "path": "f"}', "--port", "1"]
        rest = ["--lora-modules", "c=d", "--lora-modules", words[-3]]
        assert port(words).words == ["--enable-lora", *first, *rest, "--port", "1"]
        for model in ("m", "step=9"):
            assert port([*first, "c=d", model]).words == [*first, "--lora-modules", "c=d", model]


def test_what_adapters_may_be_given_as() -> None:
    for words in (
        ["a=b", "c=d=e"],
        ['{"name": "a", "path": "b", "base_model_name": "m"}', "c=d=e"],
        ['[{"name": "a", "path": "b"}, {"name": "c", "path": "d=e"}]'],
    ):
        assert _lora_modules(words) == {"a": "b", "c": "d=e"}
    for word in (
        "a",
        "=b",
        "a=",
        "{a: b}",
        '{"name": "a"}',
        '["a=b"]',
        '[{"name": 1, "path": ""}]',
    ):
        with pytest.raises(ConfigError, match=re.escape(f"got {word!r}")):
            _lora_modules(["x=y", word])
    assert _lora_modules([]) == _lora_modules(["[]"]) == {}
    with pytest.raises(ConfigError, match="two adapters called 'a'; give each another name"):
        _lora_modules(["a=b", '{"name": "a", "path": "c"}'])


def test_variables_have_no_effect_but_for_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert main(["serve", "--port", "x"]) == 2
    told = capsys.readouterr().err
    assert "VLLM_USE_V1 (" in told and "VLLM_API_KEY" not in told
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert list(serve.make_context("serve", []).params["api_key"]) == ["very-secret"]
    monkeypatch.setenv("LLMC_API_KEY", "ours")
    assert list(serve.make_context("serve", []).params["api_key"]) == ["ours"]


def test_what_is_left_out_is_told_with_the_reason() -> None:
    ported = port(["m", "--enable-chunked-prefill", "--quantization", "gptq"])
    assert ported.words == ["m"]
    assert set(ported.left_out) == {"--enable-chunked-prefill", "--quantization"}
    assert all(ported.left_out.values())


def test_flags_of_their_benchmarks_get_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--dataset-name", "random"]) == 2
    assert "hint: prompts are random with --random-input-len" in capsys.readouterr().err
    assert main(["bench", "serve", "--save-result"]) == 2
    assert "--output-json FILE" in capsys.readouterr().err


def test_origins_are_json() -> None:
    origins = json.dumps(["http://a", "*"])
    words = port(["m", "--allowed-origins", origins]).words
    assert words == ["m", "--allowed-origin", "http://a", "--allowed-origin", "*"]
    for wrong in ("*", "{}", "[1]"):
        with pytest.raises(ConfigError, match="JSON list"):
            port(["m", "--allowed-origins", wrong])
    with pytest.raises(ConfigError, match="--max-seq-len needs a value"):
        port(["m", "--max-seq-len"])


def test_names_are_those_of_the_docs() -> None:
    docs = Path(__file__).parents[2] / "docs" / "server.md"
    named = set(re.findall(r"^\| `(--?[-\w]+)", docs.read_text(encoding="utf-8"), re.MULTILINE))
    assert {*RENAMED, *WRITTEN, *NOT_NEEDED, *NOT_NEEDED_WITH_VALUE, *VALUES, *REFUSED} <= named


def test_keywords_are_written_as_ours(caplog: pytest.LogCaptureFixture) -> None:
    theirs = {
        "enforce_eager": True,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 2,
        "quantization": "awq",
        "kv_cache_dtype": "fp8",
        "swap_space": 4,
        "max_seq_len": 99,
        "disable_custom_all_reduce": True,
    }
    config = make_config("m", theirs)
    assert (config.opt_level, config.quantization, config.max_model_len) == (0, None, 99)
    assert (config.kv_cache_dtype, config.swap_space) == ("fp8_e4m3", 4 * 2**30)
    assert config.tensor_parallel_size == 2
    assert "pipeline_parallel_size (llmc always does 1)" in caplog.text
    assert "quantization" in caplog.text and "disable_custom_all_reduce" in caplog.text
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 \(.*hf_config_path \("):
        make_config("m", {"pipeline_parallel_size": 2, "hf_config_path": "a"})
    rope = {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1.0}
    given = {**rope, "hf_overrides": {"rope_theta": 2.0}}
    assert make_config("m", rope).hf_overrides == rope
    assert make_config("m", given).hf_overrides == {**rope, "rope_theta": 2.0}
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        make_config("m", {"max_num_seq": 2})
