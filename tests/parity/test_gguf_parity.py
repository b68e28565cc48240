"""The default model's GGUF file: what keeps its bits says the same as transformers does of the
widened weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from real_model import needs_model

from llmc import LLM, SamplingParams
from llmc.startup.default_model import default_model_path
from llmc.startup.gguf_files import model_directory
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


def test_log_probabilities_of_a_text_are_those_of_the_widened_weights() -> None:
    with LLM(device="cpu", opt_level=0, max_num_seqs=1, max_model_len=512) as llm:
        assert llm.info.dtype == "float32" and llm.info.weight_bytes < 150 * 2**20
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate(TEXT, params, progress=False)
    ids = output.prompt_token_ids
    told = output.prompt_logprobs
    assert told is not None and len(ids) > 100
    got = torch.tensor([told[i][ids[i]].logprob for i in range(1, len(ids))])  # type: ignore[index]
    with torch.no_grad():
        logits = widened()(torch.tensor([ids])).logits[0, :-1]
    want = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert (got - want).abs().max() < 2e-3  # float32 rounding through 30 layers
    mine, theirs = (math.exp(-float(values.mean())) for values in (got, want))
    assert abs(mine / theirs - 1) < 1e-3, "perplexity"
