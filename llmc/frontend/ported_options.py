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
_EXPERTS = "experts are split by width, with --tensor-parallel-size"
_CONFIG = "give --hf-overrides JSON with fields of config.json"
_THREADS = "set OMP_NUM_THREADS; by default all cores are used"
_GRAPHS = "give --cuda-graph-buckets 1,2,4"
_HUB = "give MODEL as owner/name:FORMAT or owner/name/FILE.gguf"
_NODES = "use --distributed-executor-backend ray for ranks on several machines"
_ENGINES = "all engines of --data-parallel-size run on this machine"
_DRAFTS = 'give --speculative-config \'{"method":"draft_model","model":...}\''
_CACHE_SIZE = "set the cache size in bytes with --kv-cache-memory"
_ADAPTERS = "give --lora-modules NAME=DIR, and NAME as the model of requests"
_ONE_CACHE = "all requests share one cache: --kv-cache-memory"

# The same value under another name.
RENAMED: Mapping[str, str] = {
    "--api-server-count": "--api-workers",
    "--uvicorn-log-level": "--log-level",
    "--max-seq-len": "--max-model-len",
    "--json-model-override-args": "--hf-overrides",
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
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
    "-c": "--max-model-len",
    "-np": "--max-num-seqs",
    "--max-batch-size": "--max-num-seqs",
    "--max-num-tokens": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--max-loras-per-batch": "--max-loras",
    "--tokenizer-worker-num": "--api-workers",
    "--chat-template-file": "--chat-template",
    "--preferred-sampling-params": "--override-generation-config",
    "--hf-revision": "--revision",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "-s": "--seed",
    "--parallel": "--max-num-seqs",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--api-prefix": "--root-path",
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
    "--rerank": ("--task", "score"),
    "--reranking": ("--task", "score"),
    "--language-model-only": ("--limit-mm-per-prompt", '{"image":0}'),
    "--disable-overlap-schedule": ("--no-async-scheduling",),
    "--enable-torch-compile": ("-O2",),
    "--no-webui": ("--no-ui",),
    "-v": ("--log-level", "debug"),
    "--verbose": ("--log-level", "debug"),
}
# The sampling parameter of requests that do not set it: a key of --override-generation-config.
SAMPLED: Mapping[str, str] = {
    "--temp": "temperature",
    "--temperature": "temperature",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--repeat-penalty": "repetition_penalty",
    "--repeat-last-n": "repeat_last_n",
    "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
}
# Fields of config.json that other servers make flags.
ROTARY: Mapping[str, str] = {
    "--rope-scale": "rope_parameters.factor",
    "--yarn-orig-ctx": "rope_parameters.original_max_position_embeddings",
    "--rope-theta": "rope_parameters.rope_theta",
    "--rope-freq-base": "rope_parameters.rope_theta",
}
_ROTARY = ("rope_scaling", "rope_theta")  # the same as keywords
# What `--generation-config vllm` puts in place of the model's sampling parameters.
NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
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
    "-cb": "batching is always continuous",
    "--enable-mixed-chunk": "chunked prefill is always on",
    "--enable-reasoning": _TEMPLATE,
    "--enable-metrics": "/metrics is always there",
    "--enable-cache-report": "usage always has it",
    "--log-requests": "the access log is on",
    "--enable-p2p-check": "ranks only use NCCL or gloo for all-reduce",
    "--enable-multimodal": "images are accepted by models that support them",
    "--enable-memory-saver": "/sleep is the operator's: --admin-api-key",
    "--skip-tokenizer-init": "a model without a tokenizer is served for token ids",
    "--skip-server-warmup": "start-up runs one step, to measure memory",
    "--no-warmup": "start-up runs one step, to measure memory",
    "--use-v2-block-manager": "there is only one implementation",
    "--disable-frontend-multiprocessing": "the engine is always a separate process",
    "--fully-sharded-loras": "adapters are split like the weights that they modify",
    "--slots": "/metrics and the page show what runs",
    "--no-slots": "there is no such route",
    "--props": "there is no such route",
    "--webui": "the page is always there",
    "--no-context-shift": "an answer ends when the context is full",
    "--kv-unified": _ONE_CACHE,
    "-kvu": _ONE_CACHE,
    "--no-kv-offload": _ONE_DEVICE,
    "-nkvo": _ONE_DEVICE,
    "--cpu-moe": _ONE_DEVICE,
    "-cmoe": _ONE_DEVICE,
    "--metrics": "/metrics is always there",
    "--mlock": _PAGES,
    "--mmap": _PAGES,
    "--no-mmproj": "GGUF models are served for text",
    "--no-mmap": _PAGES,
}
NOT_NEEDED_WITH_VALUE: Mapping[str, str] = {
    "--tool-call-parser": _TEMPLATE + "; --tool-format overrides it",
    "--reasoning-parser": _TEMPLATE,
    "--chat-template-content-format": _TEMPLATE,
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
    "--max-cudagraph-capture-size": "use --cuda-graph-buckets",
    "--cuda-graph-max-bs": "use --cuda-graph-buckets",
    "--batch-size": _STEP,
    "-b": _STEP,
    "--max-prefill-tokens": _STEP,
    "--scheduler-delay-factor": _STEP,
    "--schedule-conservativeness": "requests are preempted when blocks run out",
    "--preemption-mode": "--swap-space; the faster way is measured",
    "--prefix-caching-hash-algo": "there is only one implementation",
    "--mm-encoder-tp-mode": "with --tensor-parallel-size, images are not supported",
    "--mm-processor-cache-type": "images are processed for each request",
    "--mm-encoder-attn-backend": _KERNELS,
    "--attention-config": _KERNELS,
    "--all2all-backend": _KERNELS,
    "--moe-a2a-backend": _KERNELS,
    "--moe-runner-backend": _KERNELS,
    "--sampling-backend": _KERNELS,
    "--prefill-attention-backend": _KERNELS,
    "--decode-attention-backend": _KERNELS,
    "--torch-compile-max-bs": "the graph is compiled for any batch size",
    "--allowed-methods": "--allowed-origin allows the API's methods",
    "--allowed-headers": "--allowed-origin allows all headers",
    "--model-loader-extra-config": "weights are read once, in order",
    "--log-level-http": "--log-level sets what is logged",
    "--threads-http": "--api-workers run HTTP, including tokenizers",
    "--num-postprocess-workers": "--api-workers run HTTP, including tokenizers",
    "--gpus-per-node": "--tensor-parallel-size says how many are used",
    "--tool-parser": _TEMPLATE + "; --tool-format overrides it",
    "--reasoning-format": _TEMPLATE,
    "--n-cpu-moe": _ONE_DEVICE,
    "-ncmoe": _ONE_DEVICE,
    "--override-tensor": _ONE_DEVICE,
    "-ot": _ONE_DEVICE,
    "--cache-ram": _ONE_CACHE,
    "-cram": _ONE_CACHE,
    "--cache-reuse": _ONE_CACHE,
    "--fit": "--max-model-len is what fits by default",
    "--timeout": "a request has no time limit",
    "-to": "a request has no time limit",
    "--keep": "an answer ends when the context is full",
    "--ctx-checkpoints": _ONE_CACHE,
    "-ctxcp": _ONE_CACHE,
    "--ubatch-size": _STEP,
    "-ub": _STEP,
}
# Ignored for these values only, with advice for other values.
VALUES: Mapping[str, tuple[frozenset[str], str]] = {
    "--pipeline-parallel-size": (frozenset({"1"}), _ONE_STAGE),
    "-pp": (frozenset({"1"}), _ONE_STAGE),
    "--pp-size": (frozenset({"1"}), _ONE_STAGE),
    "--pp": (frozenset({"1"}), _ONE_STAGE),
    "--ep-size": (frozenset({"1"}), _EXPERTS),
    "--ep": (frozenset({"1"}), _EXPERTS),
    "--expert-parallel-size": (frozenset({"1"}), _EXPERTS),
    "--decode-context-parallel-size": (frozenset({"1"}), "use --tensor-parallel-size"),
    "-dcp": (frozenset({"1"}), "use --tensor-parallel-size"),
    "--nnodes": (frozenset({"1"}), _NODES),
    "--node-rank": (frozenset({"0"}), _NODES),
    "--data-parallel-backend": (frozenset({"mp"}), _ENGINES),
    "--generation-config": (
        frozenset({"auto"}),
        "set sampling parameters with --override-generation-config",
    ),
    "--lora-dtype": (frozenset({"auto"}), "adapters have the model's --dtype"),
    "--backend": (frozenset({"pytorch"}), "there is only one implementation"),
    "--max-beam-width": (frozenset({"1"}), "beam search is in Python: LLM.beam_search"),
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
    "-cc": "choose a level with -O0 to -O3, and passes with --disable-pass",
    "--no-enable-chunked-prefill": "chunked prefill is always on; raise --max-num-batched-tokens",
    "--enable-expert-parallel": _EXPERTS,
    "-ep": _EXPERTS,
    "--enable-ep-moe": _EXPERTS,
    "--enable-eplb": _EXPERTS,
    "--enable-dp-attention": "engines of --data-parallel-size have the whole model",
    "--data-parallel-size-local": _ENGINES,
    "--data-parallel-address": _ENGINES,
    "--data-parallel-rpc-port": _ENGINES,
    "--data-parallel-start-rank": _ENGINES,
    "--headless": _ENGINES,
    "--master-addr": _NODES,
    "--master-port": _NODES,
    "--dist-init-addr": _NODES,
    "--tool-parser-plugin": _TEMPLATE + "; --tool-format overrides it",
    "--hf-config-path": _CONFIG,
    "--rope-freq-scale": "give --rope-scale, its inverse",
    "--tokenizer-revision": "--revision is for the tokenizer too; or give --tokenizer DIR",
    "--extra-llm-api-options": "write flags of llmc serve into a file and give --config FILE",
    "--hf-file": _HUB,
    "-hff": _HUB,
    "--model-url": _HUB,
    "--gguf-file": _HUB,
    "--models-dir": "name the models: llmc serve A B",
    "-mu": _HUB,
    "--offline": "set HF_HUB_OFFLINE=1",
    "-hft": "set HF_TOKEN",
    "--hf-token": "set HF_TOKEN",
    "--download-dir": "set HF_HOME",
    "--middleware": "put a proxy in front of the server",
    "--mm-processor-kwargs": "images are processed as the model's files specify",
    "--media-io-kwargs": "images are processed as the model's files specify",
    "--n-predict": "send max_tokens with each request",
    "--predict": "send max_tokens with each request",
    "-n": "send max_tokens with each request",
    "--reasoning-budget": "send thinking_token_budget with each request",
    "--enable-force-include-usage": "send stream_options with each request",
    "--return-tokens-as-token-ids": "send return_tokens_as_token_ids with each request",
    "--grammar": "send grammar with each request",
    "--json-schema": "send json_schema with each request",
    "--enable-prompt-embeds": "prompts are text or token ids",
    "--allow-auto-truncate": "send truncate_prompt_tokens with each request",
    "--context-shift": "an answer ends when the context is full",
    "--enable-log-outputs": "outputs are never logged",
    "--log-config-file": "choose with --log-level and --log-format",
    "--log-file": "the log is written to stderr",
    "--allow-credentials": "cookies are never allowed; send the API key",
    "--enable-ssl-refresh": "restart the server to read new certificates",
    "--api-key-file": "set LLMC_API_KEY",
    "--pooler-config": "choose with --task, --pooling and --normalize",
    "--override-pooler-config": "choose with --task, --pooling and --normalize",
    "--kv-transfer-config": "blocks stay on one device",
    "--kv-events-config": "blocks stay on one device",
    "--enable-hierarchical-cache": "--swap-space keeps the cache of preempted requests",
    "--kv-offloading-size": "--swap-space keeps the cache of preempted requests",
    "--threads": _THREADS,
    "-t": _THREADS,
    "--threads-batch": _THREADS,
    "-tb": _THREADS,
    "--numa": "run llmc with numactl",
    "--main-gpu": "set CUDA_VISIBLE_DEVICES",
    "-mg": "set CUDA_VISIBLE_DEVICES",
    "--base-gpu-id": "set CUDA_VISIBLE_DEVICES",
    "--split-mode": "use --tensor-parallel-size",
    "-sm": "use --tensor-parallel-size",
    "--tensor-split": "use --tensor-parallel-size",
    "-ts": "use --tensor-parallel-size",
    "--cudagraph-capture-sizes": _GRAPHS,
    "--cuda-graph-bs": _GRAPHS,
    "--torchao-config": "choose --quantization int8 or int4",
    "--disable-sliding-window": "set --max-model-len to the window",
    "--lora": _ADAPTERS,
    "--lora-scaled": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--mmproj": "GGUF models are served for text; images need a model in safetensors",
    "--allowed-local-media-path": "send images as data URLs",
    "--trust-request-chat-template": "give the template with --chat-template",
    "--allowed-media-domains": "send images as data URLs",
    "--num-gpu-blocks-override": _CACHE_SIZE,
    "--max-total-tokens": _CACHE_SIZE,
    "--kv-cache-free-gpu-memory-fraction": "give --gpu-memory-utilization, with the weights",
    "--free-gpu-memory-fraction": "give --gpu-memory-utilization, with the weights",
    "--speculative-model": _DRAFTS,
    "--speculative-algorithm": _DRAFTS,
    "--speculative-draft-model-path": _DRAFTS,
    "--speculative-num-steps": _DRAFTS,
    "--speculative-eagle-topk": _DRAFTS,
    "--speculative-num-draft-tokens": _DRAFTS,
    "--model-draft": _DRAFTS,
    "-md": _DRAFTS,
    "--draft": _DRAFTS,
    "--draft-max": _DRAFTS,
    "--draft-min": _DRAFTS,
}

# Values of --kv-cache-dtype as vLLM calls them.
KV_CACHE_NAMES: Mapping[str, str] = {"fp8": "fp8_e4m3", "int8_per_token_head": "int8"}
# Types of the KV cache as other servers call them, and flags for those of keys and of values.
CACHE_TYPE_NAMES: Mapping[str, str] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "q8_0": "int8",
}
_CACHE_TYPE = f"it can be {', '.join(CACHE_TYPE_NAMES)}; see --kv-cache-dtype for fp8"
CACHE_TYPES: Mapping[str, str] = dict.fromkeys(
    ("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"), _CACHE_TYPE
)

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
    """The names, with each reason once."""
    by_reason: dict[str, list[str]] = {}
    for name, why in options.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


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
        elif name == "kv_cache_dtype" and value in KV_CACHE_NAMES:
            out[name] = KV_CACHE_NAMES[value]
        elif name == "swap_space" and isinstance(value, int | float) and 0 < value < MAX_GIB:
            out[name] = int(value * 2**30)
        elif name == "max_model_len" and value in ("auto", -1):
            out[name] = None
        elif flag in RUNNERS:
            out |= {} if (task := task_of(flag, value)) is None else {"task": task}
        elif name in known:
            out[name] = value
        elif (name == "generation_config" and value == "vllm") or name in _ROTARY:
            pass  # below
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
    rotary = {name: options[name] for name in _ROTARY if options.get(name) is not None}
    if rotary:
        out["hf_overrides"] = {**rotary, **(options.get("hf_overrides") or {})}
    if options.get("generation_config") == "vllm":
        name = "override_generation_config"
        out[name] = {**NEUTRAL_SAMPLING, **(options.get(name) or {})}
    if refused:
        raise ConfigError(f"llmc does not support {listed(refused)}")
    if left_out:
        log.warning("%s", say_left_out(left_out))
    return out
