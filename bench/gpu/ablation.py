"""`ablate`: the effect of each pass, switched off in turn, and of async steps.

One small model, a few batch sizes; everything else is as in the other parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.gpu.decode import steady_steps
from bench.gpu.direct import decode_seconds
from bench.gpu.record import Record
from bench.gpu.settings import GIB, Settings
from bench.gpu.subject import Subject, release, running
from llmc.passes.options import PipelineOptions
from llmc.passes.pipeline import pipeline


def run(settings: Settings, record: Record) -> None:
    level = settings.default_level
    record.measure(f"-O{level}", partial(variant, settings, {}))
    release()
    record.measure("async off", partial(variant, settings, {}, async_scheduling=False))
    release()
    default = record.data.get(f"-O{level}", {})
    for name in optional_passes(settings):
        if not _matched(name, default.get("passes", ())):
            continue  # there is nothing to switch off
        record.measure(f"{name} off", partial(variant, settings, {"passes": {name: False}}))
        release()


_INERT = ("quantize_linears",)  # only active on request


def optional_passes(settings: Settings) -> list[str]:
    options = PipelineOptions(block_size=16, max_positions=64, device_type=settings.device)
    return [p.name for p in pipeline(options) if not p.required and p.name not in _INERT]


def _matched(name: str, reports: Any) -> bool:
    """Whether the pass changed the graph; True if there is no report."""
    mine = [r for r in reports if r.startswith(f"{name}:")]
    return not mine or "no match" not in mine[0]


def engine_options(settings: Settings) -> dict[str, Any]:
    """The options of every variant. Those that determine the sizes of the step's tensors must be
    the same, or code compiled for one can't be reused for the next."""
    return {
        "max_num_seqs": max(settings.ablation_batches),
        "max_num_batched_tokens": min(settings.max_tokens, 2048),
        "kv_cache_memory": min(settings.model(settings.ablated).cache_bytes, 4 * GIB),
        "cuda_graph_buckets": settings.ablation_batches,
    }


def variant(
    settings: Settings, options: dict[str, Any], *, async_scheduling: bool = True
) -> dict[str, Any]:
    model = settings.model(settings.ablated)
    with running(settings, model, **engine_options(settings), **options) as subject:
        found = {str(b): _at(subject, b, async_scheduling) for b in settings.ablation_batches}
        return {
            "decode": found,
            "opt_level": subject.startup["opt_level"],
            "usable_seconds": subject.startup["usable_seconds"],
            "inductor_seconds": subject.startup["inductor_seconds"],
            "passes": subject.startup["passes"],
        }


def _at(subject: Subject, batch: int, async_scheduling: bool) -> dict[str, float]:
    steps = steady_steps(subject, batch, async_scheduling=async_scheduling)
    context = subject.settings.prompt_len
    steps["device_ms"] = decode_seconds(subject, batch, context, 16) * 1e3
    return steps
