"""One class for every way in which models differ; `bench.coverage` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_engine
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_models import continue_greedily, load_reference, prompts

LENGTHS = (1, 5, 19, 33, 12)
NUM_TOKENS = 8
MECHANISMS = {
    "bloom": "slopes, attention of its own",
    "gpt_neo": "windows in buffers, attention of its own",
    "falcon": "one key head, scores scaled in place",
    "gemma4_text": "layers that share keys and values, head sizes by layer, rotation before heads",
    "llama4_text": "chunks, and queries scaled by positions that the model counts itself",
    "gemma3n_text": "several residual streams, sparse activations, layers that share a cache",
    "deepseek_v32": "latent attention, a sparse indexer",
    "deepseek_v4": "entries that stand for several tokens beside a window, an indexer of these",
    "qwen3_next": "gated delta rule beside attention",
    "mamba2": "scan with a decay per head, no attention",
    "mamba": "scan with a state per channel, no attention",
    "lfm2": "short convolutions",
    "zamba2": "one attention module called several times",
    "minimax": "linear attention in a loop over blocks, beside attention",
    "rwkv": "a softmax over all tokens whose logits fade, no attention",
    "jetmoe": "experts over rows sorted by expert, in attention too",
    "inkling_text": "a bias that tokens have for each distance, scaled by positions",
    "inkling2_text": "the same, sinks of the token, convolutions with weights of the token",
    "longcat_flash": "experts in a loop of the model's own, some of which change nothing",
}


ORDINARY = (
    "llama4_text", "qwen3_next", "minimax", "mamba2", "lfm2", "jetmoe", "deepseek_v32",
    "inkling_text",
)  # fmt: skip


# Dynamo makes an instance of an autograd function that a model defines
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("model_type", tiered(MECHANISMS, *ORDINARY))
def test_whole_chunked_and_preempted_answers_are_those_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    path = save_random(tiny_config(model_type), tmp_path)
    model = load_reference(path)
    expected = [continue_greedily(model, p, NUM_TOKENS) for p in prompts(LENGTHS)]
    running = tiny_engine.start(path)
    for limits in ({}, {"num_blocks": 14, "max_num_batched_tokens": 7}):
        engine = running.engine(**limits)  # type: ignore[arg-type]
        got = tiny_engine.generate(engine, [r.prompt for r in expected], NUM_TOKENS)
        skipped, wrong = tiny_engine.differences(expected, got)
        assert not wrong, f"{limits}: {'; '.join(wrong)}"
        assert skipped <= len(expected) * NUM_TOKENS // 20
        # windows give back what others need; test_greedy_parity preempts such models
        is_roomy = not limits or not engine.scheduler.layout.is_whole
        assert engine.stats().num_preemptions > 0 or is_roomy
