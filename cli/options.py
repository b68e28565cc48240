"""Command-line flags of an engine, one table for all commands: `EngineConfig` field -> flag.

A command takes `config: EngineConfig`; the decorator `engine_options` replaces that parameter
with the flags of the table and builds the config from the parsed values. Names follow `vllm serve`,
and every flag `--some-name` can be set with the environment variable `LLMC_SOME_NAME`.
Types and defaults come from the dataclass; a test checks that every field has a row.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from llmc.config import (
    DEFAULT_IMAGES,
    DEVICES,
    DTYPES,
    EXECUTOR_BACKENDS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from llmc.errors import ConfigError
from llmc.pooling import POOLINGS, TASKS
from llmc.speculative_config import SpeculativeConfig

MODEL_PANEL = "Model"
BATCH_PANEL = "Batching and memory"
COMPILER_PANEL = "Compiler"

_FIELD_TYPES = get_type_hints(EngineConfig)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOKENS = re.compile(r"(-?\d+(?:\.\d+)?)([kKmM]?)")
_TOKEN_UNITS = {"": 1, "k": 1000, "K": 2**10, "m": 10**6, "M": 2**20}


def parse_size(text: str, flag: str = "--kv-cache-memory") -> int:
    """Bytes from `1048576`, `512M`, `1.5G` or `2GiB`; suffixes are powers of 1024."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{flag} must be a number of bytes such as 1048576, 512M or 2G, got {text!r}"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_tokens(text: str, flag: str) -> int:
    """A number of tokens, also as vLLM takes it: `32k` is 32,000, `32K` 32,768, `1.5k` 1,500."""
    match = _TOKENS.fullmatch(text)
    if match is None or ("." in text and match[2] not in ("k", "m")):
        raise ConfigError(f"{flag} must be a number of tokens such as 8192, 8k or 8K, got {text!r}")
    return int(float(match[1]) * _TOKEN_UNITS[match[2]])


def parse_context(text: str) -> int | None:
    """None for `auto` and -1: as many tokens as the model has and the memory allows."""
    return None if text in ("auto", "-1") else parse_tokens(text, "--max-model-len")


def parse_buckets(text: str) -> tuple[int, ...]:
    """Batch sizes from `1,2,4`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"--cuda-graph-buckets must be sizes such as 1,2,4,8, got {text!r}")
    return tuple(int(word) for word in words)


def object_parser(flag: str, example: str) -> Callable[[str], dict[str, Any]]:
    """Reads a JSON object, of which `example` is one."""

    def parse(text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"{flag} must be a JSON object such as {example}, got {text!r:.200}")
        return found

    return parse


def parse_limits(text: str) -> dict[str, int]:
    """Counts from `{"image": 4}`, or from `image=4`, the form that older servers accept."""
    if "=" not in text or "{" in text:
        return object_parser("--limit-mm-per-prompt", '{"image": 4}')(text)
    try:
        return {k: int(v) for k, _, v in (one.partition("=") for one in text.split(","))}
    except ValueError as exc:
        raise ConfigError(f"--limit-mm-per-prompt must look like image=4, got {text!r}") from exc


def option(*flags: str, help: str, panel: str | None = None, **settings: Any) -> Any:
    """A typer option whose environment variable follows from its first long flag."""
    name = next(flag for flag in flags if flag.startswith("--")).split("/")[0]
    envvar = "LLMC_" + name.removeprefix("--").replace("-", "_").upper()
    settings.setdefault("envvar", envvar)
    settings.setdefault("metavar", "TEXT")  # not shown for flags without a value
    settings.setdefault("show_envvar", False)  # --help explains the rule once, at the end
    return typer.Option(*flags, help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOption:
    """How one field of EngineConfig is written on the command line.

    `read` turns what the user wrote into the field's value; None is never passed to it.
    """

    field: str
    help: str
    panel: str
    flags: tuple[str, ...] = ()  # (): `--` and the field's name with dashes
    metavar: str | None = None
    read: Callable[[Any], Any] | None = None
    default: Any = inspect.Parameter.empty  # empty: the field's own default

    @property
    def all_flags(self) -> tuple[str, ...]:
        return self.flags or ("--" + self.field.replace("_", "-"),)

    @property
    def flag(self) -> str:
        return self.all_flags[0].split("/")[0]

    @property
    def type(self) -> Any:
        """What typer parses: text for `read`, else the field's own type."""
        own = _FIELD_TYPES[self.field]
        is_optional = type(None) in get_args(own)
        if self.read is not None:
            plain: Any = list[str] if self.default == () else str
            is_optional = is_optional and self.default is inspect.Parameter.empty
        else:
            [plain] = {
                type(get_args(kind)[0]) if get_origin(kind) is Literal else kind
                for kind in (get_args(own) if is_optional else (own,))
                if kind is not type(None)
            }
        return plain | None if is_optional else plain


def _choices(names: tuple[str, ...]) -> str:
    return "[" + "|".join(names) + "]"


def _disabled(names: list[str]) -> Mapping[str, bool]:
    return dict.fromkeys(names, False)


ENGINE_OPTIONS = (
    EngineOption(
        field="model",
        panel=MODEL_PANEL,
        metavar="MODEL",
        help="Directory, GGUF file or hub id (owner/name, for GGUF also owner/name:Q8_0) of the "
        "model. Default: a small model.",
    ),
    EngineOption(
        field="tokenizer",
        panel=MODEL_PANEL,
        help="Directory or hub id of the tokenizer. Default: the model's own.",
    ),
    EngineOption(
        field="chat_template",
        panel=MODEL_PANEL,
        help="Jinja file with a chat template, or the template itself. Default: the model's own.",
    ),
    EngineOption(
        field="chat_template_kwargs",
        panel=MODEL_PANEL,
        flags=("--chat-template-kwargs", "--default-chat-template-kwargs"),
        metavar="JSON",
        read=object_parser("--chat-template-kwargs", '{"enable_thinking": false}'),
        help='Variables for the chat template, such as {"enable_thinking": false}, unless a '
        "request sets them.",
    ),
    EngineOption(
        field="override_generation_config",
        panel=MODEL_PANEL,
        metavar="JSON",
        read=object_parser("--override-generation-config", '{"temperature": 0.7}'),
        help="Sampling parameters of requests that do not set them, in place of the model's own: "
        "temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, "
        "frequency_penalty, repeat_last_n.",
    ),
    EngineOption(
        field="hf_overrides",
        panel=MODEL_PANEL,
        metavar="JSON",
        read=object_parser("--hf-overrides", '{"max_position_embeddings": 65536}'),
        help='Other values for fields of config.json, such as {"max_position_embeddings": 65536}; '
        "those of an object are replaced one by one.",
    ),
    EngineOption(
        field="tool_format",
        panel=MODEL_PANEL,
        metavar="FORMAT",
        help="How the model writes tool calls. auto infers it from the chat template; generic "
        "describes the tools in the system message; otherwise a JSON object, or a file with one, "
        "for models whose template is wrong about it.",
    ),
    EngineOption(
        field="revision",
        panel=MODEL_PANEL,
        help="Branch, tag or commit of a hub model.",
    ),
    EngineOption(
        field="dtype",
        panel=MODEL_PANEL,
        metavar=_choices(DTYPES),
        help="Type of weights and activations (short forms such as half and bf16 also work); auto "
        "follows the checkpoint.",
    ),
    EngineOption(
        field="device",
        panel=MODEL_PANEL,
        metavar=_choices(DEVICES),
        help="Where to run; auto uses the GPU if there is one.",
    ),
    EngineOption(
        field="load_format",
        panel=MODEL_PANEL,
        metavar=_choices(LOAD_FORMATS),
        help="dummy fills the weights with random numbers, to measure speed without a checkpoint.",
    ),
    EngineOption(
        field="quantization",
        panel=MODEL_PANEL,
        flags=("--quantization", "-q"),
        metavar=_choices(QUANTIZATIONS),
        help="Quantize the weights of linear layers to 8 or 4 bits while loading. By default, "
        "quantized checkpoints keep their stored format; none dequantizes them to the model's "
        "dtype.",
    ),
    EngineOption(
        field="activation_bits",
        panel=MODEL_PANEL,
        metavar="[8|16|32]",
        help="Bits of the inputs of linear layers with integer or mxfp4 weights, on x86 CPUs. "
        "16 changes logits by 0.02 %; 8, for 4 to 6 bits, changes them by 2 % and is faster; 32 "
        "does not quantize inputs. With 8, inputs of fp8 weights are rounded to fp8, on every "
        "device.",
    ),
    EngineOption(
        field="trust_remote_code",
        panel=MODEL_PANEL,
        flags=("--trust-remote-code/--no-trust-remote-code",),
        help="Run Python code that comes with the model.",
    ),
    EngineOption(
        field="task",
        panel=MODEL_PANEL,
        metavar="TASK",  # their names are wider than a line
        help=f"Task to serve the model for: {', '.join(TASKS)} (text, embeddings from hidden "
        "states, or a classifier's scores; token_: one per token). auto follows the model's files.",
    ),
    EngineOption(
        field="pooling",
        panel=MODEL_PANEL,
        metavar=_choices(POOLINGS),
        help="Which tokens an embedding is computed from. auto follows the model's files, else "
        "uses the last token of a decoder and the mean over the tokens of an encoder.",
    ),
    EngineOption(
        field="normalize",
        panel=MODEL_PANEL,
        flags=("--normalize/--no-normalize",),
        help="Scale embeddings to length 1. Default: follow the model's files.",
    ),
    EngineOption(
        field="max_model_len",
        panel=BATCH_PANEL,
        metavar="TOKENS",
        read=parse_context,
        help="Context length in tokens: 8192, 8k (8,000) or 8K (8,192). Default (also auto): the "
        "model's own, or what fits into memory.",
    ),
    EngineOption(
        field="max_num_seqs",
        panel=BATCH_PANEL,
        metavar="SEQUENCES",
        help="Maximum number of sequences that run at the same time.",
    ),
    EngineOption(
        field="max_num_batched_tokens",
        panel=BATCH_PANEL,
        metavar="TOKENS",
        read=lambda text: parse_tokens(text, "--max-num-batched-tokens"),
        help="Maximum number of tokens computed in one step, over all sequences.",
    ),
    EngineOption(
        field="max_num_queued",
        panel=BATCH_PANEL,
        metavar="REQUESTS",
        flags=("--max-queue", "--max-num-queued-reqs"),
        help="Maximum number of waiting requests; further requests are rejected. "
        "Default: 4 times --max-num-seqs for a server, otherwise no limit.",
    ),
    EngineOption(
        field="block_size",
        panel=BATCH_PANEL,
        metavar="TOKENS",
        help="Tokens per KV cache block; a power of two.",
    ),
    EngineOption(
        field="kv_cache_dtype",
        panel=BATCH_PANEL,
        metavar=_choices(KV_CACHE_DTYPES),
        help="Type of the KV cache. 16 bits hold twice the tokens of float32, int8 and fp8 about "
        "twice those of 16 bits.",
    ),
    EngineOption(
        field="kv_cache_memory",
        panel=BATCH_PANEL,
        metavar="BYTES",
        read=parse_size,
        flags=("--kv-cache-memory", "--kv-cache-memory-bytes"),
        help="Memory for the KV cache and snapshots of recurrent states, such as 512M or 2G. "
        "Default: chosen from the free memory, on CPU within the limit of a container.",
    ),
    EngineOption(
        field="swap_space",
        panel=BATCH_PANEL,
        metavar="BYTES",
        read=lambda text: parse_size(text, "--swap-space"),
        default="0",
        help="Host memory for the KV cache of preempted requests, such as 4G. A request is "
        "recomputed instead when that was measured to be faster, and for models with recurrent "
        "layers.",
    ),
    EngineOption(
        field="gpu_memory_utilization",
        panel=BATCH_PANEL,
        metavar="SHARE",
        help="Fraction of GPU memory to use, including the weights.",
    ),
    EngineOption(
        field="tensor_parallel_size",
        panel=BATCH_PANEL,
        metavar="RANKS",
        help="Number of processes that each compute a part of every layer, on this machine: one "
        "GPU each, or an equal share of the CPU cores. --kv-cache-memory is per process.",
    ),
    EngineOption(
        field="distributed_executor_backend",
        panel=BATCH_PANEL,
        metavar=_choices(EXECUTOR_BACKENDS),
        help="Where ranks run: mp, processes on this machine; ray, Ray actors across its nodes.",
    ),
    EngineOption(
        field="data_parallel_size",
        panel=BATCH_PANEL,
        metavar="ENGINES",
        help="Number of engines in llmc serve, each with the whole model and an equal share of "
        "this machine; each request goes to one of them.",
    ),
    EngineOption(
        field="enable_prefix_caching",
        panel=BATCH_PANEL,
        flags=("--enable-prefix-caching/--no-enable-prefix-caching",),
        help="Reuse the KV cache of common prompt prefixes, and the recurrent states at their end.",
    ),
    EngineOption(
        field="async_scheduling",
        panel=BATCH_PANEL,
        flags=("--async-scheduling/--no-async-scheduling",),
        help="Start the next step before the host has the tokens of the previous one. "
        "Default: on for GPUs.",
    ),
    EngineOption(
        field="scheduling_policy",
        panel=BATCH_PANEL,
        metavar=_choices(SCHEDULING_POLICIES),
        help="Scheduling order: fcfs, by arrival; priority, by each request's `priority` (lower "
        "first), then by arrival.",
    ),
    EngineOption(
        field="speculative_config",
        panel=BATCH_PANEL,
        metavar="JSON",
        read=SpeculativeConfig.parse,
        help="Draft several tokens and verify them in one step: "
        '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2} '
        "drafts the tokens that followed an earlier occurrence of the last 4 to 2 tokens; "
        '{"method":"draft_model","model":"DIR"} uses a smaller model with the same vocabulary; '
        '{"method":"eagle3","model":"DIR"} an EAGLE-3 head trained for the model; '
        '{"method":"mtp"} the multi-token prediction layer in its own checkpoint. Answers do not '
        "change.",
    ),
    EngineOption(
        field="limit_mm_per_prompt",
        panel=BATCH_PANEL,
        metavar="JSON",
        read=parse_limits,
        help=f'Maximum number of images in a prompt: {{"image": 4}}. Default: {DEFAULT_IMAGES}. '
        'With {"image": 0} the vision tower is not loaded.',
    ),
    EngineOption(
        field="enable_lora",
        panel=BATCH_PANEL,
        flags=("--enable-lora/--no-enable-lora",),
        help="Serve LoRA adapters alongside the model; each request can choose one.",
    ),
    EngineOption(
        field="max_loras",
        panel=BATCH_PANEL,
        metavar="ADAPTERS",
        help="Maximum number of adapters in one step; requests for others wait for a slot.",
    ),
    EngineOption(
        field="max_lora_rank",
        panel=BATCH_PANEL,
        metavar="RANK",
        help="Largest adapter rank. Every slot reserves memory for it, and every step computes it.",
    ),
    EngineOption(
        field="max_lora_expert_rank",
        panel=BATCH_PANEL,
        metavar="RANK",
        help="Largest rank of an adapter on routed experts; every slot reserves memory for it for "
        "each expert. 0 rejects such adapters.",
    ),
    EngineOption(
        field="max_cpu_loras",
        panel=BATCH_PANEL,
        metavar="ADAPTERS",
        help="Number of adapters kept in host memory. Default: --max-loras.",
    ),
    EngineOption(
        field="opt_level",
        panel=COMPILER_PANEL,
        flags=("--opt-level", "--optimization-level", "-O"),
        metavar="0..3",
        help="-O0 runs the rewritten graph op by op, -O1 adds CUDA graphs on GPUs, -O2 compiles it "
        "with Inductor in the background, -O3 adds autotuning. On CPUs -O1 is the same as -O0, "
        "which is usually the fastest. Default: 0 on CPUs, 1 on GPUs.",
    ),
    EngineOption(
        field="cuda_graph_buckets",
        panel=COMPILER_PANEL,
        metavar="N,N,...",
        read=parse_buckets,
        help="Batch sizes whose decode step is captured as a CUDA graph, such as 1,2,4,8. "
        "Default: chosen up to --max-num-seqs.",
    ),
    EngineOption(
        field="passes",
        panel=COMPILER_PANEL,
        flags=("--disable-pass",),
        metavar="NAME",
        read=_disabled,
        default=(),
        help="Disable this graph pass; can be repeated.",
    ),
    EngineOption(
        field="extra_passes",
        panel=COMPILER_PANEL,
        flags=("--extra-pass",),
        metavar="MODULE:PASS",
        read=tuple,
        default=(),
        help="Add your own graph pass, from a module or a file.py; can be repeated.",
    ),
    EngineOption(
        field="logits_processors",
        panel=COMPILER_PANEL,
        flags=("--logits-processor",),
        metavar="MODULE:CLASS",
        read=tuple,
        default=(),
        help="Add your own logits processor, from a module or a file.py; can be repeated.",
    ),
    EngineOption(
        field="seed",
        panel=COMPILER_PANEL,
        metavar="INTEGER",
        help="Seed for requests without a `seed`.",
    ),
)

_FIELD_DEFAULTS = {f.name: f.default for f in fields(EngineConfig)}
FLAG_OF_FIELD = {entry.field: entry.flag for entry in ENGINE_OPTIONS}


def _parameter(entry: EngineOption, taken: Collection[str]) -> inspect.Parameter:
    declared = option(
        *(flag for flag in entry.all_flags if flag not in taken),
        help=entry.help,
        panel=entry.panel,
        metavar=entry.metavar or "TEXT",
        show_default=entry.default is inspect.Parameter.empty,
    )
    default = entry.default
    if default is inspect.Parameter.empty:
        default = _FIELD_DEFAULTS[entry.field]
    return inspect.Parameter(
        entry.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if isinstance(default, tuple) else default,
        annotation=Annotated[entry.type, declared],
    )


def build_config(given: Mapping[str, Any]) -> EngineConfig:
    """Build the config from parsed flags; ConfigError for a value outside its range."""
    values = {}
    for entry in ENGINE_OPTIONS:
        value = given[entry.field]
        values[entry.field] = entry.read(value) if entry.read and value is not None else value
    return EngineConfig(**values)


def changed(config: EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
    """`config` with these options, named as flags or fields; ConfigError if one is invalid."""
    rows = {entry.flag.removeprefix("--").replace("-", "_"): entry for entry in ENGINE_OPTIONS}
    rows |= {entry.field: entry for entry in ENGINE_OPTIONS}
    values = {}
    for name, value in options.items():
        entry = rows.get(name.removeprefix("--").replace("-", "_"))
        if entry is None:
            raise ConfigError(f"{name!r:.80} is not an option of a model")
        is_text = isinstance(value, str) or (entry.default == () and isinstance(value, list))
        values[entry.field] = entry.read(value) if entry.read and is_text else value
    try:
        return replace(config, **values)
    except TypeError as error:  # a string where a number is expected
        raise ConfigError(f"{dict(options)!r:.200}: {error}") from None


def engine_options(
    *, positional_model: bool = True, several_models: bool = False
) -> Callable[[Any], Any]:
    """Decorator: replace the command's `config: EngineConfig` parameter with the table's flags.

    With `positional_model` the model can also be given as the command's first word. With
    `several_models` more words can follow; the command gets them as `more_models`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        taken_apart = ("config", "more_models")
        own = [p for p in signature.parameters.values() if p.name not in taken_apart]
        # Keyword-only: typer calls by name, and parameters with defaults can be in any order.
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        first = [_model_argument(several_models)] if positional_model else []
        taken = {flag for p in own for flag in flags_of(p)}  # e.g. a command's own -q, for --quick
        parameters = [*first, *own, *(_parameter(entry, taken) for entry in ENGINE_OPTIONS)]

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            word = given.pop("model_word", None)
            if several_models:
                word, *given["more_models"] = word or [None]
            if word is not None and given["model"] not in (None, word):
                raise ConfigError(f"two models were given: {word!r} and --model {given['model']!r}")
            given["model"] = word if word is not None else given["model"]
            config = build_config({e.field: given.pop(e.field) for e in ENGINE_OPTIONS})
            return command(config=config, **given)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # typer must see this signature only
        return run

    return decorate


def flags_of(parameter: inspect.Parameter) -> list[str]:
    """The spellings of a command's flag; empty for its other parameters."""
    info = get_args(parameter.annotation)[-1]
    # Inside Annotated, typer stores the first spelling in `default`.
    declared = (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
    return [word for word in declared if isinstance(word, str) and word.startswith("-")]


def _model_argument(several: bool) -> inspect.Parameter:
    declared = typer.Argument(
        metavar="MODEL" if several else "[MODEL]",
        help="Directory, GGUF file or hub id of the model. Default: a small model."
        + (" Several models are loaded on demand." if several else ""),
        show_default=False,
    )
    return inspect.Parameter(
        "model_word",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None if several else str | None, declared],
    )
