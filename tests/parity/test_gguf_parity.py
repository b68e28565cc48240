"""The default model's GGUF file: what keeps its bits says the same as transformers does of the
widened weights."""

from __future__ import annotations

import math
from typing import Any

import bench_package  # noqa: F401 - makes `bench` importable
import pytest
import torch
from real_model import needs_model

from bench.divergence import divergence
from llmc import LLM, SamplingParams
from llmc.config import ActivationBits
from llmc.startup.default_model import default_model_path
from llmc.startup.gguf_files import model_directory
from llmc.text.tokenizer import Tokenizer
from llmc.weights.tensors import open_tensors

pytestmark = [needs_model, pytest.mark.slow]
# From the license of Python.
TEXT = """
In the event Licensee prepares a derivative work that is based on or incorporates Python or any part
thereof, and wants to make the derivative work available to others as provided herein, then Licensee
hereby agrees to include in any such work a brief summary of the changes made to Python. This
License Agreement will automatically terminate upon a material breach of its terms and conditions.
By copying, installing or otherwise using Python, Licensee agrees to be bound by the terms and
conditions of this License Agreement. Nothing in it shall be deemed to create any relationship of
agency, partnership, or joint venture between the two. The answer to the question is as follows:
"""


def widened() -> Any:
    """transformers' own model with every weight of the file in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_directory(default_model_path())
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: t.read() for name, t in open_tensors(folder, None, torch.float32).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected  # tied to the embedding
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], torch.Tensor]:
    """The text's tokens, and the log-probabilities [T - 1, V] of what follows each."""
    ids = Tokenizer.load(model_directory(default_model_path())).encode(TEXT)
    assert len(ids) > 100
    with torch.no_grad():
        logits = widened()(torch.tensor([ids])).logits[0, :-1]
    return ids, logits.log_softmax(-1)


# Most that a token's log-probability, the perplexity (as a share) and the distribution (KL of the
# 20 likeliest tokens and the rest, in nats) may differ, by the bits of inputs and the cache: by
# float32's rounding through 30 layers; by inputs in 16 bits; with a cache in 16 bits, too; by
# inputs in 8 bits, which this text of 138 tokens shows larger than others do (docs/quantization.md
# has those of 384).
LIMITS = {
    (32, "auto"): (2e-3, 1e-4, 1e-8),
    (16, "float32"): (2e-2, 1e-3, 1e-6),
    (16, "auto"): (2e-2, 1e-3, 5e-6),
    (8, "auto"): (1.5, 5e-2, 1e-2),
}


@pytest.mark.parametrize(("bits", "cache"), LIMITS)
def test_log_probabilities_of_a_text_are_those_of_the_widened_weights(
    bits: ActivationBits, cache: str, expected: tuple[list[int], torch.Tensor]
) -> None:
    ids, wanted = expected
    options = {"opt_level": 0, "max_num_seqs": 1, "max_model_len": 512, "kv_cache_dtype": cache}
    with LLM(device="cpu", activation_bits=bits, **options) as llm:
        assert llm.info.dtype == "float32" and llm.info.weight_bytes < 150 * 2**20
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
        [output] = llm.generate([ids], params, progress=False)
    assert output.prompt_logprobs is not None
    told = [{i: p.logprob for i, p in (place or {}).items()} for place in output.prompt_logprobs]
    got = torch.tensor([place[i] for place, i in zip(told[1:], ids[1:], strict=True)])
    want = wanted.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    most, perplexity, kl = LIMITS[bits, cache]
    assert (got - want).abs().max() < most
    mine, theirs = (math.exp(-float(values.mean())) for values in (got, want))
    assert abs(mine / theirs - 1) < perplexity
    assert divergence(wanted.double(), told[1:]) < kl
