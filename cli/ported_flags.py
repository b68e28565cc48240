"""Flags of `vllm serve` on the command line of `llmc serve`: taken, written as ours, or refused.

A command line that worked elsewhere should start, or say everything that it can't have at once. A
flag that asks for what is there anyway is left out with one warning for all of these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmc.errors import ConfigError

_ONE_DEVICE = "llmc runs on one device; start one server for each"
_MERGE_LORA = "llmc does not load LoRA adapters; merge them into the model first"
_TEMPLATE = "the format is read off the model's chat template"
_NO_TLS = "there is no TLS; put a proxy before the server"

# The same value under another name.
RENAMED: Mapping[str, str] = {
    "--api-server-count": "--api-workers",
    "--uvicorn-log-level": "--log-level",
    "--max-seq-len": "--max-model-len",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--model-path": "--model",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
}
# Switches that are written otherwise.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "--enforce-eager": ("-O0",),
    "--disable-uvicorn-access-log": ("--no-access-log",),
    "--disable-log-requests": ("--no-access-log",),
    "--no-enable-log-requests": ("--no-access-log",),
}
# Left out, for what they ask is there anyway or means nothing here: switches, then with a value.
NOT_NEEDED: Mapping[str, str] = {
    "--enable-auto-tool-choice": _TEMPLATE,
    "--enable-chunked-prefill": "chunked prefill is always on",
    "--disable-log-stats": "--log-level sets what is logged",
    "--enable-prompt-tokens-details": "usage always has them",
    "--enable-request-id-headers": "answers always have them",
    "--disable-custom-all-reduce": "there is one device",
    "--disable-fastapi-docs": "there is no such page",
    "--no-enable-log-outputs": "outputs are never logged",
    "--enable-log-requests": "the access log is on",
}
NOT_NEEDED_WITH_VALUE: Mapping[str, str] = {
    "--tool-call-parser": _TEMPLATE,
    "--chat-template-content-format": _TEMPLATE,
    "--generation-config": "the model's own is used; requests override it",
    "--guided-decoding-backend": "grammars have one implementation",
    "--structured-outputs-config": "grammars have one implementation",
    "--distributed-executor-backend": "there is one device",
    "--max-seq-len-to-capture": "graphs are captured by batch size (--cuda-graph-buckets)",
    "--max-parallel-loading-workers": "weights are read once, in order",
    "--tokenizer-pool-size": "--api-workers answer HTTP, tokenizers included",
    "--max-log-len": "prompts are never logged",
    "--response-role": "it is assistant",
    "--num-lookahead-slots": "blocks are taken as they are needed",
}
# Left out for these values alone; what to do for others.
VALUES: Mapping[str, tuple[frozenset[str], str]] = {
    "--tensor-parallel-size": (frozenset({"1"}), _ONE_DEVICE),
    "-tp": (frozenset({"1"}), _ONE_DEVICE),
    "--pipeline-parallel-size": (frozenset({"1"}), _ONE_DEVICE),
    "-pp": (frozenset({"1"}), _ONE_DEVICE),
    "--data-parallel-size": (frozenset({"1"}), "start one llmc server for each device"),
    "-dp": (frozenset({"1"}), "start one llmc server for each device"),
    "--num-scheduler-steps": (frozenset({"1"}), "a step draws one token a request"),
    "--tokenizer-mode": (frozenset({"auto", "hf"}), "only tokenizers of Hugging Face are read"),
    "--cpu-offload-gb": (frozenset({"0"}), "weights stay on one device; take fewer bits with -q"),
    "--task": (frozenset({"auto", "generate"}), "llmc generates; it serves no other task"),
    "--runner": (frozenset({"auto", "generate"}), "llmc generates; it serves no other task"),
    "--model-impl": (frozenset({"auto", "transformers"}), "models run from transformers' code"),
    "--config-format": (frozenset({"auto", "hf"}), "only config.json is read"),
}
REFUSED: Mapping[str, str] = {
    "--compilation-config": "choose a level with -O0 to -O3, and passes with --disable-pass",
    "--no-enable-chunked-prefill": "chunked prefill is always on; raise --max-num-batched-tokens",
    "--enable-expert-parallel": _ONE_DEVICE,
    "--enable-lora": _MERGE_LORA,
    "--lora-modules": _MERGE_LORA,
    "--max-loras": _MERGE_LORA,
    "--max-lora-rank": _MERGE_LORA,
    "--max-cpu-loras": _MERGE_LORA,
    "--reasoning-parser": "reasoning stays in the answer's text; leave the option out",
    "--tool-parser-plugin": _TEMPLATE + "; leave the option out",
    "--hf-overrides": "change config.json in a copy of the model's directory",
    "--rope-scaling": "change config.json in a copy of the model's directory",
    "--rope-theta": "change config.json in a copy of the model's directory",
    "--hf-token": "set HF_TOKEN",
    "--download-dir": "set HF_HOME",
    "--ssl-keyfile": _NO_TLS,
    "--ssl-certfile": _NO_TLS,
    "--ssl-ca-certs": _NO_TLS,
    "--root-path": "let the proxy take the path off",
    "--middleware": "put a proxy before the server",
    "--otlp-traces-endpoint": "there are no traces yet; /metrics has the times",
    "--limit-mm-per-prompt": "models are served as text models",
    "--mm-processor-kwargs": "models are served as text models",
    "--override-generation-config": "send the parameters with each request",
    "--kv-transfer-config": "blocks stay on one device",
    "--num-gpu-blocks-override": "set the cache in bytes with --kv-cache-memory",
    "--speculative-model": 'give --speculative-config \'{"method":"draft_model","model":...}\'',
    "--config": "write the options on the command line, or as LLMC_... in the environment",
}
# Formats that a checkpoint is stored in: it is served as it is.
STORED = frozenset(
    [
        "awq",
        "awq_marlin",
        "gptq",
        "gptq_marlin",
        "compressed-tensors",
        "mxfp4",
        "gguf",
        "fbgemm_fp8",
        "auto",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """`words` of a command line of ours, and what was left out, with the reason."""

    words: list[str]
    left_out: dict[str, str]


def _quantization(value: str, left_out: dict[str, str]) -> list[str]:
    if value not in STORED:
        return ["--quantization", value]
    left_out["--quantization"] = "a quantized checkpoint is served as it is stored"
    return []


def _kv_cache_dtype(value: str, left_out: dict[str, str]) -> list[str]:
    return ["--kv-cache-dtype", "fp8_e4m3" if value == "fp8" else value]


def _swap_space(value: str, left_out: dict[str, str]) -> list[str]:
    """In GiB there, in bytes here: no swap space has fewer than 1024 of these."""
    is_gib = re.fullmatch(r"\d+(\.\d+)?", value) and float(value) < 1024
    return ["--swap-space", f"{value}G" if is_gib else value]


def _allowed_origins(value: str, left_out: dict[str, str]) -> list[str]:
    try:
        origins = json.loads(value)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(one, str) for one in origins):
        raise ConfigError(f"--allowed-origins must be a JSON list of texts, got {value!r:.80}")
    return [word for origin in origins for word in ("--allowed-origin", origin)]


_TRANSLATED: Mapping[str, Callable[[str, dict[str, str]], list[str]]] = {
    "--quantization": _quantization,
    "-q": _quantization,
    "--kv-cache-dtype": _kv_cache_dtype,
    "--swap-space": _swap_space,
    "--allowed-origins": _allowed_origins,
}
_SEVERAL = ("--served-model-name", "--api-key")  # values in a row, behind a first word MODEL


def port(words: Sequence[str]) -> Ported:
    """Words of `llmc serve`, in which vLLM's flags may stand, as ours alone.

    Raises ConfigError that names every flag that can't be had, and what to do.
    """
    out: list[str] = []
    left_out: dict[str, str] = {}
    refused: dict[str, str] = {}
    rest = [word for given in words for word in _split(given)]
    has_model = bool(rest) and not rest[0].startswith("-")
    while rest:
        name = rest.pop(0)
        if name in WRITTEN:
            out += WRITTEN[name]
        elif name in NOT_NEEDED:
            left_out[name] = NOT_NEEDED[name]
        elif name in _SEVERAL and has_model:
            while rest and not rest[0].startswith("-"):
                out += [name, rest.pop(0)]
        elif name in REFUSED:
            refused[name] = REFUSED[name]
            while rest and not rest[0].startswith("-"):
                rest.pop(0)
        elif not _takes_value(name):
            out.append(name)
        elif not rest:
            raise ConfigError(f"{name} needs a value")
        else:
            value = rest.pop(0)
            if name in RENAMED:
                out += [RENAMED[name], value]
            elif name in _TRANSLATED:
                out += _TRANSLATED[name](value, left_out)
            elif name in NOT_NEEDED_WITH_VALUE:
                left_out[name] = NOT_NEEDED_WITH_VALUE[name]
            elif value in VALUES[name][0]:
                left_out[name] = f"{value} is what llmc does"
            else:
                refused[f"{name} {value}"] = VALUES[name][1]
    if refused:
        reasons = "; ".join(f"{name} ({why})" for name, why in refused.items())
        raise ConfigError(f"llmc serve can't have {reasons}")
    return Ported(words=out, left_out=left_out)


def _takes_value(name: str) -> bool:
    tables: tuple[Mapping[str, object], ...] = (
        RENAMED, _TRANSLATED, NOT_NEEDED_WITH_VALUE, VALUES,
    )  # fmt: skip
    return any(name in table for table in tables)


def _split(word: str) -> list[str]:
    """`--a_b=c` as `--a-b`, `c`, where a table has that flag: vLLM takes both spellings."""
    name, equals, value = word.partition("=")
    if not name.startswith("-"):
        return [word]
    known = name.replace("_", "-")
    tables = (WRITTEN, NOT_NEEDED, REFUSED)
    if not (_takes_value(known) or any(known in t for t in tables) or known in _SEVERAL):
        return [word]
    return [known, value] if equals else [known]


def hint(name: str) -> str | None:
    """What to do about a flag that another command has no option for."""
    if name in RENAMED:
        return f"the option is called {RENAMED[name]}"
    if name in WRITTEN:
        return f"write {' '.join(WRITTEN[name])}"
    if name in VALUES:
        return VALUES[name][1]
    for table in (NOT_NEEDED, NOT_NEEDED_WITH_VALUE):
        if name in table:
            return f"{table[name]}; leave the option out"
    return REFUSED.get(name)
