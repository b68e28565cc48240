"""Command-line flags of an engine, one table for all commands: `EngineConfig` field -> flag.

A command takes `config: EngineConfig`; the decorator `engine_options` replaces that parameter by
the flags of the table and builds the config from what was given. Names are those of `vllm serve`,
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


def parse_limits(text: str) -> dict[str, int]:
    """Counts from `{"image": 4}`, or as older servers take them from `image=4`."""
    try:
        if "=" in text and "{" not in text:
            return {k: int(v) for k, _, v in (one.partition("=") for one in text.split(","))}
        found = json.loads(text)
    except ValueError as exc:
        raise ConfigError(
            f'--limit-mm-per-prompt must be such as {{"image": 4}}, got {text!r}'
        ) from exc
    if not isinstance(found, dict):
        raise ConfigError(f'--limit-mm-per-prompt must be such as {{"image": 4}}, got {text!r}')
    return found


def option(*flags: str, help: str, panel: str | None = None, **settings: Any) -> Any:
    """A typer option whose environment variable follows from its first long flag."""
    name = next(flag for flag in flags if flag.startswith("--")).split("/")[0]
    envvar = "LLMC_" + name.removeprefix("--").replace("-", "_").upper()
    settings.setdefault("envvar", envvar)
    settings.setdefault("metavar", "TEXT")  # not shown for flags that take no value
    settings.setdefault("show_envvar", False)  # --help explains the rule once, at its end
    return typer.Option(*flags, help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOption:
    """How one field of EngineConfig is written on the command line.

    `read` turns what the user wrote into the field's value; None is never passed to it.
    """

    field: str
    help: str
    panel: str
    flags: tuple[str, ...] = ()  # () is `--` and the field's name with dashes
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
        help="Directory, GGUF file or hub id of the model. The default one when absent.",
    ),
    EngineOption(
        field="tokenizer",
        panel=MODEL_PANEL,
        help="Directory or hub id of the tokenizer. The model's own when absent.",
    ),
    EngineOption(
        field="chat_template",
        panel=MODEL_PANEL,
        help="Jinja file with a chat template, or its text. The model's own when absent.",
    ),
    EngineOption(
        field="tool_format",
        panel=MODEL_PANEL,
        metavar="FORMAT",
        help="How the model writes calls of tools, where its chat template tells it wrongly: auto "
        "learns it from there, generic describes tools in the system message; else a JSON object "
        "or a file with one.",
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
        help="Type of weights and activations (half, bf16 and their like too); auto follows the "
        "checkpoint.",
    ),
    EngineOption(
        field="device",
        panel=MODEL_PANEL,
        metavar=_choices(DEVICES),
        help="Where to run; auto takes the GPU when there is one.",
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
        help="Keep the weights of linear layers in 8 or 4 bits, quantized while they load. When "
        "absent, quantized checkpoints stay as they are stored; none widens them to the model's "
        "dtype.",
    ),
    EngineOption(
        field="activation_bits",
        panel=MODEL_PANEL,
        metavar="8|16|32",
        help="Bits of the inputs of linears whose weights are integers of 4 or 8 bits, on x86 "
        "CPUs: 16 changes logits by 0.02 %; 8, for weights of 4 bits, by 2 %, and is faster; 32 "
        "leaves them as they are.",
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
        help=f"What the model is served for: {', '.join(TASKS)} (text, embeddings of its hidden "
        "states, or a classifier's scores; token_: those of each token). auto: what its files say.",
    ),
    EngineOption(
        field="pooling",
        panel=MODEL_PANEL,
        metavar=_choices(POOLINGS),
        help="Tokens that an embedding is made of. auto: as the model's files say, else the last "
        "of a decoder, and the mean of an encoder.",
    ),
    EngineOption(
        field="normalize",
        panel=MODEL_PANEL,
        flags=("--normalize/--no-normalize",),
        help="Give embeddings the length 1. When absent: as the model's files say.",
    ),
    EngineOption(
        field="max_model_len",
        panel=BATCH_PANEL,
        metavar="TOKENS",
        read=parse_context,
        help="Context length in tokens: 8192, 8k (8,000) or 8K. The model's own, or what fits into "
        "memory, when absent or auto.",
    ),
    EngineOption(
        field="max_num_seqs",
        panel=BATCH_PANEL,
        metavar="SEQUENCES",
        help="Sequences that run at the same time.",
    ),
    EngineOption(
        field="max_num_batched_tokens",
        panel=BATCH_PANEL,
        metavar="TOKENS",
        read=lambda text: parse_tokens(text, "--max-num-batched-tokens"),
        help="Tokens computed in one step, over all sequences.",
    ),
    EngineOption(
        field="max_num_queued",
        panel=BATCH_PANEL,
        metavar="REQUESTS",
        flags=("--max-queue", "--max-num-queued-reqs"),
        help="Requests that may wait; more are refused. "
        "When absent: 4 times --max-num-seqs for a server, no limit otherwise.",
    ),
    EngineOption(
        field="block_size",
        panel=BATCH_PANEL,
        metavar="TOKENS",
        help="Tokens in one block of the KV cache; a power of two.",
    ),
    EngineOption(
        field="kv_cache_dtype",
        panel=BATCH_PANEL,
        metavar=_choices(KV_CACHE_DTYPES),
        help="Type of the KV cache; the fp8 ones hold twice the tokens of bfloat16.",
    ),
    EngineOption(
        field="kv_cache_memory",
        panel=BATCH_PANEL,
        metavar="BYTES",
        read=parse_size,
        flags=("--kv-cache-memory", "--kv-cache-memory-bytes"),
        help="Memory of the KV cache and of snapshots of recurrent states: 512M, 2G. Chosen from "
        "free memory when absent.",
    ),
    EngineOption(
        field="swap_space",
        panel=BATCH_PANEL,
        metavar="BYTES",
        read=lambda text: parse_size(text, "--swap-space"),
        default="0",
        help="Host memory for the KV cache of preempted requests, such as 4G. They are recomputed "
        "where that was measured to be faster.",
    ),
    EngineOption(
        field="gpu_memory_utilization",
        panel=BATCH_PANEL,
        metavar="SHARE",
        help="Share of the GPU's memory to use, weights included.",
    ),
    EngineOption(
        field="tensor_parallel_size",
        panel=BATCH_PANEL,
        metavar="RANKS",
        help="Processes that compute a part of every layer each, on this machine: a GPU each, or "
        "the CPU's cores shared out. Memory of the KV cache is that of each.",
    ),
    EngineOption(
        field="distributed_executor_backend",
        panel=BATCH_PANEL,
        metavar=_choices(EXECUTOR_BACKENDS),
        help="Where the ranks are: processes of this machine, or actors of Ray, across its nodes.",
    ),
    EngineOption(
        field="data_parallel_size",
        panel=BATCH_PANEL,
        metavar="ENGINES",
        help="Engines of llmc serve, each with the whole model and an equal share of this machine; "
        "a request goes to one of them.",
    ),
    EngineOption(
        field="enable_prefix_caching",
        panel=BATCH_PANEL,
        flags=("--enable-prefix-caching/--no-enable-prefix-caching",),
        help="Reuse the KV cache of common prompt prefixes, and recurrent states where they end.",
    ),
    EngineOption(
        field="async_scheduling",
        panel=BATCH_PANEL,
        flags=("--async-scheduling/--no-async-scheduling",),
        help="Start the next step before the host has the tokens of the previous one. "
        "When absent: on a GPU.",
    ),
    EngineOption(
        field="scheduling_policy",
        panel=BATCH_PANEL,
        metavar=_choices(SCHEDULING_POLICIES),
        help="Order of service: fcfs by arrival; priority by the requests' `priority` (lower "
        "first), then by arrival.",
    ),
    EngineOption(
        field="speculative_config",
        panel=BATCH_PANEL,
        metavar="JSON",
        read=SpeculativeConfig.parse,
        help="Draft several tokens and verify them in one step: "
        '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2} '
        "drafts what followed the last 4 to 2 tokens at their earlier occurrence; "
        '{"method":"draft_model","model":"DIR"} takes the tokens of a smaller model with the same '
        'vocabulary; {"method":"eagle3","model":"DIR"} those of an EAGLE-3 head that was trained '
        'for the model; {"method":"mtp"} those of the layer for that in its own checkpoint. The '
        "answers stay the same.",
    ),
    EngineOption(
        field="limit_mm_per_prompt",
        panel=BATCH_PANEL,
        metavar="JSON",
        read=parse_limits,
        help=f'Most images of a prompt: {{"image": 4}}; {DEFAULT_IMAGES} when absent. With '
        '{"image": 0} what reads images is not loaded.',
    ),
    EngineOption(
        field="enable_lora",
        panel=BATCH_PANEL,
        flags=("--enable-lora/--no-enable-lora",),
        help="Serve LoRA adapters beside the model, each request its own.",
    ),
    EngineOption(
        field="max_loras",
        panel=BATCH_PANEL,
        metavar="ADAPTERS",
        help="Adapters that one step can use; requests of others wait for a slot.",
    ),
    EngineOption(
        field="max_lora_rank",
        panel=BATCH_PANEL,
        metavar="RANK",
        help="Largest rank of an adapter. Slots take memory for it, and steps compute it.",
    ),
    EngineOption(
        field="max_lora_expert_rank",
        panel=BATCH_PANEL,
        metavar="RANK",
        help="Largest rank of an adapter on routed experts, each of which takes memory for it in "
        "every slot. 0: such adapters are refused.",
    ),
    EngineOption(
        field="max_cpu_loras",
        panel=BATCH_PANEL,
        metavar="ADAPTERS",
        help="Adapters kept in host memory. When absent: as many as --max-loras.",
    ),
    EngineOption(
        field="opt_level",
        panel=COMPILER_PANEL,
        flags=("--opt-level", "--optimization-level", "-O"),
        metavar="0..3",
        help="-O0 runs the rewritten graph as it is and starts at once, -O1 compiles it, "
        "-O2 adds CUDA graphs, -O3 autotuning. Chosen for the device when absent.",
    ),
    EngineOption(
        field="cuda_graph_buckets",
        panel=COMPILER_PANEL,
        metavar="N,N,...",
        read=parse_buckets,
        help="Batch sizes whose decode step is captured as a CUDA graph, such as 1,2,4,8. "
        "Chosen up to --max-num-seqs when absent.",
    ),
    EngineOption(
        field="passes",
        panel=COMPILER_PANEL,
        flags=("--disable-pass",),
        metavar="NAME",
        read=_disabled,
        default=(),
        help="Leave out this graph pass; may be repeated.",
    ),
    EngineOption(
        field="extra_passes",
        panel=COMPILER_PANEL,
        flags=("--extra-pass",),
        metavar="MODULE:PASS",
        read=tuple,
        default=(),
        help="Add your own graph pass, from a module or a file.py; may be repeated.",
    ),
    EngineOption(
        field="logits_processors",
        panel=COMPILER_PANEL,
        flags=("--logits-processor",),
        metavar="MODULE:CLASS",
        read=tuple,
        default=(),
        help="Add your own logits processor, from a module or a file.py; may be repeated.",
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
_FIELD_NAME = re.compile(r"\b(" + "|".join(sorted(FLAG_OF_FIELD, key=len, reverse=True)) + r")\b")


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
    """The config from parsed flags; ConfigError for a value outside its range."""
    values = {}
    for entry in ENGINE_OPTIONS:
        value = given[entry.field]
        values[entry.field] = entry.read(value) if entry.read and value is not None else value
    return EngineConfig(**values)


def say_flag(message: str) -> str:
    """The message with the flag in place of a field that it begins with.

    Only at the beginning: further on, a value of the user may look like a field.
    """
    name = _FIELD_NAME.match(message)
    return message if name is None else FLAG_OF_FIELD[name[1]] + message[name.end() :]


def changed(config: EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
    """`config` with these options, by the names of flags or fields; ConfigError for a wrong one."""
    rows = {entry.flag.removeprefix("--").replace("-", "_"): entry for entry in ENGINE_OPTIONS}
    rows |= {entry.field: entry for entry in ENGINE_OPTIONS}
    values = {}
    for name, value in options.items():
        entry = rows.get(name.removeprefix("--").replace("-", "_"))
        if entry is None:
            raise ConfigError(f"{name!r:.80} is no option of a model")
        is_text = isinstance(value, str) or (entry.default == () and isinstance(value, list))
        values[entry.field] = entry.read(value) if entry.read and is_text else value
    try:
        return replace(config, **values)
    except TypeError as error:  # a text where a number belongs
        raise ConfigError(f"{dict(options)!r:.200}: {error}") from None


def engine_options(
    *, positional_model: bool = True, several_models: bool = False
) -> Callable[[Any], Any]:
    """Decorator: the command's `config: EngineConfig` parameter becomes the flags of the table.

    With `positional_model` the model may also be given as the command's first word. With
    `several_models` there may be more, which the command takes as `more_models`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        taken_apart = ("config", "more_models")
        own = [p for p in signature.parameters.values() if p.name not in taken_apart]
        # Keyword-only: typer calls by name, and defaults may then stand in any order.
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        first = [_model_argument(several_models)] if positional_model else []
        taken = {flag for p in own for flag in _flags(p)}  # -q is --quick where a command has that
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


def _flags(parameter: inspect.Parameter) -> list[str]:
    info = get_args(parameter.annotation)[-1]
    # Inside Annotated, typer keeps the first spelling where a default would otherwise be.
    declared = (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
    return [word for word in declared if isinstance(word, str) and word.startswith("-")]


def _model_argument(several: bool) -> inspect.Parameter:
    declared = typer.Argument(
        metavar="MODEL" if several else "[MODEL]",
        help="Directory, GGUF file or hub id of the model. The default one when absent."
        + (" Several are loaded as they are asked for." if several else ""),
        show_default=False,
    )
    return inspect.Parameter(
        "model_word",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None if several else str | None, declared],
    )
