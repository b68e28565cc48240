"""Every C++ op against its reference: all cases, random shapes, strides, unwritten memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import op_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_draws import STATE_OPS, state_cases
from torch import Tensor
from torch_threads import torch_threads

from llmc.kernels.cache_dtype import (
    FP8,
    block_tokens,
    narrower,
    rotate,
    row_scales,
    to_cache,
    to_int8,
    zero_blocks,
)
from llmc.kernels.latent_attention import expands, make_latent_case
from llmc.kernels.paged_attention import cached_rows, make_case, paged_attention
from llmc.kernels.registry import OPS, Impl
from llmc.kernels.sample import sample
from llmc.kernels.state_cases import make_step
from llmc.kernels.token_logprobs import token_logprobs

CPU = torch.device("cpu")
NAMES = sorted(set(OPS) - op_cases.WITHOUT_CPP)


def cpu_impl(name: str) -> Impl:
    (impl,) = [impl for impl in OPS[name].impls if impl.name == "cpu"]
    return impl


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    op_cases.require_cpu_ops()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds huge numbers, so an unwritten output shows. The C library fills it, since
    torch's own switch does not reach tensors that are made through its C ABI."""
    libc = ctypes.CDLL(None)
    perturb, poison = -6, 0x80  # M_PERTURB; memory is filled with the complement, 0x7f
    assert libc.mallopt(perturb, poison) == 1
    assert (torch.empty(5000) > 1e38).all()
    yield
    libc.mallopt(perturb, 0)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param) as count:
        yield count


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_a_cpu_version_of_its_schema(name: str) -> None:
    op_cases.assert_same_schema(OPS[name], cpu_impl(name))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name,dtype,index", op_cases.case_params(NAMES))
def test_equals_the_reference(name: str, dtype: torch.dtype, index: int) -> None:
    case, impl = op_cases.all_cases(name, dtype)[index], cpu_impl(name)
    assert impl.available() and impl.supports(**OPS[name].bind(case))
    op_cases.assert_same_effect(OPS[name].reference, impl.op(), case, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    cases = op_cases.cases(name, torch.float32)
    case = op_cases.copy_case([c for c in cases if not op_cases.has_fp8(c)][-1])
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    assert set(torch.library.opcheck(cpu_impl(name).op(), case, test_utils=checks).values()) == {
        "SUCCESS"
    }


def _absorbed(case: tuple[Any, ...], r: int) -> Tensor:
    """`latent_attention` of request r, over latents."""
    query, weight, cache, starts, contexts, table, scale = case[:7]
    ops, heads, rank = torch.ops.llmc_cpu, query.shape[1], weight.shape[1]
    by_head, split = weight.unflatten(0, (heads, -1)), query.shape[2] - cache.shape[3] + rank
    own = query[starts[r] : starts[r + 1]]
    turned = ops.bmm(own[..., :split].transpose(0, 1), by_head[:, :split]).transpose(0, 1)
    out = ops.paged_attention(
        torch.cat((turned, own[..., split:]), -1), cache, cache[..., :0],
        torch.tensor([0, len(own)], dtype=torch.int32), contexts[r : r + 1], table[r : r + 1],
        scale, 0, 0, 0.0, None, None, None, None, None, None, 1, rank,
    )  # fmt: skip
    return ops.bmm(out.transpose(0, 1), by_head[:, split:].transpose(1, 2)).transpose(0, 1)


def _expanded(case: tuple[Any, ...], r: int) -> Tensor:
    """The same over keys and values of all heads."""
    query, weight, cache, starts, contexts, table, scale = case[:7]
    ops, heads, rank = torch.ops.llmc_cpu, query.shape[1], weight.shape[1]
    split, length = query.shape[2] - cache.shape[3] + rank, int(contexts[r])
    cached = cached_rows(cache, None, table[r], 0, length, keys=True)[:, 0]
    made = ops.linear(cached[:, :rank].contiguous(), weight, None).unflatten(1, (heads, -1))
    shared = cached[:, None, rank:].expand(-1, heads, -1)
    key, value = torch.cat((made[..., :split], shared), -1), made[..., split:]
    own = query[starts[r] : starts[r + 1]]
    return ops.paged_attention(
        own, key.transpose(0, 1)[None], value.transpose(0, 1)[None],
        torch.tensor([0, len(own)], dtype=torch.int32), contexts[r : r + 1],
        torch.zeros(1, 1, dtype=torch.int32), scale, 0, 0, 0.0, None, None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_request_of_a_step_takes_the_form_of_the_rule(dtype: torch.dtype) -> None:
    """To the last bit what it gives alone; the two forms round in different places."""
    lengths = [(1, 40), (40, 40), (33, 300), (90, 300), (31, 31), (100, 700), (5, 5)]
    sizes = {"dim": 40, "shared": 16, "v_dim": 32, "rank": 64}
    case = make_latent_case(lengths, 4, 40, 16, 32, 64, 16, CPU, dtype)
    with torch_threads(1):  # more would share the keys of a request out
        got = torch.ops.llmc_cpu.latent_attention(*case)
        for r, length in enumerate(lengths):
            rows = got[case[3][r] : case[3][r + 1]]
            is_expanded = expands(*length, **sizes, itemsize=dtype.itemsize)
            assert is_expanded == (length in [(40, 40), (90, 300), (100, 700)])
            forms = (_absorbed(case, r), _expanded(case, r))
            assert torch.equal(rows, forms[is_expanded])
            assert not torch.equal(rows, forms[not is_expanded]) or length[0] < 6


@pytest.mark.usefixtures("threads")
def test_latent_attention_gives_zeros_for_padding() -> None:
    case = list(make_latent_case([(40, 40), (2, 9)], 2, 12, 4, 12, 24, 8, CPU, torch.float32))
    case[0] = torch.cat((case[0], torch.full((3, 2, 16), float("nan"))))
    case[4] = torch.tensor([40, 0], dtype=torch.int32)
    got = torch.ops.llmc_cpu.latent_attention(*case)
    assert got[:40].isfinite().all() and got[40:].eq(0).all()


def test_latent_attention_refuses_what_does_not_fit() -> None:
    query, weight, *rest = make_latent_case([(3, 9)], 4, 12, 4, 12, 24, 8, CPU, torch.float32)
    with pytest.raises(RuntimeError, match=r"weight \[90, 24\].*do not fit query"):
        torch.ops.llmc_cpu.latent_attention(query, weight[:90], *rest)


ATTENTION_TOLERANCE = {  # a bf16 weight and a bf16 output each round once
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
}


def assert_attention(case: tuple[Any, ...]) -> None:
    got = torch.ops.llmc_cpu.paged_attention(*case)
    want = paged_attention.reference(*case)
    limit = op_cases.with_int8_caches(ATTENTION_TOLERANCE[case[0].dtype], case)
    torch.testing.assert_close(got, want, **limit)


requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 90)).map(lambda x: (x[0], x[0] + x[1])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=requests,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (7, 1), (12, 1), (3, 3)]),
    dims=st.sampled_from([(16, 16), (32, 32), (64, 64), (80, 48), (64, 96), (20, 36)]),
    block_size=st.sampled_from([1, 8, 16, 32]),
    limits=st.sampled_from([(0, 0), (9, 0), (0, 16), (33, 24)]),
    extras=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=st.sampled_from(op_cases.DTYPES),
    cache=st.sampled_from([None, torch.float16, torch.bfloat16, *FP8, torch.int8]),
    of_tokens=st.tuples(st.booleans(), st.sampled_from([0, 1, 7, 40])),
    seed=st.integers(0, 100),
)
def test_attention_of_random_shapes(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    limits: tuple[int, int],
    extras: tuple[bool, bool, bool],
    dtype: torch.dtype,
    cache: torch.dtype | None,
    of_tokens: tuple[bool, int],
    seed: int,
) -> None:
    case = make_case(
        lengths, *heads, *dims, block_size, CPU, dtype, window=limits[0], chunk=limits[1],
        softcap=3.0 if extras[0] else 0.0, sinks=extras[1], alibi=extras[2], seed=seed,
        token_sinks=of_tokens[0], distances=of_tokens[1], cache=narrower(dtype, cache),
    )  # fmt: skip
    assert_attention(case)


@pytest.mark.parametrize("dtype", op_cases.DTYPES)
@pytest.mark.parametrize("heads,dim", [((2, 1), 64), ((8, 1), 64), ((16, 1), 64), ((2, 1), 576)])
@pytest.mark.parametrize("cache", [None, torch.float16, FP8[0], torch.int8], ids=str)
def test_attention_splits_long_contexts(
    threads: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    cache: torch.dtype | None,
) -> None:
    lengths = [(1, 4100), (300, 700), (1, 5), (2, 1500)]
    case = make_case(
        lengths, *heads, dim, dim, 32, CPU, dtype, sinks=True, cache=narrower(dtype, cache),
        seed=threads,
    )  # fmt: skip
    assert_attention(case)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("heads", [(9, 3), (5, 5), (8, 1)], ids=str)
@pytest.mark.parametrize("length", [63, 64, 129, 600, 3001])
def test_a_decode_is_cut_within_and_between_heads(
    count: int, heads: tuple[int, int], length: int
) -> None:
    """Into as many parts as there are threads, whichever of them take them."""
    case = make_case([(1, length)], *heads, 64, 64, 16, CPU, torch.float32, sinks=True, seed=count)
    with torch_threads(count):
        assert_attention(case)


@pytest.mark.parametrize("cache", FP8, ids=str)
@pytest.mark.parametrize("dtype", op_cases.DTYPES)
def test_every_code_of_a_float8_cache_is_written_and_read(
    cache: torch.dtype, dtype: torch.dtype
) -> None:
    """Every code, halfway values, what saturates, NaN; read back by a decode of one key each."""
    codes = torch.arange(256, dtype=torch.uint8).view(cache).float()
    finite = codes[codes.isfinite()].sort().values
    values = torch.cat([codes, (finite[1:] + finite[:-1]) / 2, torch.tensor([1e6, -1e9, 1e-9])])
    values = torch.nn.functional.pad(values, (0, 512 + 32 - values.numel())).to(dtype)
    key = values.view(17, 2, 16)
    slots = torch.arange(17)
    caches = [torch.zeros(17, 2, 1, 16).to(cache) for _ in range(2)]
    torch.ops.llmc_cpu.write_kv(key, key, *caches, slots)
    want = to_cache(key, cache, None).view(torch.uint8)
    for got in caches:
        assert torch.equal(got[:, :, 0].view(torch.uint8)[~key.isnan()], want[~key.isnan()])
        assert got[:, :, 0].float()[key.isnan()].isnan().all()
    ones = torch.arange(17, dtype=torch.int32) + 1
    read = torch.ops.llmc_cpu.paged_attention(
        torch.zeros_like(key), torch.zeros_like(caches[0]), caches[1],
        torch.cat([ones[:1] * 0, ones]), ones // ones, slots[:, None].int(),
        1.0, 0, 0, 0.0, None, None,
    )  # fmt: skip
    torch.testing.assert_close(
        read.float(), caches[1][:, :, 0].float().to(dtype).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [4, 64])  # part of a vector, and whole ones
def test_rows_of_an_int8_cache_are_written_as_by_the_reference(
    dim: int, dtype: torch.dtype
) -> None:
    rows = torch.tensor(op_cases.INT8_ROWS)
    key = torch.cat([rows, rows[:1].expand(len(rows), -1) * 0], 1).repeat(1, 16)[:, None, :dim]
    key = key.to(dtype)
    made = [zero_blocks(1, 1, 8, dim, torch.int8) for _ in range(2)]
    torch.ops.llmc_cpu.write_kv(key, key, *made, torch.arange(len(key)))
    for got, stored in zip(made, (rotate(key), key), strict=True):
        want, scales = to_int8(stored[:, 0])
        assert torch.equal(got[0, 0, : len(key)], want)
        torch.testing.assert_close(
            row_scales(got)[0, 0, : len(key)], scales, rtol=2e-7, atol=0, equal_nan=True
        )
    read = torch.ops.llmc_cpu.paged_attention(
        torch.zeros_like(key), *made, torch.arange(len(key) + 1).int(),
        torch.arange(len(key)).int() + 1, torch.zeros(len(key), 1).int(),
        1.0, 0, 0, 0.0, None, None,
    )  # fmt: skip
    assert read[:4].isfinite().all()
    assert read[4:].isnan().all()  # a row with NaN or an infinity is not hidden


def test_blocks_of_an_int8_cache_are_checked() -> None:
    case = list(make_case([(1, 3)], 2, 2, 16, 16, 8, CPU, torch.float32, cache=torch.int8))
    with pytest.raises(RuntimeError, match="k_scale is for caches of float8, got Char"):
        torch.ops.llmc_cpu.paged_attention(*case[:12], torch.ones(1), None)
    odd = [zero_blocks(1, 2, 8, 16, torch.int8)[..., :6] for _ in range(2)]
    with pytest.raises(RuntimeError, match="must have dense blocks with a multiple of 4 channels"):
        torch.ops.llmc_cpu.paged_attention(case[0][..., :6], *odd, *case[3:12])
    chosen = torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="chosen keys are not read from an int8 cache"):
        torch.ops.llmc_cpu.paged_attention(*case[:12], None, None, None, chosen)


@pytest.mark.parametrize("tokens", [1, 8, 16, 64])
@pytest.mark.parametrize("dim", [4, 20, 64, 80, 128, 576])
def test_the_rows_of_a_block_tell_its_tokens(tokens: int, dim: int) -> None:
    cache = zero_blocks(3, 2, tokens, dim, torch.int8)
    assert block_tokens(cache) == tokens
    row_scales(cache).fill_(1.0)
    assert not cache[:, :, :tokens].any()  # scales do not overlap the tokens


def test_scales_of_a_float8_cache_are_checked() -> None:
    case = list(make_case([(1, 3)], 2, 2, 16, 16, 8, CPU, torch.float32, cache=FP8[0]))
    with pytest.raises(RuntimeError, match="k_scale must have 1 element or 2, got 3"):
        torch.ops.llmc_cpu.paged_attention(*case[:12], torch.ones(3), None)
    plain = make_case([(1, 3)], 2, 2, 16, 16, 8, CPU, torch.float32)
    with pytest.raises(RuntimeError, match="k_scale is for caches of float8, got Float"):
        torch.ops.llmc_cpu.paged_attention(*plain[:12], torch.ones(1), None)


def test_attention_reads_strided_queries_and_caches() -> None:
    query, key_cache, value_cache, *rest = make_case(
        [(1, 40), (9, 9)], 4, 2, 32, 32, 16, CPU, torch.bfloat16
    )
    packed = torch.cat([query, torch.full_like(query, float("nan"))], dim=-1)[..., :32]
    both = torch.stack([key_cache, value_cache], dim=1)  # one allocation, keys beside values
    got = torch.ops.llmc_cpu.paged_attention(packed, both[:, 0], both[:, 1], *rest)
    want = paged_attention.reference(query, key_cache, value_cache, *rest)
    torch.testing.assert_close(got, want, **ATTENTION_TOLERANCE[torch.bfloat16])


def test_large_scores_do_not_overflow() -> None:
    for dtype in op_cases.DTYPES:
        for lengths in ([(1, 200)], [(64, 200)]):
            case = list(make_case(lengths, 4, 2, 64, 64, 16, CPU, dtype))
            case[6] = 40.0
            got = torch.ops.llmc_cpu.paged_attention(*case)
            assert bool(got.isfinite().all())


@pytest.mark.parametrize("dtype", op_cases.DTYPES)
def test_norm_and_activation_take_strided_rows(dtype: torch.dtype) -> None:
    packed = torch.randn(5, 3, 200).to(dtype)
    x, residual = packed[:, 1:, 8:108], packed[:, :2, 100:]
    weight = torch.randn(100).to(dtype)
    for name, case in (
        ("rms_norm", (x, weight, 1e-6, 0.0)),
        ("rms_norm", (x.transpose(0, 1), weight, 1e-6, 1.0)),
        ("rms_norm", (x[:0], weight, 1e-6, 0.0)),
        ("add_rms_norm", (x, residual.contiguous(), weight, 1e-6, 0.0)),
        ("norm_add", (x, residual, weight, 1e-6, 1.0)),
        ("norm_add", (x[:0], residual[:0], weight, 1e-6, 1.0)),
        ("norm_add_norm", (x, residual, weight, 1e-6, 0.0, None, 1e-6, 0.0)),
        ("act_mul", (x, "silu")),
    ):
        got = op_cases.outputs(cpu_impl(name).op()(*case))
        want = op_cases.outputs(OPS[name].reference(*case))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **op_cases.TOLERANCE[dtype])


def sample_rows(rows: int, vocab: int, seed: int) -> list[Tensor]:
    """Rows with every mix of filters, ties (rounded logits) and masked tokens."""
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=gen) * 4).mul(4).round().div(4)
    logits[:, ::3] = float("-inf") if seed % 2 else logits[:, ::3]
    pick = torch.arange(rows)
    return [
        logits,
        torch.tensor([1.0, 0.6, 2.0, 0.0])[pick % 4],
        torch.tensor([0, 7, 50, 1, -1], dtype=torch.int32)[pick % 5],
        torch.tensor([1.0, 0.9, 0.3])[pick % 3],
        torch.tensor([0.0, 0.1])[pick % 2],
        torch.randint(-(2**62), 2**62, (rows,), generator=gen),
        torch.randint(0, 2**20, (rows,), generator=gen),
    ]


@cache
def drawn_rows(vocab: int, seed: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """`sample`'s arguments and its reference's tokens, which take longer to draw than the test."""
    logits, *rest = sample_rows(60, vocab, seed)
    case = [logits.to(dtype), *rest]
    return case, sample.reference(*case)


@pytest.mark.parametrize("vocab", [3, 64, 1000, 50_021])
@pytest.mark.parametrize("seed", [0, 1])
def test_sample_draws_the_reference_tokens(vocab: int, seed: int, threads: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case, expected = drawn_rows(vocab, seed, dtype)
        assert torch.equal(torch.ops.llmc_cpu.sample(*case), expected)


def test_sample_refuses_bad_rows() -> None:
    case = sample_rows(4, 70, 0)
    case[0][0, 69] = float("nan")
    case[0][1, 3] = float("inf")
    case[0][2] = float("-inf")
    got = torch.ops.llmc_cpu.sample(*case)
    assert got.tolist()[:3] == [-1, -1, -1] and int(got[3]) >= 0


@pytest.mark.parametrize("vocab,k", [(1, 3), (63, 64), (50_021, 20), (50_021, 128)])
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "equals"])
def test_token_logprobs_of_large_rows(vocab: int, k: int, rounded: bool, threads: int) -> None:
    gen = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=gen) * 4
    logits = logits.round() if rounded else logits
    logits[2, 1:] = float("-inf")
    token = torch.randint(0, vocab, (5,), generator=gen)
    for x in (logits, logits.bfloat16(), logits[:, : vocab // 2 + 1]):
        got = torch.ops.llmc_cpu.token_logprobs(x, token, k)
        for mine, theirs in zip(got, token_logprobs.reference(x, token, k), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", STATE_OPS)
@pytest.mark.parametrize("dtype", op_cases.DTYPES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_state_ops_over_random_steps(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(state_cases(name, dtype))
    op_cases.assert_same_effect(OPS[name].reference, cpu_impl(name).op(), case, dtype)


@pytest.mark.parametrize("name", STATE_OPS)
def test_state_ops_share_rows_among_threads(name: str, threads: int) -> None:
    """Enough of them to be worth two threads, and inputs that do not lie as they are read."""
    gen = torch.Generator().manual_seed(0)
    step = make_step([(9, 9), (1, 40)] * 8, gen, CPU)
    sizes = {
        "causal_conv": (600, 4, True, "silu"),
        "delta_rule": (4, 40, 72, True, 2, True),
        "selective_scan": (300, 2, 1, 16, True, True),
        "linear_recurrence": (5000,),
        "decayed_softmax": (3000,),
        "pool_windows": (1500, 4, 2),
    }
    make = sys.modules[f"llmc.kernels.{name}"].make_case
    x, *rest = make(step, gen, torch.float32, *sizes[name])
    case = (x.transpose(0, -1).contiguous().transpose(0, -1), *rest)
    op_cases.assert_same_effect(OPS[name].reference, cpu_impl(name).op(), case, torch.float32)


def test_state_ops_want_slots() -> None:
    x = torch.ones(3, 5)
    bound = OPS["linear_recurrence"].bind((x, x, None, None, None, None))
    assert not cpu_impl("linear_recurrence").supports(**bound)
    with pytest.raises(RuntimeError, match="query_start is missing: without slots"):
        torch.ops.llmc_cpu.linear_recurrence(x, x, None, None, None, None)
    case = list(next(op_cases.cases("linear_recurrence", torch.float32)))
    case[2] = case[2].double()
    with pytest.raises(RuntimeError, match=r"state must be a dense Float \[slots, \[1\]\]"):
        torch.ops.llmc_cpu.linear_recurrence(*case)


def test_wrong_arguments_are_named() -> None:
    case = list(next(op_cases.cases("paged_attention", torch.float32)))
    case[4] = case[4].long()
    with pytest.raises(RuntimeError, match="context_len must be Int, got Long"):
        torch.ops.llmc_cpu.paged_attention(*case)
    with pytest.raises(
        RuntimeError, match="act must be silu, gelu, gelu_tanh, quick_gelu, relu or relu2, got elu"
    ):
        torch.ops.llmc_cpu.act_mul(torch.ones(2, 4), "elu")
