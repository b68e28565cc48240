"""Arithmetic on an inspection: what fits in memory, and the decode speed a bandwidth allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.engine.kv.layout import WHOLE, AttentionWindow, CacheLayout
from llmc.passes.group_caches import group_size

BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """Layers with the same attention window: their bytes per token, and the bytes reserved per
    token, which are more if a group of layers (`group_caches`) is not full."""

    window: AttentionWindow
    bytes_per_token: int
    taken_per_token: int


def cache_kinds(layers: Sequence[tuple[AttentionWindow, int]]) -> tuple[CacheKind, ...]:
    """The kinds for (window, bytes per token) by layer. Caches of several shapes share one block
    table, so all of them keep as many tokens as the one with the largest window."""
    kinds: dict[AttentionWindow, list[int]] = {}
    for window, num in sorted(layers, key=lambda layer: -layer[0].most):
        kinds.setdefault(window, []).append(num)
    if len({num for _, num in layers}) > 1:
        kinds = {WHOLE if len(kinds) > 1 else next(iter(kinds)): [num for _, num in layers]}
    if not kinds:
        return ()
    size = group_size([len(each) for each in kinds.values()])
    return tuple(
        CacheKind(
            window=window,
            bytes_per_token=sum(each),
            taken_per_token=sum(each) * (-(-len(each) // size) * size) // len(each),
        )
        for window, each in kinds.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes in bytes. `activation_bytes` is an estimate for a full step of `step_tokens`."""

    weight_bytes: int
    read_bytes: int  # weights that every step reads
    expert_bytes: int  # weights of all routed experts
    num_experts: int
    num_chosen: int
    caches: tuple[CacheKind, ...]
    state_bytes: int  # per request
    activation_bytes: int
    block_size: int
    step_tokens: int
    max_model_len: int

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers, while a token is inside all of their windows."""
        return sum(kind.bytes_per_token for kind in self.caches)

    def request_bytes(self, context: int) -> int:
        """The most memory that a request with `context` tokens uses: whole blocks and its state."""
        total = self.state_bytes
        for kind in self.caches:
            layout = CacheLayout(
                block_size=self.block_size, step_tokens=self.step_tokens, windows=(kind.window,)
            )
            total += layout.blocks_for(context) * self.block_size * kind.taken_per_token
        return total

    def step_bytes(self, batch: int, context: int) -> float:
        """Bytes read from memory by one decode step of `batch` requests."""
        touched = 0.0
        if self.num_experts:  # the share of experts that at least one token is routed to
            touched = 1 - (1 - self.num_chosen / self.num_experts) ** batch
        seen = sum(min(context, kind.window.most) * kind.bytes_per_token for kind in self.caches)
        return self.read_bytes + touched * self.expert_bytes + batch * (seen + self.state_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One context length. `num_requests` None: memory is not known. Tokens per second by batch
    size; None if so many requests do not fit."""

    context: int
    request_bytes: int
    num_requests: int | None
    tokens_per_s: tuple[float | None, ...]


def contexts(max_model_len: int) -> list[int]:
    """1k, 4k, 16k ... up to the model's context length."""
    found = [c for c in (1024 * 4**i for i in range(6)) if c < max_model_len]
    return [*found, max_model_len]


def fit(sizes: Sizes, memory: int | None, bandwidth: float | None) -> list[Row]:
    """The rows. `memory` in bytes, `bandwidth` in bytes per second; None leaves columns empty."""
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
    """Tokens per second over all requests of the batch, if only reading memory takes time."""
    if bandwidth is None:
        return [None] * len(batches)
    return [
        None
        if most is not None and batch > most
        else batch * bandwidth / sizes.step_bytes(batch, context)
        for batch in batches
    ]
