"""LoadedModel -> ModelProfile: runs steps on a small cache to measure their memory and time.

The first start of an architecture also verifies that packed requests do not mix.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import fx

from llmc.compiler.cache import ProgramCache
from llmc.compiler.program import lowered
from llmc.engine.options import MAX_SCORED
from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.kernels.cpu.levels import pick_level
from llmc.pooling import TOKEN_TASKS
from llmc.runner import kv_cache
from llmc.runner.graphs import MAX_MIXED
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams
from llmc.startup.bind import StepMode, cache_layout, compile_kernels, make_runner, num_tables
from llmc.startup.compile import CompiledModel, LoadedModel, keep
from llmc.startup.sizing import ModelProfile, PeakMemory
from llmc.startup.verify_packing import LENGTHS, verify_packing

# Activations grow linearly with the tokens of a step, so measuring a short step is enough.
_PROFILE_TOKENS_CPU = 256
_PROFILE_TOKENS_REFERENCE = 16  # with the references, which are slow


def profile_model(
    compiled: CompiledModel, model: LoadedModel, mode: StepMode, cache: ProgramCache
) -> ModelProfile:
    """Run a prefill step and a decode step on a KV cache that is freed afterwards.

    Raises CompileError if a newly captured program mixes requests; otherwise it is kept in `cache`.
    On CPU the measured memory is kept with it, so that later starts do not run the steps.
    """
    config, program = model.source.config, model.program
    graph = lowered(program)
    tokens = min(config.max_num_batched_tokens, model.source.model_len)
    kernels = level.name if (level := pick_level()) is not None else "references"
    threads = torch.get_num_threads()
    scored = "-scored" if _scores_tokens(model) else ""
    name = f"{tokens}-tokens-{config.max_num_seqs}-requests{scored}-{threads}-threads-{kernels}"
    is_kept = program.device.type == "cpu" and mode.kernels_built and not config.swap_space
    if is_kept and program.from_cache:
        activations = cache.load_figure(compiled.key, name)
        if activations is not None:
            return _profile(model, graph, activations)
    profile = _measured(model, graph, mode, tokens)
    keep(compiled, cache)
    if is_kept:
        cache.save_figure(compiled.key, name, profile.overhead_bytes - _kept_bytes(model))
    return profile


def _profile(
    model: LoadedModel, graph: fx.GraphModule, activations: int, prefill_seconds: float = 0.0
) -> ModelProfile:
    return ModelProfile(
        graph=graph,
        layout=cache_layout(model),
        overhead_bytes=activations + _kept_bytes(model),
        bytes_per_token=kv_cache.bytes_per_token(model.program.caches),
        prefill_seconds_per_token=prefill_seconds,
    )


def _kept_bytes(model: LoadedModel) -> int:
    """Bytes of recurrent states and adapter slots, which the serving runner allocates too."""
    states = model.state_bytes * (model.source.config.max_num_seqs + 1)
    return states + model.program.adapter_bytes


def _measured(
    model: LoadedModel, graph: fx.GraphModule, mode: StepMode, tokens: int
) -> ModelProfile:
    config, program = model.source.config, model.program
    short = _PROFILE_TOKENS_CPU if mode.kernels_built else _PROFILE_TOKENS_REFERENCE
    probed = min(tokens, short) if program.device.type == "cpu" else tokens
    groups, blocks = num_tables(model), -(-probed // config.block_size)
    probe = make_runner(
        model,
        graph,
        mode,
        num_blocks=max(blocks, sum(LENGTHS)) * groups,
        max_model_len=max(probed, *LENGTHS),
        can_swap=False,
    ).runner
    each = most_samples(model, tokens) if program.device.type == "cuda" else 1

    def run_dummies() -> None:
        probe.dummy_run(1, probed)
        probe.dummy_run(config.max_num_seqs, each, each)

    if program.device.type == "cuda" and mode.ranks is None:
        # the steps below would compile one after another; at a cold start they are of many shapes
        compile_kernels(run_dummies if program.from_cache else probe.warm_up)
    plan = _profile_plan(probed, blocks * groups, is_scored=_scores_tokens(model))
    peak = PeakMemory(program.device)
    activations = _activations(probe, plan, peak, tokens)
    if mode.kernels_built:
        peak.start()
        probe.dummy_run(config.max_num_seqs, each, each)
        activations = max(activations, peak.grown_by())
    graph_bytes = graphs_to_come(probe)
    prefill_seconds = 0.0
    if config.swap_space:
        start = time.perf_counter()
        probe.execute(plan)
        prefill_seconds = time.perf_counter() - start
    if not program.from_cache and not program.single_sequence:
        verify_packing(
            probe,
            program.dtype,
            in_pieces=not model.source.facts.is_encoder,
            rounds=config.activation_bits == 8,
        )
    return _profile(model, graph, activations + graph_bytes, prefill_seconds / probed)


def _activations(probe: ModelRunner, plan: StepPlan, peak: PeakMemory, tokens: int) -> int:
    """Bytes that a step of `tokens` tokens needs, extrapolated from `plan` and a part of it.

    Memory that does not grow with the tokens, such as a weight that a reference dequantizes, is
    counted once. The smaller step runs first, since the allocator keeps the memory it has obtained.
    """
    (work,) = plan.work
    most = work.num_tokens
    least = most // 4
    if most >= tokens or least == 0:
        peak.start()
        probe.execute(plan)
        return peak.grown_by() * tokens // most
    part = replace(plan, work=(replace(work, num_tokens=least, sample=False),))
    peak.start()
    probe.execute(part)
    fixed = peak.grown_by()
    probe.execute(plan)
    per_token = max(0, peak.grown_by() - fixed) / (most - least)
    return fixed + int(per_token * (tokens - least))


def most_samples(model: LoadedModel, tokens: int) -> int:
    """Rows of logits per request in a step that has the most of them, of `tokens` tokens at most:
    one for each draft token, or for prompt tokens that are scored beside other requests' decodes.
    """
    config = model.source.config
    rows, drafting = config.max_num_seqs, config.speculative_config
    if model.source.pooling is not None:
        return 1
    drafted = rows * (0 if drafting is None else drafting.num_speculative_tokens)
    each = 1 + -(-max(drafted, MAX_SCORED) // rows)
    return max(1, min(each, tokens // rows))


def graphs_to_come(probe: ModelRunner) -> int:
    """Bytes that the graphs will need, from capturing and measuring the first three.

    All share the memory that the largest allocates. Each further one, of all that there may be, is
    assumed to add as much as another one did.
    """
    probe.capture_largest()
    largest = probe.graph_bytes
    grown: list[int] = []
    while len(grown) < 2 and probe.capture_next() is not None:
        grown.append(probe.graph_bytes - largest - sum(grown))
    if not grown:
        return largest
    num_more = len(probe.buckets.sizes) + MAX_MIXED - len(grown)
    return largest + sum(grown) + num_more * min(grown)


def _scores_tokens(model: LoadedModel) -> bool:
    """Whether every token of a prompt has a result."""
    pooling = model.source.pooling
    return pooling is not None and pooling.task in TOKEN_TASKS


def _profile_plan(tokens: int, num_blocks: int, *, is_scored: bool) -> StepPlan:
    """One request that fills a whole prefill step and uses the first `num_blocks` blocks."""
    new = NewRow(
        row=0,
        request_id="profile",
        token_ids=[0] * tokens,
        num_prompt_tokens=tokens,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_token_ids=(),
    )
    work = RowWork(
        row=0,
        start=0,
        num_tokens=tokens,
        sample=True,
        new_blocks=range(num_blocks),
        is_scored=is_scored,
    )
    return StepPlan(step=0, new_rows=(new,), work=(work,))
