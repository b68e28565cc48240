"""Prompts handed to another kernel, under Triton's interpreter: the copy out of the pages, and what
is left with ours. The reference stands in for FlashAttention; tests/gpu has the real one.
"""

from __future__ import annotations

from typing import Any

import fast_interpreter  # noqa: F401 - the tests take a fraction of the time
import pytest
import torch
from torch import Tensor

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels.attention import attend as attend_one
from llmc.kernels.latent_attention import make_latent_case
from llmc.kernels.paged_attention import make_case
from llmc.kernels.prompts import Prompts
from llmc.kernels.registry import OPS
from llmc.kernels.triton import latent_attention, prompt_attention

CPU = torch.device("cpu")
ATTENTION = OPS["paged_attention"]
OVERLOAD = next(impl for impl in ATTENTION.impls if impl.name == "triton").op


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The lengths of the prompts that the other kernel was given."""
    seen: list[tuple[int, ...]] = []

    def stand_in(
        query: Tensor, key: Tensor, value: Tensor, start: Tensor, lengths: tuple[int, ...],
        scale: float,
    ) -> Tensor:  # fmt: skip
        seen.append(lengths)
        assert start.dtype == torch.int32 and start[0] == 0
        assert start.diff().tolist() == list(lengths)
        parts = []
        for part in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
            place = torch.arange(len(part[0]))
            parts.append(attend_one(*part, place, place, scale, 0, 0, 0.0, None, None))
        return torch.cat(parts)

    monkeypatch.setattr(prompt_attention, "flash", stand_in)
    monkeypatch.setattr(prompt_attention, "has_flash", lambda device: True)
    return seen


def attend(case: tuple[Any, ...], prompts: Prompts) -> Tensor:
    out: Tensor = OVERLOAD()(*case, prompts.words())
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "dim", "fresh"),
    [
        ([(12, 12)], 32, (12,)),
        ([(12, 12), (40, 40)], 48, (12, 40)),
        ([(9, 90), (20, 20), (11, 11)], 32, (20, 11)),
        ([(1, 50), (1, 7), (0, 0), (33, 33)], 32, (33,)),
    ],
    ids=str,
)
def test_a_step_is_divided_and_joined(
    lengths: list[tuple[int, int]],
    dim: int,
    fresh: tuple[int, ...],
    dtype: torch.dtype,
    asked: list[tuple[int, ...]],
) -> None:
    case = make_case(lengths, 6, 2, dim, dim, 16, CPU, dtype)
    got = attend(case, Prompts.find(lengths, least=8))
    assert asked == [fresh]
    torch.testing.assert_close(got, ATTENTION.reference(*case), rtol=2e-2, atol=2e-2)


def test_padding_after_the_prompts_gets_zeros(asked: list[tuple[int, ...]]) -> None:
    lengths = [(1, 20), (24, 24)]
    query, key, value, start, context, table, *rest = make_case(
        lengths, 4, 2, 32, 32, 16, CPU, torch.bfloat16
    )
    padded = (
        torch.cat((query, torch.full((2, 4, 32), float("nan"), dtype=torch.bfloat16))),
        key,
        value,
        torch.cat((start, start[-1:] + torch.tensor([1, 2], dtype=torch.int32))),
        torch.cat((context, torch.zeros(2, dtype=torch.int32))),
        torch.cat((table, table.new_zeros(2, table.shape[1]))),
        *rest,
    )
    got = attend(padded, Prompts.find(lengths, least=8))
    assert asked == [(24,)]
    assert got[25:].eq(0).all() and got[:25].isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"window": 7}, {"chunk": 16}, {"softcap": 3.0}, {"sinks": True}, {"alibi": True}],
    ids=str,
)
def test_what_flash_does_not_take_stays_with_ours(
    options: dict[str, Any], asked: list[tuple[int, ...]]
) -> None:
    case = make_case([(20, 20)], 4, 2, 32, 32, 16, CPU, torch.bfloat16, **options)
    got = attend(case, Prompts(lengths=(20,)))
    assert asked == []
    torch.testing.assert_close(got, ATTENTION.reference(*case), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("lengths", "first", "expanded"),
    [
        ([(40, 40)], 0, [(40,)]),
        ([(1, 50), (2, 7), (40, 40), (50, 90)], 2, [(40, 50)]),
        ([(34, 34), (9, 60), (35, 35), (36, 400), (40, 44), (0, 0)], 0, [(34,), (35,), (40,)]),
        ([(1, 50), (40, 40)], 2, []),
    ],
    ids=str,
)
def test_latent_attention_expands_what_the_hint_names(
    lengths: list[tuple[int, int]],
    first: int,
    expanded: list[tuple[int, ...]],
    cache: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, ...]] = []
    expand = latent_attention._expanded

    def kept(step: dict[str, Any], contexts: tuple[int, ...]) -> Tensor:
        seen.append(tuple(step["query_start"].diff().tolist()))
        assert contexts == tuple(step["context_len"].tolist())
        return expand(step, contexts)

    monkeypatch.setattr(latent_attention, "_expanded", kept)
    monkeypatch.setattr(latent_attention, "MAX_BYTES", 4 * 112 * 150)  # some heads at a time
    op = OPS["latent_attention"]
    case = make_latent_case(
        lengths, 5, 24, 8, 16, 32, 16, CPU, torch.float32, cache=cache, sinks=True, softcap=4.0
    )
    hint = Prompts(
        first_request=first,
        first_token=sum(new for new, _ in lengths[:first]),
        lengths=tuple(new for new, _ in lengths[first:]),
        contexts=tuple(context for _, context in lengths[first:]),
    )
    (impl,) = [impl for impl in op.impls if impl.name == "triton"]
    got = impl.op()(*case, hint.words())
    assert seen == expanded
    torch.testing.assert_close(got, op.reference(*case), rtol=2e-5, atol=2e-5)


def test_what_is_expanded_together_fits_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(40, 40), (50, 50), (60, 60)]
    case = make_latent_case(lengths, 2, 16, 8, 16, 40, 16, CPU, torch.float32)
    step = OPS["latent_attention"].bind(case)
    hint = Prompts(lengths=(40, 50, 60))
    a_token = 4 * (48 + 2 * 16 + 16 + 2 * 8 - 8)
    together = {160: [(40, 50, 60)], 100: [(40, 50), (60,)], 50: [(40,), (50,), (60,)]}
    for tokens, groups in together.items():
        monkeypatch.setattr(latent_attention, "MAX_BYTES", a_token * tokens)
        assert [group.lengths for group in latent_attention._groups(step, hint)] == groups


@pytest.mark.parametrize("lengths", [[(7, 7)], [(1, 60)], [(9, 60)]], ids=str)
def test_a_step_without_fresh_prompts_stays_with_ours(
    lengths: list[tuple[int, int]], asked: list[tuple[int, ...]]
) -> None:
    case = make_case(lengths, 4, 2, 32, 32, 16, CPU, torch.bfloat16)
    got = attend(case, Prompts.find(lengths, least=8))
    assert asked == []
    torch.testing.assert_close(got, ATTENTION.reference(*case), rtol=2e-2, atol=2e-2)
