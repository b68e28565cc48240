"""Arithmetic on an inspection: what fits in memory, and how fast a bandwidth lets it decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes. `activation_bytes` is an estimate for a full step."""

    weight_bytes: int
    read_bytes: int  # weights that every step reads
    expert_bytes: int  # weights of all routed experts
    num_experts: int
    num_chosen: int
    kv_bytes_per_token: int
    state_bytes: int  # for each request
    activation_bytes: int
    block_size: int
    max_model_len: int

    def request_bytes(self, context: int) -> int:
        """Cache and state of one request of so many tokens, in whole blocks."""
        blocks = -(-context // self.block_size)
        return blocks * self.block_size * self.kv_bytes_per_token + self.state_bytes

    def step_bytes(self, batch: int, context: int) -> float:
        """Read from memory by one decode step of `batch` requests."""
        touched = 0.0
        if self.num_experts:  # the share of experts that at least one of the tokens chose
            touched = 1 - (1 - self.num_chosen / self.num_experts) ** batch
        cache = batch * (context * self.kv_bytes_per_token + self.state_bytes)
        return self.read_bytes + touched * self.expert_bytes + cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One context length. `num_requests` None: memory was not asked for. Tokens a second by batch;
    None where so many requests do not fit."""

    context: int
    request_bytes: int
    num_requests: int | None
    tokens_per_s: tuple[float | None, ...]


def contexts(max_model_len: int) -> list[int]:
    """1k, 4k, 16k ... up to the model's own."""
    found = [c for c in (1024 * 4**i for i in range(6)) if c < max_model_len]
    return [*found, max_model_len]


def fit(sizes: Sizes, memory: int | None, bandwidth: float | None) -> list[Row]:
    """`memory` in bytes, `bandwidth` in bytes a second; None leaves its columns empty."""
    rows = []
    for context in contexts(sizes.max_model_len):
        each = sizes.request_bytes(context)
        most = None
        if memory is not None:
            room = memory - sizes.weight_bytes - sizes.activation_bytes
            most = max(0, room // each) if each else None
        rows.append(
            Row(
                context=context,
                request_bytes=each,
                num_requests=most,
                tokens_per_s=tuple(_speeds(sizes, context, most, bandwidth, BATCHES)),
            )
        )
    return rows


def _speeds(
    sizes: Sizes,
    context: int,
    most: int | None,
    bandwidth: float | None,
    batches: Sequence[int],
) -> list[float | None]:
    """Tokens a second over all requests of the batch, when nothing but reading takes time."""
    if bandwidth is None:
        return [None] * len(batches)
    return [
        None
        if most is not None and batch > most
        else batch * bandwidth / sizes.step_bytes(batch, context)
        for batch in batches
    ]
