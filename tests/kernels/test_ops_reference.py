"""The references against formulas of other origin: torch's own ops, and statistics of the draws."""

from __future__ import annotations

import math

import op_cases
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.attention import attention, visible
from llmc.kernels.paged_attention import make_case, paged_attention
from llmc.kernels.process_logits import process_logits
from llmc.kernels.registry import OPS
from llmc.kernels.rms_norm import add_rms_norm, rms_norm
from llmc.kernels.rope_write import rope_write
from llmc.kernels.sample import gumbel, sample
from llmc.kernels.write_kv import write_kv

CPU = torch.device("cpu")
F32 = torch.float32


@pytest.mark.parametrize("name", sorted(set(OPS) - {"attention"}))
def test_every_op_has_cases(name: str) -> None:
    assert len(list(op_cases.cases(name, F32))) > 0


@pytest.mark.parametrize("name", sorted(set(OPS) - {"attention"}))
def test_opcheck_of_references(name: str) -> None:
    case = next(op_cases.cases(name, F32))
    result = torch.library.opcheck(
        OPS[name].overload, op_cases.copy_case(case), test_utils="test_schema"
    )
    fake = torch.library.opcheck(
        OPS[name].overload, op_cases.copy_case(case), test_utils="test_faketensor"
    )
    assert set(result.values()) | set(fake.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    "window,chunk", [(0, 0), (5, 0), (1, 0), (0, 6), (4, 6)], ids=lambda x: str(x)
)
def test_attention_matches_sdpa_with_a_mask(window: int, chunk: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 19, 8), torch.randn(1, 2, 19, 8), torch.randn(1, 2, 19, 6)
    mask = torch.zeros(19, 19, dtype=torch.bool)
    for i in range(19):
        for j in range(i + 1):
            near = window == 0 or i - j < window
            together = chunk == 0 or i // chunk == j // chunk
            mask[i, j] = near and together
    empty = torch.empty(0)
    got = attention(q, k, v, empty, empty, 0.3, window, chunk, 0.0, None, None)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2))
    assert torch.equal(visible(torch.arange(19), torch.arange(19), window, chunk), mask)


def test_attention_softcap_sinks_and_slopes_by_hand() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4)
    sink, slope, cap = torch.tensor([0.7]), torch.tensor([0.25]), 1.5
    empty = torch.empty(0)
    got = attention(q, k, v, empty, empty, 0.5, 0, 0, cap, sink, slope)[0, 1, 0]
    scores = []
    for j in range(2):
        dot = 0.5 * float(q[0, 0, 1] @ k[0, 0, j])
        scores.append(cap * math.tanh(dot / cap) + 0.25 * (j - 1))
    total = sum(math.exp(s) for s in scores) + math.exp(0.7)
    want = sum(math.exp(s) / total * v[0, 0, j] for j, s in enumerate(scores))
    torch.testing.assert_close(got, want)


def test_paged_attention_equals_attention_on_gathered_keys() -> None:
    case = make_case([(7, 7), (0, 0), (2, 21)], 4, 2, 16, 16, 8, CPU, F32, window=9, seed=3)
    query, key_cache, value_cache, starts, lengths, table = case[:6]
    got = paged_attention(*case)
    for r, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        n = int(lengths[r])
        keys = torch.stack([key_cache[table[r, i // 8], :, i % 8] for i in range(n)] or [query[0]])
        values = torch.stack([value_cache[table[r, i // 8], :, i % 8] for i in range(n)] or [keys])
        for t in range(first, last):
            end = n - (last - t) + 1
            begin = max(0, end - 9)
            want = F.scaled_dot_product_attention(
                query[t][:, None], keys[begin:end].transpose(0, 1),
                values[begin:end].transpose(0, 1), scale=16**-0.5, enable_gqa=True,
            )  # fmt: skip
            torch.testing.assert_close(got[t], want[:, 0])
    assert got.shape == query.shape


def test_padding_of_paged_attention_is_zero() -> None:
    case = list(make_case([(3, 3), (2, 5)], 2, 1, 16, 16, 8, CPU, F32))
    case[4] = torch.tensor([3, 0], dtype=torch.int32)  # the second request is padding
    case[0] = torch.cat([case[0], torch.ones(4, 2, 16)])  # and so are the last four queries
    got = paged_attention(*case)
    assert bool((got[3:] == 0).all()) and bool((got[:3] != 0).all())


def test_norms_match_torch() -> None:
    x, weight = torch.randn(3, 5, 40), torch.randn(40)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, 0.0), F.rms_norm(x, (40,), weight, 1e-5))
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5, 1.0), F.rms_norm(x, (40,), weight + 1, 1e-5)
    )
    normed, total = add_rms_norm(x, x.flip(0), weight, 1e-5, 0.0)
    torch.testing.assert_close(total, x + x.flip(0))
    torch.testing.assert_close(normed, F.rms_norm(total, (40,), weight, 1e-5))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_activations_match_torch(act: str) -> None:
    x = torch.randn(4, 22)
    want = {
        "silu": lambda g: g * torch.sigmoid(g),
        "gelu": lambda g: g * 0.5 * (1 + torch.special.erf(g / 2**0.5)),
        "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    }[act](x[:, :11])
    torch.testing.assert_close(act_mul(x, act), want * x[:, 11:])


def test_write_kv_puts_each_token_in_its_slot() -> None:
    key, value = torch.randn(3, 2, 4), torch.randn(3, 2, 6)
    key_cache, value_cache = torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8, 6)
    write_kv(key, value, key_cache, value_cache, torch.tensor([9, -1, 2]))
    assert torch.equal(key_cache[1, :, 1], key[0]) and torch.equal(value_cache[0, :, 2], value[2])
    assert int((key_cache != 0).sum()) == 2 * 2 * 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_a_rotation_in_the_complex_plane(interleaved: bool) -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    angle = torch.rand(10, 2)  # the first four of eight channels turn
    table = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    positions = torch.tensor([4, 0, 9])
    key_cache, value_cache = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8)
    out = rope_write(q, k, v, None, None, 1e-6, 0.0, table.cos(), table.sin(), positions,
                     interleaved, key_cache, value_cache, torch.tensor([5, 1, 0]))  # fmt: skip

    def turn(x: Tensor) -> Tensor:
        a, b = (x[..., 0:4:2], x[..., 1:4:2]) if interleaved else (x[..., :2], x[..., 2:4])
        turned = torch.complex(a, b) * torch.polar(torch.ones(3, 1, 2), angle[positions][:, None])
        parts = (turned.real, turned.imag)
        rot = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        return torch.cat((rot, x[..., 4:]), -1)

    torch.testing.assert_close(out, turn(q))
    torch.testing.assert_close(key_cache[0, :, torch.tensor([5, 1, 0])].transpose(0, 1), turn(k))
    assert torch.equal(value_cache[0, 0, 1], v[1, 0])


@pytest.mark.parametrize(
    ("last", "seen"), [(0, [-2.0, 0.0]), (4, [-2.0, 0.0]), (3, [-1.0, 0.0]), (2, [-1.0, 0.25])]
)
def test_process_logits_by_hand(last: int, seen: list[float]) -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5, 0.0]])
    one = torch.tensor
    got = process_logits(
        logits, one([1]), one([4], dtype=torch.int32),
        one([[0, 0, 0, 0, 0], [1, 2, 2, 4, 3]], dtype=torch.int32),
        one([1, 1], dtype=torch.int32), one([1.0, 2.0]), one([0.0, 0.5]), one([0.0, 0.25]),
        one([0, last], dtype=torch.int32),
        one([[-1, -1], [3, 0]], dtype=torch.int32), one([[0.0, 0.0], [10.0, 7.0]]),
        one([[9, 9], [4, 3]], dtype=torch.int32), one([False, True]),
        one([[0], [0b01111]], dtype=torch.int32),
    )  # fmt: skip
    # token 1 is in the prompt alone; 2 came out twice, 4 once; 3 has a bias, that of 0 has expired
    want = torch.tensor([[1.0, *seen, 10.5, float("-inf")]])
    torch.testing.assert_close(got, want)


FILTERS = {
    "temperature": (0.7, 0, 1.0, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "top_p": (1.0, 0, 0.8, 0.0),
    "min_p": (1.3, 0, 1.0, 0.1),
    "all": (1.5, 9, 0.9, 0.02),
}


def expected_probabilities(logits: Tensor, temp: float, k: int, p: float, min_p: float) -> Tensor:
    """The processed distribution, token by token in plain Python."""
    probs = torch.softmax(logits.double() / temp, -1)
    ranked = sorted(range(len(probs)), key=lambda i: -float(probs[i]))
    kept = [i for i in ranked if float(probs[i]) >= min_p * float(probs[ranked[0]])]
    kept = kept[:k] if k > 0 else kept
    total, mass, chosen = sum(float(probs[i]) for i in kept), 0.0, []
    for i in kept:
        if mass >= p * total:
            break
        chosen.append(i)
        mass += float(probs[i])
    out = torch.zeros_like(probs)
    out[chosen] = probs[chosen]
    return out / out.sum()


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_processed_distribution(name: str) -> None:
    draws, (temp, k, p, min_p) = 20_000, FILTERS[name]
    logits = torch.randn(24, generator=torch.Generator().manual_seed(5)) * 1.5
    tokens = sample(
        logits.expand(draws, -1), torch.full((draws,), temp),
        torch.full((draws,), k, dtype=torch.int32), torch.full((draws,), p),
        torch.full((draws,), min_p), torch.full((draws,), 77), torch.arange(draws),
    )  # fmt: skip
    probs = expected_probabilities(logits, temp, k, p, min_p)
    counts = torch.bincount(tokens, minlength=24).double()
    assert float(counts[probs == 0].sum()) == 0
    live = probs > 0
    assert stats.chisquare(counts[live], probs[live] * draws).pvalue > 1e-3


def test_greedy_ties_seeds_and_bad_rows() -> None:
    inf = float("inf")
    logits = torch.tensor([[1.0, 3.0, 3.0], [inf, 0, 0], [-inf, -inf, -inf], [0, float("nan"), 0]])
    rows = torch.ones(4)
    got = sample(logits, rows * 0, rows.int() * 0, rows, rows * 0, rows.long(), rows.long())
    assert got.tolist() == [1, -1, -1, -1]


def test_a_row_draws_the_same_in_any_batch() -> None:
    case = list(list(op_cases.cases("sample", F32))[-1])
    whole = sample(*case)
    again = sample(*case)
    alone = torch.cat([sample(*(x[r : r + 1] for x in case)) for r in range(len(whole))])
    assert torch.equal(whole, again) and torch.equal(whole, alone)
    case[5] = case[5] + 1  # other seeds, other draws
    assert not torch.equal(sample(*case), whole)


def test_noise_is_finite_and_gumbel() -> None:
    noise = gumbel(torch.arange(64), torch.arange(64) * 7, 4096)
    assert bool(noise.isfinite().all())
    assert stats.kstest(noise.flatten()[::16].numpy(), stats.gumbel_r.cdf).pvalue > 1e-3
