"""Packed bits -> values [N, K] and their scales, for the layouts of quantized checkpoints; and
dequantization.

Layouts as written by AutoAWQ (gemm), GPTQModel and compressed-tensors (pack_quantized), and the OCP
microscaling formats. The bytes of a word are in little-endian order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each of the eight channels in an AWQ word
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AT_ONCE = 1 << 18  # values dequantized at a time, so that they fit in a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBits:
    """A quantized weight [N, K]: value = (q - zero) * scale.

    q: int8, uint8 or float8. scale, zero: over blocks of (channels, inputs) of size `block`.
    group_of [K]: the column of `scale` for each input, if inputs are not in order. table: the
    numbers that q are codes of. All but these two can have a leading dimension of experts.
    """

    q: Tensor
    scale: Tensor
    block: tuple[int, int]
    zero: Tensor | None = None
    group_of: Tensor | None = None
    table: Tensor | None = None

    def matrices(self) -> Iterator[LowBits]:
        """Itself, or one item per expert."""
        if self.q.dim() == 2:
            yield self
            return
        for e in range(len(self.q)):
            zero = None if self.zero is None else self.zero[e]
            yield LowBits(q=self.q[e], scale=self.scale[e], block=self.block, zero=zero)


def dequantize(low: LowBits, out: Tensor) -> None:
    """Dequantize into `out` [..., N, K]; computed in float32 and rounded once."""
    if low.q.dim() == 3:
        for one, place in zip(low.matrices(), out, strict=True):
            dequantize(one, place)
        return
    channels, depth = low.q.shape
    scale, zero = low.scale.float(), None if low.zero is None else low.zero.float()
    rows = min(channels, max(1, _AT_ONCE // depth))
    values = torch.empty(rows, depth)  # reused: allocating memory costs more than the arithmetic
    for start in range(0, channels, rows):
        q = low.q[start : start + rows]
        some = values[: len(q)]
        _widen(q, some, low.table)
        row = torch.arange(start, start + len(q)) // low.block[0]
        if zero is not None:
            _over_groups(some, low, torch.Tensor.sub_, zero[row])
        _over_groups(some, low, torch.Tensor.mul_, scale[row])
        out[start : start + rows] = some


def _widen(q: Tensor, out: Tensor, table: Tensor | None) -> None:
    if table is not None:
        torch.index_select(table, 0, q.int().flatten(), out=out.view(-1))
        return
    if q.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        out.copy_(q)
        return
    known = torch.arange(256, dtype=torch.uint8).view(q.dtype).float()  # faster than a conversion
    codes = q.view(torch.uint8).int().flatten()
    torch.index_select(known, 0, codes, out=out.view(-1))


def _over_groups(
    values: Tensor, low: LowBits, apply: Callable[[Tensor, Tensor], Tensor], groups: Tensor
) -> None:
    """`apply` in place to values [R, K] and the entry of groups [R, G] for each value."""
    depth, size = values.shape[1], low.block[1]
    if low.group_of is not None:
        apply(values, groups[:, low.group_of])
    elif depth % size:
        apply(values, groups.repeat_interleave(size, dim=1)[:, :depth])
    else:
        apply(values.view(len(values), -1, size), groups[:, :, None])


def pieces(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] -> uint8 [..., W, 32 / bits], the lowest bits of a word first. For 3 bits
    [..., W / 3, 32], as values continue in the next of three words."""
    if bits == 3:
        words = words.unflatten(-1, (-1, 3)).long() & 0xFFFFFFFF
        low, high = words[..., 0] | words[..., 1] << 32, words[..., 1] >> 31 | words[..., 2] << 1
        some = [low >> at & 7 for at in range(0, 63, 3)] + [
            high >> at & 7 for at in range(0, 33, 3)
        ]
        return torch.stack(some, dim=-1).to(torch.uint8)
    parts = words.contiguous().unsqueeze(-1).view(torch.uint8)
    if bits == 8:
        return parts
    mask = (1 << bits) - 1
    return torch.stack([parts >> at & mask for at in range(0, 8, bits)], dim=-1).flatten(-2)


def add_one(words: Tensor, bits: int) -> Tensor:
    """Add one to every packed value of int32 words; carries undo the writer's borrows."""
    return words + {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]


def unpack_gptq(words: Tensor, bits: int) -> Tensor:
    """[K / per word, N] -> [N, K]: a word holds inputs of one channel."""
    return pieces(words.T, bits).flatten(1)


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """[R, C / per word] -> [R, C]."""
    return pieces(words, bits).flatten(1)


def unpack_awq(words: Tensor) -> Tensor:
    """[R, N / 8] -> [N, R]."""
    parts = pieces(words, 4)[..., list(_AWQ_ORDER)]
    return parts.flatten(1).T.contiguous()


def centered(q: Tensor, bits: int) -> Tensor:
    """Unsigned values -> int8 around zero."""
    if bits == 8:
        return (q ^ 128).view(torch.int8)
    return q.view(torch.int8) - (1 << (bits - 1))


def unpack_rows(stored: Tensor) -> Tensor:
    """uint8 [R, K] -> int8 [4 R, K] of -1, 0 and 1: bits 0 and 1 are of the first R rows."""
    return torch.cat([stored >> at & 3 for at in (0, 2, 4, 6)]).view(torch.int8) - 1


def halves(stored: Tensor) -> Tensor:
    """uint8 of any shape -> the two values of each byte, the high half first, flat."""
    return torch.stack((stored >> 4, stored & 15), dim=-1).flatten()


def unpack_e2m1(codes: Tensor) -> Tensor:
    """uint8 [..., B], two codes per byte, low half first -> float8_e4m3fn [..., 2 B], exact."""
    known = torch.tensor(_E2M1 + tuple(-v for v in _E2M1)).to(torch.float8_e4m3fn)
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return known.view(torch.uint8)[both.int()].view(torch.float8_e4m3fn)
