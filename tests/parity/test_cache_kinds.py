"""Layers whose caches are not keys and values of heads: answers are transformers' own.

Sparse indexers, over contexts many times as long as what they choose, and latents.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_engine
from oracle import Replay
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_models import Continuation, continue_greedily, load_reference, prompts

from llmc.engine.messages import AddRequest
from llmc.sampling_params import SamplingParams

TOP_K = 8
LENGTHS = (3, 121, 48, 70)
NUM_TOKENS = 8
CONTEXT = 160
INDEX = (1, 16)  # heads and channels of an indexer's keys
LATENT = {(1, 24), (1, 0)}  # 16 channels and 8 of position; no values beside them
KINDS = {
    "deepseek_v32": "every layer has an indexer",
    "glm_moe_dsa": "a layer attends to what an earlier one chose",
    "minimax_m3_vl_text": "blocks, chosen for each KV head",
    "deepseek_v2": "latents, rotated as complex numbers",
    "deepseek_v3": "latents",
    "minicpm3": "latents, and as many channels of a value as of a key",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    expected: list[Continuation]
    is_sparse: bool
    running: tiny_engine.Running


@pytest.fixture(scope="module", params=tiered(KINDS, "deepseek_v32", "deepseek_v2"))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    config = tiny_config(request.param)
    blocks = getattr(config, "index_topk_blocks", 0) * getattr(config, "index_block_size", 0)
    chosen = blocks or getattr(config, "index_topk", 0)
    assert chosen in (0, TOP_K)
    path = save_random(config, tmp_path_factory.mktemp("caches"))
    model: Any = load_reference(path)
    expected = [continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)]
    running = tiny_engine.start(path, max_model_len=CONTEXT, swap_space=2**20)
    return Subject(expected=expected, is_sparse=chosen > 0, running=running)


def assert_expected(subject: Subject, got: list[tiny_engine.Generated]) -> None:
    skipped, wrong = tiny_engine.differences(subject.expected, got)
    assert not wrong, "; ".join(wrong)
    assert skipped <= len(got) * NUM_TOKENS // 20


def answers(subject: Subject, engine: Any) -> list[tiny_engine.Generated]:
    return tiny_engine.generate(engine, [r.prompt for r in subject.expected], NUM_TOKENS)


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_num_batched_tokens": 17}, {"max_num_batched_tokens": 50}],
    ids=["whole", "short chunks", "chunks"],
)
def test_packed_answers_then_those_of_cached_prefixes(
    subject: Subject, limits: dict[str, int]
) -> None:
    engine = subject.running.engine(**limits)  # type: ignore[arg-type]
    assert_expected(subject, answers(subject, engine))
    assert engine.stats().prefix_cache_hits == 0
    assert_expected(subject, answers(subject, engine))
    assert engine.stats().prefix_cache_hits > max(LENGTHS)


def test_many_new_tokens_behind_a_cached_prefix(subject: Subject) -> None:
    engine = subject.running.engine()
    longest = max((r.prompt for r in subject.expected), key=len)
    tiny_engine.generate(engine, [longest[:64]], 1)
    assert_expected(subject, answers(subject, engine))
    assert engine.stats().prefix_cache_hits == 64


@pytest.mark.parametrize("swaps", [False, True], ids=["recomputed", "swapped"])
def test_preempted_answers(subject: Subject, swaps: bool) -> None:
    swap = subject.running.started.engine.scheduler.rows.swap
    assert swap is not None
    room = swap.config
    seconds = 1e9 if swaps else 0.0
    cost = dataclasses.replace(room.cost, prefill_seconds_per_token=seconds)
    engine = subject.running.engine(
        num_blocks=33,  # the last two prompts fit in together, their answers do not
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
        swap_config=dataclasses.replace(room, cost=cost),
    )
    assert_expected(subject, answers(subject, engine))
    assert engine.stats().num_preemptions > 0
    assert (engine.stats().num_swaps > 0) == swaps


def test_verified_drafts(subject: Subject) -> None:
    right = {str(i): list(one.tokens) for i, one in enumerate(subject.expected)}
    engine = subject.running.engine(speculation=Replay(right, random.Random(1)))
    assert_expected(subject, answers(subject, engine))
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens


def test_forks_of_one_prompt_copy_its_keys(subject: Subject) -> None:
    engine = subject.running.engine(enable_prefix_caching=False)
    for i, one in enumerate(subject.expected):
        for name, fork_of in ((str(i), None), (f"{i}-fork", str(i))):
            engine.add(
                AddRequest(
                    request_id=name,
                    prompt_token_ids=list(one.prompt),
                    sampling=SamplingParams(
                        temperature=0.0, logprobs=0, max_tokens=NUM_TOKENS, ignore_eos=True
                    ),
                    fork_of=fork_of,
                )
            )
    got = tiny_engine.finish(engine)
    for suffix in ("", "-fork"):
        assert_expected(subject, [got[f"{i}{suffix}"] for i in range(len(LENGTHS))])


def test_a_block_holds_what_a_token_is_said_to_take(subject: Subject) -> None:
    started = subject.running.started
    block_bytes = sum(cache[0].nbytes for cache in subject.running.caches)
    assert block_bytes == started.info.block_size * started.info.kv_bytes_per_token
    widths = {(cache.shape[1], cache.shape[3]) for cache in subject.running.caches}
    assert INDEX in widths if subject.is_sparse else widths == LATENT
