"""Ranks give together what one gives, token for token in float32, whatever the engine does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from rank_threads import RankThreads, rank_threads
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_models import FAMILIES, prompts, save_checkpoint

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.kv.swap import SwapConfig
from llmc.engine.messages import AddRequest
from llmc.engine.plan import RowMask, StepPlan
from llmc.engine.spec_decode.ngram import NgramSpeculation
from llmc.inspect.inspect import inspect_model
from llmc.kernels.choose_experts import sum_experts
from llmc.kernels.collectives import all_reduce
from llmc.kernels.sum_expert_linear import sum_expert_linear
from llmc.passes.edit import arguments, calls, is_call, only_user, val
from llmc.passes.options import PipelineOptions
from llmc.runner.step_recordings import StepRecordings
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig
from llmc.startup import compile as compile_module

PROMPTS = prompts((1, 5, 19, 33, 12))
NUM_TOKENS = 10
# The ranks, and the sums in a step: the embedding, and two in each layer less what stays whole.
CASES = {
    "llama": (2, 5),  # two key heads
    "qwen3": (4, 5),  # fewer key heads than ranks
    "mistral": (2, 5),  # a window
    "mixtral": (2, 5),  # routed experts
    "gpt_oss": (2, 5),  # with a bias each, sinks and windows
    "olmo2": (2, 3),  # a norm over all heads: attention stays whole
    "bamba": (2, 5),  # attention beside recurrent layers
    "mamba2": (2, 1),  # recurrent throughout
    "deepseek_v3": (2, 5),  # keys and values of heads out of a latent; routed and shared experts
}
LATENT = "deepseek_v3"
ROUTED = ("mixtral", "gpt_oss", "deepseek_v3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """The same checkpoint on one rank and on several."""

    family: str
    one: tiny_engine.Running
    many: tiny_engine.Running
    num_sums: int


def start_pair(family: str, path: Path, **options: Any) -> Pair:
    size, num_sums = CASES[family]
    if family in FAMILIES:
        save_checkpoint(family, path)
    else:
        save_random(tiny_config(family), path)
    one = tiny_engine.start(path, **options)
    with rank_threads():
        many = tiny_engine.start(path, tensor_parallel_size=size, **options)
    return Pair(family=family, one=one, many=many, num_sums=num_sums)


def stop(pair: Pair) -> None:
    processes = pair.many.started.rank_processes
    assert isinstance(processes, RankThreads)
    processes.stop()


@pytest.fixture(scope="module", params=tiered(CASES, "qwen3", "mixtral", "mamba2", "deepseek_v3"))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    made = start_pair(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    stop(made)


def same(left: EngineCore, right: EngineCore, **sampling: Any) -> None:
    want, got = (tiny_engine.generate(e, PROMPTS, NUM_TOKENS, **sampling) for e in (left, right))
    assert [g.tokens for g in got] == [w.tokens for w in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tiny_engine.LOGPROB_TOLERANCE)
    assert left.stats() == right.stats()


def test_what_is_cut(pair: Pair) -> None:
    (report,) = (r for r in pair.many.started.info.pass_reports if "shard_linears" in r)
    assert f"{pair.num_sums} llmc.all_reduce.default" in report
    assert pair.many.started.info.weight_bytes < pair.one.started.info.weight_bytes
    own = pair.one.started.info.kv_bytes_per_token
    if pair.family == LATENT:  # one rank caches that, several keys and values: 2 layers, 4 heads
        own = 2 * 4 * (16 + 12) * 4
    assert pair.many.started.info.kv_bytes_per_token == (
        own if pair.family in ("olmo2", "mamba2") else own // 2
    )


def test_whole_prompts_then_recorded_decodes(pair: Pair) -> None:
    for _ in range(2):
        same(pair.one.engine(), pair.many.engine())
    recordings = pair.many.started.runner._recordings
    assert isinstance(recordings, StepRecordings)
    if pair.family == "llama":
        assert recordings.num_replays > 0


def test_chunks_preemption_and_the_prefix_cache(pair: Pair) -> None:
    limits = {"num_blocks": 14, "max_num_batched_tokens": 9}
    same(pair.one.engine(**limits), pair.many.engine(**limits))


def test_prefixes_are_found_on_every_rank(pair: Pair) -> None:
    """With recurrent layers each rank goes on from its own snapshot."""
    engines = pair.one.engine(), pair.many.engine()
    for _ in range(2):
        same(*engines)
    assert engines[0].stats().prefix_cache_hits >= 32


def test_draws_penalties_and_restrictions(pair: Pair) -> None:
    sampling = {
        "temperature": 0.9, "top_p": 0.95, "seed": 5, "presence_penalty": 0.5,
        "logit_bias": {7: 2.0}, "bad_words": None, "allowed_token_ids": list(range(5, 60)),
    }  # fmt: skip
    same(pair.one.engine(), pair.many.engine(), **sampling)


@pytest.mark.parametrize("family", tiered(ROUTED, "mixtral"))
def test_experts_are_added_up_before_the_ranks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the passes for GPUs, each op by its reference: a rank's experts are one op with their
    sum, and a row for each token is what the ranks exchange."""
    monkeypatch.setattr(
        compile_module,
        "PipelineOptions",
        lambda **given: PipelineOptions(**{**given, "device_type": "cuda"}),
    )
    pair = start_pair(family, tmp_path)
    try:
        same(pair.one.engine(), pair.many.engine())
    finally:
        stop(pair)
    config = EngineConfig(model=str(tmp_path), device="cpu", tensor_parallel_size=2)
    graph = inspect_model(config).stages[-1].graph.graph
    sums = calls(graph, sum_expert_linear.overload)
    assert sums and not calls(graph, sum_experts.overload)
    for node in sums:
        added = only_user(node) if family == LATENT else node  # to it, its shared experts add
        assert added is not None and any(is_call(n, all_reduce.overload) for n in added.users)
        assert val(node).shape[0] == val(arguments(node).share).shape[0], "tokens"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = start_pair("llama", tmp_path_factory.mktemp("llama"), swap_space=2**20)
    yield made
    stop(made)


def test_sequences_that_share_a_prompt(llama: Pair) -> None:
    got = []
    for running in (llama.one, llama.many):
        engine = running.engine(enable_prefix_caching=False)
        for index in range(3):
            sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=index, ignore_eos=True)
            engine.add(
                AddRequest(
                    request_id=str(index),
                    prompt_token_ids=PROMPTS[2],
                    sampling=sampling,
                    fork_of="0" if index else None,
                )
            )
        got.append({name: one.tokens for name, one in tiny_engine.finish(engine).items()})
    assert got[0] == got[1] and len({tuple(tokens) for tokens in got[0].values()}) == 3


def test_swapped_blocks_come_back_on_every_rank(llama: Pair) -> None:
    engines = []
    for running in (llama.one, llama.many):
        space = running.started.runner.swap_space
        swap = running.started.engine.scheduler.rows.swap
        assert space is not None and swap is not None
        cheap = dataclasses.replace(swap.config.cost, prefill_seconds_per_token=1e9)
        engines.append(
            running.engine(
                num_blocks=14,
                enable_prefix_caching=False,
                swap_config=SwapConfig(space.num_slots, cheap),
            )
        )
    same(*engines)
    assert engines[1].stats().num_swaps > 0


def test_draft_tokens(llama: Pair) -> None:
    def engine(running: tiny_engine.Running) -> EngineCore:
        return running.engine(speculation=NgramSpeculation(SpeculativeConfig()))

    same(engine(llama.one), engine(llama.many), allowed_token_ids=[7, 8])
    assert engine(llama.many).stats().num_failed_steps == 0


def test_masks_of_structured_outputs(llama: Pair) -> None:
    """What a grammar does to a row, each step another mask."""

    def engine(running: tiny_engine.Running) -> EngineCore:
        return running.engine(runner=_Masking(running.started.runner))

    same(engine(llama.one), engine(llama.many))


class _Masking:
    """A runner whose plans allow eight tokens in each row, others at each step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> Any:
        words = torch.zeros(3, dtype=torch.int32)
        words[plan.step % 3] = 0xFF << plan.step % 20
        masks = [RowMask(row=work.row, words=words.numpy().tobytes()) for work in plan.work]
        return self._runner.submit(dataclasses.replace(plan, row_masks=masks))
