"""vLLM options that llmc accepts, translates or refuses, for `llmc serve` and `LLM(...)`.

Names are those of flags; keywords are the same with underscores.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from llmc.errors import ConfigError
from llmc.sampling_params import MAX_LOGPROBS

log = logging.getLogger(__name__)

_ONE_STAGE = "pipeline parallelism is not supported: use --tensor-parallel-size"
_TEMPLATE = "the format is inferred from the model's chat template"
_KERNELS = "kernels are chosen by device and model"
_PAGES = "weights are read once, into separate memory"
_ONE_DEVICE = "all layers are on one device: --device"
_STEP = "--max-num-batched-tokens limits a step"

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
    "-tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--dp": "--data-parallel-size",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--tokenizer-path": "--tokenizer",
    "--random-seed": "--seed",
    "-m": "--model",
    "-c": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
}
# Switches that are written differently.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "--enforce-eager": ("-O0",),
    "--disable-uvicorn-access-log": ("--no-access-log",),
    "--disable-log-requests": ("--no-access-log",),
    "--no-enable-log-requests": ("--no-access-log",),
    "--disable-radix-cache": ("--no-enable-prefix-caching",),
    "--disable-cuda-graph": ("-O0",),
    "--embedding": ("--task", "embed"),
    "--embeddings": ("--task", "embed"),
    "--is-embedding": ("--task", "embed"),
}
# Ignored, because they are always on or have no meaning here: switches, then options with a value.
NOT_NEEDED: Mapping[str, str] = {
    "--enable-auto-tool-choice": _TEMPLATE,
    "--enable-chunked-prefill": "chunked prefill is always on",
    "--disable-log-stats": "--log-level sets what is logged",
    "--enable-prompt-tokens-details": "usage always has them",
    "--enable-request-id-headers": "responses always have them",
    "--disable-custom-all-reduce": "ranks only use NCCL or gloo for all-reduce",
    "--disable-fastapi-docs": "--no-ui disables all pages",
    "--no-enable-log-outputs": "outputs are never logged",
    "--enable-log-requests": "the access log is on",
    "--disable-cascade-attn": _KERNELS,
    "--disable-hybrid-kv-cache-manager": "--disable-pass group_caches does it",
    "--skip-mm-profiling": "--limit-mm-per-prompt says how many images there may be",
    "--enable-server-load-tracking": "/load always has it",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info is always there",
    "--enable-sleep-mode": "/sleep is the operator's: --admin-api-key",
    "--exclude-tools-when-tool-choice-none": "they are left out of the prompt",
    "--use-tqdm-on-load": "phases are shown as they end",
    "--no-use-tqdm-on-load": "phases are shown as they end",
    "--worker-use-ray": "--distributed-executor-backend ray does it",
    "--calculate-kv-scales": "an 8-bit cache takes no scales",
    "--jinja": "chat templates are always Jinja",
    "--cont-batching": "batching is always continuous",
    "--metrics": "/metrics is always there",
    "--mlock": _PAGES,
    "--no-mmap": _PAGES,
}
NOT_NEEDED_WITH_VALUE: Mapping[str, str] = {
    "--tool-call-parser": _TEMPLATE + "; --tool-format overrides it",
    "--reasoning-parser": _TEMPLATE,
    "--chat-template-content-format": _TEMPLATE,
    "--generation-config": "the model's own is used; requests override it",
    "--guided-decoding-backend": "there is only one implementation",
    "--structured-outputs-config": "there is only one implementation",
    "--max-seq-len-to-capture": "graphs are captured by batch size (--cuda-graph-buckets)",
    "--max-parallel-loading-workers": "weights are read once, in order",
    "--tokenizer-pool-size": "--api-workers run HTTP, including tokenizers",
    "--max-log-len": "prompts are never logged",
    "--response-role": "the role is always assistant",
    "--num-lookahead-slots": "blocks are allocated as needed",
    "--attention-backend": _KERNELS,
    "--moe-backend": _KERNELS,
    "--flash-attn": _KERNELS,
    "-fa": _KERNELS,
    "--grammar-backend": "grammars have one implementation",
    "--reasoning-config": _TEMPLATE,
    "--mm-processor-cache-gb": "images are processed for each request",
    "--max-num-partial-prefills": "a step computes as many as its token budget allows",
    "--max-long-partial-prefills": "a step computes as many as its token budget allows",
    "--long-prefill-token-threshold": _STEP,
    "--ignore-patterns": "weights that are stored twice are not downloaded",
    "--code-revision": "--revision is for code too",
    "--n-gpu-layers": _ONE_DEVICE,
    "--gpu-layers": _ONE_DEVICE,
    "-ngl": _ONE_DEVICE,
    "--cudagraph-capture-sizes": "use --cuda-graph-buckets",
    "--max-cudagraph-capture-size": "use --cuda-graph-buckets",
    "--batch-size": _STEP,
    "-b": _STEP,
    "--ubatch-size": _STEP,
    "-ub": _STEP,
}
# Ignored for these values only, with advice for other values.
VALUES: Mapping[str, tuple[frozenset[str], str]] = {
    "--pipeline-parallel-size": (frozenset({"1"}), _ONE_STAGE),
    "-pp": (frozenset({"1"}), _ONE_STAGE),
    "--num-scheduler-steps": (frozenset({"1"}), "a step samples one token per request"),
    "--tokenizer-mode": (frozenset({"auto", "hf"}), "only Hugging Face tokenizers are supported"),
    "--cpu-offload-gb": (frozenset({"0"}), "weights stay on one device; use fewer bits with -q"),
    "--model-impl": (frozenset({"auto", "transformers"}), "models run from transformers' code"),
    "--ssl-cert-reqs": (frozenset({"0"}), "--ssl-ca-certs requires client certificates"),
    "--config-format": (frozenset({"auto", "hf"}), "only config.json is read"),
    "--logprobs-mode": (frozenset({"raw_logprobs"}), "log-probabilities are the model's own"),
    "--max-logprobs": (frozenset(map(str, range(MAX_LOGPROBS + 1))), f"{MAX_LOGPROBS} is the most"),
    "--schedule-policy": (frozenset({"fcfs", "lpm"}), "choose with --scheduling-policy"),
}
REFUSED: Mapping[str, str] = {
    "--compilation-config": "choose a level with -O0 to -O3, and passes with --disable-pass",
    "--no-enable-chunked-prefill": "chunked prefill is always on; raise --max-num-batched-tokens",
    "--enable-expert-parallel": "experts are split by width, with --tensor-parallel-size",
    "--tool-parser-plugin": _TEMPLATE + "; --tool-format overrides it",
    "--hf-overrides": "change config.json in a copy of the model's directory",
    "--rope-scaling": "change config.json in a copy of the model's directory",
    "--rope-theta": "change config.json in a copy of the model's directory",
    "--hf-token": "set HF_TOKEN",
    "--download-dir": "set HF_HOME",
    "--middleware": "put a proxy in front of the server",
    "--mm-processor-kwargs": "images are processed as the model's files specify",
    "--override-generation-config": "send the parameters with each request",
    "--pooler-config": "choose with --task, --pooling and --normalize",
    "--override-pooler-config": "choose with --task, --pooling and --normalize",
    "--kv-transfer-config": "blocks stay on one device",
    "--kv-events-config": "blocks stay on one device",
    "--threads": "set OMP_NUM_THREADS; by default all cores are used",
    "-t": "set OMP_NUM_THREADS; by default all cores are used",
    "--allowed-local-media-path": "send images as data URLs",
    "--trust-request-chat-template": "give the template with --chat-template",
    "--num-gpu-blocks-override": "set the cache size in bytes with --kv-cache-memory",
    "--speculative-model": 'give --speculative-config \'{"method":"draft_model","model":...}\'',
}
# Values of `--runner` and `--convert` as values of --task; None: as the model's files say.
RUNNERS: Mapping[str, Mapping[str, str | None]] = {
    "--runner": {"auto": None, "generate": "generate", "pooling": "pooling"},
    "--convert": {
        "auto": None,
        "none": None,
        "embed": "embed",
        "classify": "classify",
        "reward": "reward",
    },
}
MAX_GIB = 1024  # of swap space; a larger number is bytes
# Formats of quantized checkpoints, which are served in their stored format.
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


def listed(options: Mapping[str, str]) -> str:
    """The names, each with its reason."""
    return "; ".join(f"{name} ({why})" for name, why in options.items())


def task_of(flag: str, value: object) -> str | None:
    """The task that `--runner` or `--convert` selects; None leaves it to the model's files."""
    tasks = RUNNERS[flag]
    if value not in tasks:
        raise ConfigError(f"{flag} {value!s:.80} is not supported; it can be {', '.join(tasks)}")
    return tasks[str(value)]


def say_left_out(options: Mapping[str, str]) -> str:
    """One sentence for all options that are ignored."""
    return f"ignoring options that llmc does not need: {listed(options)}"


def port_keywords(options: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Translate keywords of `LLM(...)`, which can include vLLM's, to ours. `known` are ours.

    Raises ConfigError that names every unsupported keyword of vLLM, and what to do instead.
    """
    out: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if name == "quantization" and value in STORED:
            left_out[name] = "a quantized checkpoint is served in its stored format"
        elif name == "kv_cache_dtype" and value == "fp8":
            out[name] = "fp8_e4m3"
        elif name == "swap_space" and isinstance(value, int | float) and 0 < value < MAX_GIB:
            out[name] = int(value * 2**30)
        elif name == "max_model_len" and value in ("auto", -1):
            out[name] = None
        elif flag in RUNNERS:
            out |= {} if (task := task_of(flag, value)) is None else {"task": task}
        elif name in known:
            out[name] = value
        elif name == "enforce_eager":
            out |= {"opt_level": 0} if value else {}
        elif RENAMED.get(flag, "")[2:].replace("-", "_") in known:
            out[RENAMED[flag][2:].replace("-", "_")] = value
        elif flag in VALUES and str(value) in VALUES[flag][0]:
            left_out[name] = f"llmc always does {value}"
        elif flag in NOT_NEEDED or flag in NOT_NEEDED_WITH_VALUE:
            left_out[name] = NOT_NEEDED.get(flag) or NOT_NEEDED_WITH_VALUE[flag]
        elif flag in VALUES:
            refused[f"{name}={value}"] = VALUES[flag][1]
        elif flag in REFUSED:
            refused[name] = REFUSED[flag]
        else:
            out[name] = value  # make_config suggests the closest name
    if refused:
        raise ConfigError(f"llmc does not support {listed(refused)}")
    if left_out:
        log.warning("%s", say_left_out(left_out))
    return out
