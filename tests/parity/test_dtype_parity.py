"""`auto` keeps the checkpoint's dtype, and in each our logits are as near to the exact ones as
those of transformers in that dtype are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import op_cases
import pytest
import tiny_engine
import torch
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_models import VOCAB, load_reference, prompts, reference_logits, save_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from llmc.check.check import check_model
from llmc.config import EngineConfig

LENGTHS = tuple(range(1, 41))
TOP = 20
MAX_ERROR = {  # of a log-probability
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.0125,
}
BITS_16 = (torch.bfloat16, torch.float16)
MIXED_DTYPES = {
    "codegen": "scores in float32, values in 16 bits",
    "gemma4_text": "norms in float32 by a power, cast before the rotation",
    "openai-gpt": "a mask of -1e4, which bfloat16 rounds",
}
ROUNDING = 1e-6  # mean error of sums in float32, in one order or another


def top_logprobs(engine: Any, tokens: list[int]) -> torch.Tensor:
    """Our log-probabilities of the first output token: [V], NaN outside the top ones."""
    from llmc.engine.messages import AddRequest
    from llmc.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, logprobs=TOP, max_tokens=1, ignore_eos=True)
    engine.add(AddRequest(request_id="0", prompt_token_ids=tokens, sampling=params))
    out = torch.full((VOCAB,), float("nan"))
    while engine.has_work:
        for update in engine.step():
            assert update.error is None
            for lp in update.logprobs:
                out[list(lp.top_token_ids)] = torch.tensor(list(lp.top_logprobs))
    return out


def errors(
    path: Path,
    running: tiny_engine.Running,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and those of transformers; exact is the same checkpoint computed in float32."""
    exact, theirs = load_reference(path), load_reference(path, dtype)
    our_errors, their_errors = [], []
    for prompt in prompts(lengths):
        tokens = list(prompt)
        want = reference_logits(exact, tokens)[-1].log_softmax(-1)
        ours = top_logprobs(running.engine(max_num_batched_tokens=chunk), tokens)
        seen = ~ours.isnan()
        assert int(seen.sum()) == TOP
        our_errors.append((ours - want)[seen].abs())
        same = reference_logits(theirs, tokens)[-1].log_softmax(-1)
        their_errors.append((same - want)[seen].abs())
    return torch.cat(our_errors), torch.cat(their_errors)


@pytest.mark.parametrize("dtype", tiered(MAX_ERROR, torch.bfloat16), ids=str)
def test_logprobs_in_the_dtype_of_the_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    path = save_checkpoint("qwen3", tmp_path, dtype=dtype)
    running = tiny_engine.start(path, dtype="auto")
    assert running.started.info.dtype == str(dtype).removeprefix("torch.")
    assert {cache.dtype for cache in running.caches} == {dtype}
    our_error, their_error = errors(path, running, dtype, LENGTHS, chunk=16)
    assert our_error.max() < MAX_ERROR[dtype]
    assert our_error.mean() <= 1.2 * their_error.mean() + ROUNDING


@pytest.mark.parametrize("model_type", tiered(MIXED_DTYPES, "gemma4_text"))
def test_models_whose_code_mixes_dtypes(model_type: str, tmp_path: Path) -> None:
    path = save_random(tiny_config(model_type), tmp_path)
    exact, theirs = load_reference(path), load_reference(path, torch.bfloat16)
    running = tiny_engine.start(path, dtype="bfloat16")
    our_errors, their_errors = [], []
    for prompt in prompts(LENGTHS[::4]):
        tokens = list(prompt)
        want = reference_logits(exact, tokens)[-1].log_softmax(-1)
        ours = top_logprobs(running.engine(), tokens)
        seen = ~ours.isnan()
        our_errors.append((ours - want)[seen].abs())
        same = reference_logits(theirs, tokens)[-1].log_softmax(-1)
        their_errors.append((same - want)[seen].abs())
    assert torch.cat(our_errors).mean() <= 1.2 * torch.cat(their_errors).mean()


@pytest.mark.parametrize("dtype", tiered(BITS_16, torch.bfloat16), ids=str)
def test_logprobs_of_latents_in_both_forms(dtype: torch.dtype, tmp_path: Path) -> None:
    """Prompts whose last chunks are expanded, and some whose are not."""
    model: Any = load_reference(save_random(tiny_config("minicpm3"), tmp_path), dtype)
    model.save_pretrained(tmp_path)
    running = tiny_engine.start(tmp_path, dtype="auto", max_model_len=128)
    lengths = (3, 20, *range(33, 117, 8))
    our_error, their_error = errors(tmp_path, running, dtype, lengths, chunk=50)
    assert our_error.mean() <= 1.2 * their_error.mean() + ROUNDING


@pytest.mark.parametrize("dtype", tiered(BITS_16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("quantization", tiered(["int8", "int4", "fp8"], "int4"))
def test_quantized_weights_serve_every_dtype(
    dtype: torch.dtype, quantization: str, tmp_path: Path
) -> None:
    """The same tokens as the same low-bit weights give in float32, but where those are close."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    path = save_checkpoint("qwen3", tmp_path, dtype=dtype, **sizes)
    got = tiny_engine.start(path, dtype="auto", quantization=quantization)
    want = tiny_engine.start(path, dtype="float32", quantization=quantization)
    assert got.started.info.dtype == str(dtype).removeprefix("torch.")
    for prompt in prompts((1, 4, 9, 33)):
        tokens = list(prompt)
        ours, exact = top_logprobs(got.engine(), tokens), top_logprobs(want.engine(), tokens)
        both = ~ours.isnan() & ~exact.isnan()
        assert int(both.sum()) > TOP / 2
        assert (ours - exact)[both].abs().max() < MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", tiered(MAX_ERROR, torch.bfloat16), ids=str)
def test_every_dtype_is_certified(dtype: torch.dtype, tmp_path: Path) -> None:
    path = save_checkpoint("qwen3", tmp_path, dtype=dtype)
    config = EngineConfig(model=str(path), device="cpu", opt_level=0, max_model_len=64)
    assert check_model(config, longest_prompt=40).certified


PRODUCTS = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "dot", "convolution")


class Called(TorchDispatchMode):
    """Names of torch's own products of 16-bit numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.ours: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if space == "llmc_cpu":
            self.ours.add(name)
        elif name.partition(".")[0] in PRODUCTS and any(a.dtype.itemsize == 2 for a in given):
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", tiered(["qwen3", "mixtral", "qwen3_next"], "mixtral"))
@pytest.mark.parametrize("dtype", tiered(BITS_16, torch.bfloat16), ids=str)
def test_torchs_products_of_16_bits_are_not_called(
    dtype: torch.dtype, model_type: str, tmp_path: Path
) -> None:
    """CPUs without instructions for them take ten times as long as for float32."""
    op_cases.require_cpu_ops()
    path = save_random(tiny_config(model_type), tmp_path)
    engine = tiny_engine.start(path, dtype=str(dtype).removeprefix("torch.")).engine()
    with Called() as called:
        tiny_engine.generate(engine, prompts((3, 9, 17)), 4)
    assert called.ours and not called.names
