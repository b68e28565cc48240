"""One hand-written attention layer as models write it, and the step inputs to run it paged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_graphs import Arg, Values, cache, constant, step, trace, weight
from torch import Tensor, fx

from llmc.kernels.attention import attention

TOKENS, HEADS, KV_HEADS, DIM, HIDDEN = 7, 4, 2, 8, 16
BLOCK_SIZE, POSITIONS = 4, 32
EPS = 1e-6
_GEN = torch.Generator().manual_seed(0)


def _rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_GEN)


INPUTS: dict[str, Arg] = {
    "token_ids": step(torch.randint(0, 20, (TOKENS,), generator=_GEN)),
    "positions": step(torch.arange(TOKENS)),
    "embed": weight("embed", _rand(20, HIDDEN)),
    "wq": weight("wq", _rand(HEADS * DIM, HIDDEN)),
    "wk": weight("wk", _rand(KV_HEADS * DIM, HIDDEN)),
    "wv": weight("wv", _rand(KV_HEADS * DIM, HIDDEN)),
    "q_norm": weight("q_norm", _rand(DIM)),
    "k_norm": weight("k_norm", _rand(DIM)),
    "q_norms": weight("q_norms", _rand(HEADS * DIM)),
    "k_norms": weight("k_norms", _rand(KV_HEADS * DIM)),
    "inv_freq": constant(10000.0 ** -(torch.arange(0, DIM, 2) / DIM)),
    "key_cache": cache(0, "key"),
    "value_cache": cache(0, "value"),
}


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def half_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Only the first channels are rotated."""
    width = cos.shape[-1]
    return torch.cat((half_turn(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs: channel 2i is rotated with 2i + 1."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def partial_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    return torch.cat((neighbours(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def two_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of a layer without a rotary embedding."""
    return x


def moved_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated neighbours; the first ones of all pairs come before the second ones."""
    first, second = x[..., ::2], x[..., 1::2]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def complex_product(x: Tensor, turns: Tensor, unused: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(3).to(x.dtype)


def rows_of(positions: Tensor, inv_freq: Tensor, rotary: object) -> tuple[Tensor, Tensor]:
    """The two arguments of a rotary function besides x."""
    freqs = positions.unsqueeze(0).unsqueeze(-1).float() * inv_freq
    if rotary is complex_product:
        return torch.polar(torch.ones_like(freqs), freqs), freqs
    halved = rotary in (two_halves, moved_neighbours)
    angles = freqs if halved else torch.cat((freqs, freqs), dim=-1)
    return angles.cos() * 1.5, angles.sin() * 1.5


def norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def layer(
    rotary: object = half_turn, *, normed: bool = False, width: int = DIM, at: str = "projected"
) -> fx.GraphModule:
    """positions, tokens -> [1, T, H * D], with `width` channels of q and k rotated by `rotary`.

    at: where heads are normalized, if they are: "projected", "transposed" or "rotated"; "together":
    all of them by one norm.
    """

    def forward(
        token_ids: Tensor,
        positions: Tensor,
        embed: Tensor,
        wq: Tensor,
        wk: Tensor,
        wv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        q_norms: Tensor,
        k_norms: Tensor,
        inv_freq: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        x = F.embedding(token_ids.unsqueeze(0), embed)
        q, k = F.linear(x, wq), F.linear(x, wk)
        if normed and at == "together":
            q, k = norm(q, q_norms), norm(k, k_norms)
        q, k = q.view(1, -1, HEADS, DIM), k.view(1, -1, KV_HEADS, DIM)
        v = F.linear(x, wv).view(1, -1, KV_HEADS, DIM).transpose(1, 2)
        if normed and at == "projected":
            q, k = norm(q, q_norm), norm(k, k_norm)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if normed and at == "transposed":
            q, k = norm(q, q_norm), norm(k, k_norm)
        cos, sin = rows_of(positions, inv_freq[: width // 2], rotary)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)  # type: ignore[operator]
        if normed and at == "rotated":
            q, k = norm(q, q_norm), norm(k, k_norm)
        out = attention.overload(q, k, v, key_cache, value_cache, DIM**-0.5, 3, 0, 0.0, None, None)
        return out.flatten(2)

    return trace(forward, **INPUTS)


def paged_values(*, poison: float = float("nan")) -> Values:
    """The same tokens as one request whose blocks are in arbitrary order."""
    blocks = torch.tensor([[2, 0]], dtype=torch.int32)
    position = torch.arange(TOKENS)
    slots = blocks[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    shape = (4, KV_HEADS, BLOCK_SIZE, DIM)
    caches = {(0, part): torch.full(shape, poison) for part in ("key", "value")}
    return Values.of(
        caches,
        **INPUTS,
        slot_mapping=step(slots),
        query_start=step(torch.tensor([0, TOKENS], dtype=torch.int32)),
        context_len=step(torch.tensor([TOKENS], dtype=torch.int32)),
        block_table=step(blocks),
    )
