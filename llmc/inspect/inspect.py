"""`inspect_model`: EngineConfig -> Inspection. Reads config.json: no weights, no device."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmc.compiler.attention_fallback import capture_model
from llmc.compiler.build import BuiltModel
from llmc.config import EngineConfig
from llmc.engine.kv.layout import WHOLE, AttentionWindow
from llmc.errors import CompileError
from llmc.inspect.choose import COLLECTIVES, KernelChoice, choose_kernels
from llmc.inspect.facts import LayerFacts, layer_facts, num_bytes, size_hint, total
from llmc.inspect.fit import Sizes, cache_kinds
from llmc.inspect.shorten import Shortened, shorten
from llmc.inspect.stages import Stage, change, run_stages
from llmc.passes.group_caches import widest
from llmc.passes.inputs import StepInput
from llmc.startup.compile import build_source, rewrite_options
from llmc.startup.resolve import ModelSource, pick_device, resolve
from llmc.weights.quantized.kept_quantized import KeptWeights, expected_weights, kept_parameters
from llmc.weights.tensors import weight_files

_LIVE_VALUES = 4  # how many values of the largest size are assumed to be live at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """A pass's removed and added ops in the whole model, and the layers they are in (-1: before the
    layers; the number of layers: after them)."""

    name: str
    title: str
    is_users: bool
    enabled: bool
    removed: int
    added: int
    layers: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The result. Everything but the graphs is plain data; `stages` are for the page."""

    model: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    num_active_parameters: int  # used for one token
    max_model_len: int
    vocab_size: int
    num_layers: int
    num_captured: int
    capture_seconds: float
    layers: dict[int, LayerFacts]
    passes: tuple[PassFacts, ...]
    kernels: tuple[KernelChoice, ...]
    sizes: Sizes  # per rank
    tensor_parallel_size: int
    num_collectives: int  # per step
    stages: tuple[Stage, ...]


def inspect_model(config: EngineConfig, *, all_layers: bool = False) -> Inspection:
    """Inspect a model. Raises CheckpointError and CompileError as loading would; CompileError gives
    the reason why the model can't be served."""
    config = dataclasses.replace(config, load_format="dummy")  # download no weights from the hub
    device = torch.device("cuda") if config.device == "cuda" else pick_device(config.device)
    source = resolve(config, device)
    start = time.perf_counter()
    built, shortened, stages = None, None, None
    for keep_all in (True,) if all_layers else (False, True):
        built = build_source(source)
        parameters = sum(p.numel() for p in built.module.parameters())
        options = rewrite_options(source, _kept(source, built))
        shortened = shorten(built.module, built.config, keep_all=keep_all)
        try:
            captured = capture_model(built, device, outline=options.outline)
            stages = run_stages(captured, options)
            break
        except CompileError:
            if shortened.is_whole:
                raise  # otherwise retry with all layers: the code may depend on their number
    assert built is not None and shortened is not None and stages is not None
    seconds = time.perf_counter() - start
    facts = layer_facts(stages, shortened)
    model_len = source.model_len
    sizes = _sizes(config, facts, stages[-1], model_len, captured.vocab_size)
    kernels = choose_kernels(stages[-1], device, shortened.copies)
    idle = sizes.expert_bytes * (1 - sizes.num_chosen / max(1, sizes.num_experts))
    return Inspection(
        model=source.files.name,
        architecture=type(built.module).__name__,
        dtype=source.dtype_name,
        device=str(device),
        num_parameters=parameters,
        num_active_parameters=parameters - round(idle / source.dtype.itemsize),
        max_model_len=model_len,
        vocab_size=captured.vocab_size,
        num_layers=shortened.num_layers,
        num_captured=shortened.num_captured,
        capture_seconds=seconds,
        layers=facts,
        passes=_pass_facts(stages, shortened, {p.name for p in options.extra}),
        kernels=kernels,
        sizes=sizes,
        tensor_parallel_size=config.tensor_parallel_size,
        num_collectives=sum(k.count for k in kernels if k.op in COLLECTIVES),
        stages=tuple(stages),
    )


def _kept(source: ModelSource, built: BuiltModel) -> KeptWeights:
    """Weights that stay as stored; determined from config.json if there are no weight files."""
    if source.stored is None or source.config.quantization == "none":
        return ()
    if not any(weight_files(source.files.path)):
        return expected_weights(source.stored, built.module)
    return kept_parameters(built.module, source.open_tensors())


def _pass_facts(
    stages: Sequence[Stage], shortened: Shortened, users: set[str]
) -> tuple[PassFacts, ...]:
    found = []
    for before, after in zip(stages, stages[1:], strict=False):
        assert after.rewrite is not None and after.report is not None, "it follows a pass"
        report = after.report
        made = change(before, after, shortened.copies)
        found.append(
            PassFacts(
                name=report.name,
                title=title_of(after.rewrite.doc),
                is_users=report.name in users,
                enabled=report.enabled,
                removed=made.removed,
                added=made.added,
                layers=_whole(made.layers, shortened),
                notes=tuple(_together(report.notes)),
            )
        )
    return tuple(found)


def title_of(doc: str) -> str:
    """The first sentence of a pass's docstring."""
    return " ".join(doc.strip().partition("\n\n")[0].split())


def _whole(layers: Sequence[int], shortened: Shortened) -> tuple[int, ...]:
    """The corresponding layers of the whole model, including copies of the captured ones."""
    changed = set(layers)
    inside = [i for i, stand_in in enumerate(shortened.stand_in) if stand_in in changed]
    before = [-1] if -1 in changed else []
    behind = [shortened.num_layers] if shortened.num_captured in changed else []
    return (*before, *inside, *behind)


def _together(notes: Sequence[str]) -> list[str]:
    """Merge notes that differ only in the name of a node."""
    counts: dict[str, list[str]] = {}
    for note in notes:
        name, colon, reason = note.partition(": ")
        is_node = bool(colon) and re.fullmatch(r"[a-z_]+\d*(, [a-z_]+\d*)*", name) is not None
        counts.setdefault(reason if is_node else note, []).append(name if is_node else "")
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        if names[0]
        else reason
        for reason, names in counts.items()
    ]


def _sizes(
    config: EngineConfig,
    facts: dict[int, LayerFacts],
    last: Stage,
    model_len: int,
    vocab_size: int,
) -> Sizes:
    experts = next((f.experts for f in facts.values() if f.experts is not None), None)
    return Sizes(
        weight_bytes=total(facts, "weight_bytes"),
        read_bytes=total(facts, "read_bytes"),
        expert_bytes=total(facts, "expert_bytes"),
        num_experts=experts.num_experts if experts else 0,
        num_chosen=experts.num_chosen if experts else 0,
        caches=cache_kinds(
            [_cache_of(f, config, model_len) for f in facts.values() if f.kv_bytes_per_token]
        ),
        state_bytes=total(facts, "state_bytes"),
        activation_bytes=_activations(config, last, model_len, vocab_size),
        block_size=config.block_size,
        step_tokens=min(config.max_num_batched_tokens, model_len),
        max_model_len=model_len,
    )


def _cache_of(
    facts: LayerFacts, config: EngineConfig, model_len: int
) -> tuple[AttentionWindow, int]:
    """How far back a layer must keep its cache entries, and its bytes per token."""
    if not config.passes.get("group_caches", True):
        return WHOLE, facts.kv_bytes_per_token
    limits = [(0, 0) if a.entry_tokens else (a.window, a.chunk) for a in facts.attention]
    window, chunk = widest(limits)
    return AttentionWindow(window=window, chunk=chunk).within(model_len), facts.kv_bytes_per_token


def _activations(config: EngineConfig, last: Stage, model_len: int, vocab_size: int) -> int:
    """An estimate: a few values of the largest size that grows with the tokens, and the logits."""
    nodes = list(last.graph.graph.nodes)
    tokens: Any = next(n for n in nodes if n.meta.get("input") == StepInput(name="token_ids"))
    example = size_hint(tokens.meta["val"].shape[0])
    widest = max(
        (
            num_bytes(n) // example
            for n in nodes
            if n.op == "call_function" and last.layers.of[n] < last.layers.count
        ),
        default=0,
    )
    step = min(config.max_num_batched_tokens, model_len)
    return _LIVE_VALUES * widest * step + config.max_num_seqs * vocab_size * (4 + 4)
