"""Fresh prompts as the runner finds them, and what torch's FlashAttention takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmc.kernels.paged_attention import make_case, paged_attention
from llmc.kernels.prompts import MIN_TOKENS, Prompts, fits_flash

CPU = torch.device("cpu")


def test_prompts_are_the_last_requests_of_a_step() -> None:
    found = Prompts.find(
        [(1, 70), (200, 200), (1, 9), (128, 128), (MIN_TOKENS + 1, MIN_TOKENS + 1)], MIN_TOKENS
    )
    assert (found.first_request, found.end_request, found.first_token) == (3, 5, 202)
    assert found.lengths == (128, MIN_TOKENS + 1) and found.num_tokens == 129 + MIN_TOKENS
    for last in ((MIN_TOKENS - 1, MIN_TOKENS - 1), (128, 300), (1, 1)):
        assert Prompts.find([(300, 300), last], MIN_TOKENS).lengths == (), (
            "short, or begun in an earlier step"
        )


def test_those_that_have_begun_are_prompts_where_that_is_asked() -> None:
    requests = [(300, 300), (1, 70), (128, 900), (200, 200), (129, 130)]
    found = Prompts.find(requests, MIN_TOKENS, started=True)
    assert (found.first_request, found.first_token, found.end_token) == (2, 301, 758)
    assert (found.lengths, found.contexts) == ((128, 200, 129), (900, 200, 130))
    assert Prompts.find([*requests, (127, 500)], MIN_TOKENS, started=True).lengths == ()


@pytest.mark.parametrize("contexts", [(), (8, 7)], ids=["fresh", "begun"])
@pytest.mark.parametrize("lengths", [(), (1, 7)], ids=str)
def test_words_are_read_as_they_were_written(
    lengths: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    contexts = contexts if lengths else ()
    prompts = Prompts(first_request=3, first_token=17, lengths=lengths, contexts=contexts)
    words = prompts.words()
    assert (words.dtype, words.device.type) == (torch.int32, "cpu")
    assert len(words) == 2 + 2 * len(lengths)
    assert Prompts.read(words) == prompts and prompts.contexts == (contexts or lengths)


def fits(dtype: torch.dtype = torch.bfloat16, dim: int = 64, v_dim: int = 64, **flags: Any) -> bool:
    case = make_case([(9, 9)], 4, 2, dim, v_dim, 16, CPU, dtype, **flags)
    return fits_flash(**paged_attention.bind(case))


def test_flash_takes_plain_attention_in_16_bits() -> None:
    assert fits() and fits(torch.float16, 256, 256) and fits(dim=8, v_dim=8)
    assert not fits(torch.float32)
    assert (
        not fits(dim=64, v_dim=48) and not fits(dim=512, v_dim=512) and not fits(dim=20, v_dim=20)
    )
    assert not fits(cache=torch.float8_e4m3fn)
    unlike: list[dict[str, Any]] = [
        {"window": 7}, {"chunk": 16}, {"softcap": 3.0}, {"sinks": True}, {"alibi": True},
        {"distances": 9},
    ]  # fmt: skip
    assert not any(fits(**flags) for flags in unlike)


def test_flash_is_called_as_this_torch_declares_it() -> None:
    """Shapes and argument types only: nothing but a GPU runs it."""
    pytest.importorskip("triton", reason="triton is not installed: prompts are not divided")
    from llmc.kernels.triton.prompt_attention import flash, has_flash

    query, key = (
        torch.empty(80, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8)
    )
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    out = flash(query, key, key, starts, (40, 40), 0.1)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert not has_flash(CPU)
