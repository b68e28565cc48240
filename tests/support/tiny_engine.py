"""Runs a tiny checkpoint in an EngineCore of a given size, with caches that start full of NaN."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
from shared_captures import shared_captures
from torch import Tensor

from llmc.compiler.cache import ProgramCache
from llmc.compiler.program import Program
from llmc.compiler.serialize import dump_graph, load_graph
from llmc.config import EngineConfig
from llmc.engine.adapters import AdapterLoader
from llmc.engine.core import EngineCore
from llmc.engine.kv.layout import CacheLayout
from llmc.engine.kv.swap import SwapConfig
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits, RowStates
from llmc.engine.plan import Runner
from llmc.engine.spec_decode.speculation import Speculation
from llmc.lora_request import LoRARequest
from llmc.runner import kv_cache
from llmc.sampling_params import SamplingParams
from llmc.startup.start import Started, start_engine

BLOCK_SIZE = 4
MAX_ROWS = 8
CONTEXT = 64
TIE = 1e-4  # if the top logits are closer, either token is accepted
LOGPROB_TOLERANCE = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A started engine, its cache tensors, and the slots of its recurrent states."""

    started: Started
    caches: list[Tensor]
    states: list[Tensor]

    def engine(
        self,
        *,
        max_num_batched_tokens: int = 256,
        max_num_seqs: int = MAX_ROWS,
        num_blocks: int | None = None,
        tight_for: int | None = None,
        enable_prefix_caching: bool = True,
        eos_token_ids: Sequence[int] = (),
        runner: Runner | None = None,
        speculation: Speculation | None = None,
        row_states: RowStates | None = None,
        swap_config: SwapConfig | None = None,
        adapters: AdapterLoader | None = None,
        num_snapshots: int | None = None,
    ) -> EngineCore:
        """A new EngineCore on the same runner, with poisoned caches.

        `num_blocks` is per group of layers; with `tight_for` there are two blocks more than one
        request of that many tokens needs. `num_snapshots`: at most as many as at its start.
        """
        scheduler = self.started.engine.scheduler
        windows = scheduler.layout.windows
        if num_blocks is not None:
            num_blocks *= len(windows)
        if tight_for is not None:
            layout = CacheLayout(
                block_size=BLOCK_SIZE, step_tokens=max_num_batched_tokens, windows=windows
            )
            num_blocks = layout.blocks_for(tight_for) + 2
        for tensor in (*self.caches, *self.states):
            poison(tensor)
        info = self.started.info
        return EngineCore(
            runner or self.started.runner,
            EngineLimits(
                num_blocks=num_blocks or info.num_blocks,
                block_size=info.block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
            ),
            EngineFeatures(
                eos_token_ids=eos_token_ids,
                enable_prefix_caching=enable_prefix_caching and info.can_cache_prefixes,
                num_snapshots=info.num_snapshots if num_snapshots is None else num_snapshots,
                share_prompts=not info.state_bytes_per_request,
                speculation=speculation,
                row_states=row_states,
                swap_config=swap_config,
                adapters=adapters,
                windows=windows,
                whole_images=info.images is not None and info.images.most_rows > 0,
                long_context_from=scheduler.rows.long_context_from,
            ),
        )


def poison(cache: Tensor) -> None:
    """Fill it with NaN; in an int8 cache, the scales are."""
    cache.fill_(float("nan") if cache.is_floating_point() else -1)


def start(path: Path, **options: Any) -> Running:
    """start_engine at -O0, with every cache tensor that it allocates recorded and poisoned."""
    made: list[list[Tensor]] = []
    states: list[list[Tensor]] = []
    allocate, allocate_states = kv_cache.allocate, kv_cache.allocate_states

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        layers = allocate(*args, **kwargs)
        made.append([cache for layer in layers for cache in layer])
        for cache in made[-1]:
            poison(cache)
        return layers

    def poisoned_states(*args: Any, **kwargs: Any) -> Any:
        states.append([state.fill_(float("nan")) for state in allocate_states(*args, **kwargs)])
        return states[-1]

    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "opt_level": 0,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_ROWS,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": 256,
    }
    with (
        mock.patch.object(kv_cache, "allocate", poisoned),
        mock.patch.object(kv_cache, "allocate_states", poisoned_states),
        mock.patch.object(
            ProgramCache, "load", return_value=None
        ),  # a cached result on disk proves nothing
        mock.patch.object(ProgramCache, "save", _check_that_it_can_be_loaded),
        shared_captures(),
    ):
        started = start_engine(EngineConfig(model=str(path), **{**defaults, **options}))
    if started.upgrade is not None:
        # waited for, or the step function would be swapped in the middle of a test
        assert started.upgrade.wait(300), started.upgrade.error
        while started.runner.use_idle_time(has_work=True):  # where the plain step has graphs
            pass
    stay = made[len(made) // 2 :]  # the first half are the caches of the profile steps
    caches = [cache for caches in stay for cache in caches]
    return Running(started=started, caches=caches, states=states[-1])


def _check_that_it_can_be_loaded(_: ProgramCache, __: str, program: Program) -> None:
    """Check, without the disk, that a program becomes plain data and the same program again."""
    nodes, constants = dump_graph(program.graph.graph)
    safetensors.torch.save(constants)  # fails where two tensors share memory
    loaded = load_graph(json.loads(json.dumps(nodes)), constants, program.device)
    again, _ = dump_graph(loaded.graph)
    assert _json_without_values(again) == _json_without_values(nodes)


def _json_without_values(nodes: list[dict[str, Any]]) -> str:
    """The nodes as JSON without values: symbolic sizes become numbers when loaded."""
    return json.dumps([{k: v for k, v in node.items() if k != "val"} for node in nodes], indent=0)


@dataclass(slots=True, kw_only=True)
class Generated:
    tokens: list[int]
    logprobs: list[float]


def generate(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    adapter: LoRARequest | None = None,
    **sampling: Any,
) -> list[Generated]:
    """Generate for all prompts in one batch, greedy by default; fails on any request's error."""
    params = SamplingParams(
        **{"temperature": 0.0, "logprobs": 0, "max_tokens": max_tokens, "ignore_eos": True}
        | sampling
    )
    for i, prompt in enumerate(prompts):
        engine.add(
            AddRequest(
                request_id=str(i),
                prompt_token_ids=list(prompt),
                sampling=params,
                adapter=adapter,
            )
        )
    out = finish(engine)
    return [out[str(i)] for i in range(len(prompts))]


def finish(engine: EngineCore) -> dict[str, Generated]:
    """Run to the end; returns results by request id, and fails on any request's error."""
    out: dict[str, Generated] = {}
    while engine.has_work:
        for update in engine.step():
            assert update.error is None, update.error
            mine = out.setdefault(update.request_id, Generated(tokens=[], logprobs=[]))
            mine.tokens += update.new_token_ids
            mine.logprobs += [lp.logprob for lp in update.logprobs]
    engine.check()
    return out


def differences(expected: Sequence[Any], got: Sequence[Generated]) -> tuple[int, list[str]]:
    """The number of positions skipped after ties in transformers' logits, and all differences."""
    skipped, wrong = 0, []
    for reference, mine in zip(expected, got, strict=True):
        assert len(mine.tokens) == len(reference.tokens)
        name = f"prompt of {len(reference.prompt)}"
        for i, (want, have) in enumerate(zip(reference.tokens, mine.tokens, strict=True)):
            if want != have and reference.margins[i] < TIE:
                skipped += len(mine.tokens) - i  # the sequences differ from here on
                break
            if want != have:
                wrong.append(f"{name}, token {i}: {have}, transformers {want}")
                break
            if abs(mine.logprobs[i] - reference.logprobs[i]) > LOGPROB_TOLERANCE:
                wrong.append(
                    f"{name}, token {i}: logprob {mine.logprobs[i]}, "
                    f"transformers {reference.logprobs[i]}"
                )
    return skipped, wrong
