"""The work timed by bench.kernels: each op at serving sizes, and the same result in plain torch.

It knows which version of an op serves a device, and is also used for the GPU figures (bench/gpu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmc.engine.plan import RowWork, StepPlan
from llmc.kernels.cache_dtype import FP8, to_int8_blocks
from llmc.kernels.prepare_step import prepare_step
from llmc.kernels.registry import OPS, Case
from llmc.runner.delta import encode, work_of
from llmc.runner.rows import RowTables
from llmc.runner.step_buffers import StepBuffers

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One op at one size, and torch's alternatives with the same result, by name."""

    op: str
    case: str
    run: Callable[[], Any]
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    num_bytes: float = 0.0  # the minimum to read and write
    num_flops: float = 0.0
    limit: str = "read"  # "read", or the dtype of the matrix product
    device: torch.device = CPU


Maker = Callable[[], Work | Iterator[Work]]  # called one at a time: some need gigabytes


def made(maker: Maker) -> Iterator[Work]:
    work = maker()
    if isinstance(work, Work):
        yield work
    else:
        yield from work


class InTurn:
    """A call that cycles through `calls`, one at a time."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self._turn = cycle(calls)

    def __call__(self) -> Any:
        return next(self._turn)()


def fast(name: str, case: Case) -> partial[Any]:
    """A call of the op's fast version for these arguments; the reference is never timed."""
    impl = OPS[name].best(case)
    if impl is None:
        raise RuntimeError(f"there is no fast version of {name} for these arguments")
    return partial(impl.op(), *case)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Where the tokens of a step's requests are: the arguments of `paged_attention`, and each new
    token's position and slot."""

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    positions: Tensor
    slot_mapping: Tensor
    num_blocks: int


def make_pages(
    lengths: Sequence[tuple[int, int]],  # (new tokens, context) of each request
    block_size: int,
    device: torch.device,
) -> Pages:
    """Blocks in random order."""
    need = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(need), device=device).int()
    table = torch.zeros(len(need), max(2, *need), dtype=torch.int32, device=device)
    first = 0
    for r, count in enumerate(need):
        table[r, :count] = order[first : first + count]
        first += count
    starts = [0]
    for new, _ in lengths:
        starts.append(starts[-1] + new)
    ints = partial(torch.tensor, device=device)
    rows = ints([r for r, (new, _) in enumerate(lengths) for _ in range(new)])
    positions = ints([at for new, context in lengths for at in range(context - new, context)])
    slots = table[rows, positions // block_size].long() * block_size + positions % block_size
    return Pages(
        query_start=ints(starts, dtype=torch.int32),
        context_len=ints([context for _, context in lengths], dtype=torch.int32),
        block_table=table,
        positions=positions,
        slot_mapping=slots,
        num_blocks=sum(need),
    )


def attention_case(
    lengths: list[tuple[int, int]],  # (new tokens, context) of each request
    heads: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 32,
) -> Case:
    """Random caches created on the device, which is fast for gigabytes; blocks in random order."""
    pages = make_pages(lengths, block_size, device)
    shape = (pages.num_blocks, kv, block_size, dim)
    key, value = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    query = torch.randn(len(pages.positions), heads, dim, dtype=dtype, device=device)
    return (
        query, key, value, pages.query_start, pages.context_len, pages.block_table, dim**-0.5, 0, 0,
        0.0, None, None,
    )  # fmt: skip


def decode_work(
    name: str,
    contexts: list[int],
    heads: int,
    kv: int,
    dim: int,
    device: torch.device = CPU,
    label: str = "",
    cache: torch.dtype | None = None,
) -> Work:
    """A decode step over requests with these `contexts`, with torch's SDPA if all are equal.

    `cache`: a narrower dtype; None: the query's dtype.
    """
    dtype = DTYPES[name]
    case = attention_case([(1, c) for c in contexts], heads, kv, dim, dtype, device)
    if cache == torch.int8:
        key_cache, value_cache = case[1:3]
        stored = to_int8_blocks(key_cache, keys=True), to_int8_blocks(value_cache, keys=False)
        case = (case[0], *stored, *case[3:])
    elif cache is not None:
        scale = torch.ones(1, device=device) if cache in FP8 else None
        case = (case[0], *(c.to(cache) for c in case[1:3]), *case[3:], scale, scale)
    cache = cache or dtype
    count, longest = len(contexts), max(contexts)
    peers = {}
    if set(contexts) == {longest}:
        query = case[0][:, :, None]
        key = torch.randn(count, kv, longest, dim, dtype=dtype, device=device)
        peers["sdpa"] = lambda: F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    return Work(
        op="paged_attention",
        case=f"decode {label or f'{count} x {longest}'}, {heads}/{kv} x {dim}, {name}"
        + f", cache {str(cache)[6:]}" * (cache != dtype),
        run=fast("paged_attention", case),
        peers=peers,
        num_bytes=2.0 * sum(contexts) * kv * (dim * cache.itemsize + 4 * (cache == torch.int8)),
        device=device,
    )


def prefill_work(
    name: str,
    tokens: int,
    heads: int,
    kv: int,
    dim: int,
    device: torch.device = CPU,
    *,
    flex: bool = False,
) -> Work:
    """A prefill. `flex`: also time FlexAttention, which takes seconds to compile."""
    dtype = DTYPES[name]
    case = attention_case([(tokens, tokens)], heads, kv, dim, dtype, device)
    query = torch.randn(1, heads, tokens, dim, dtype=dtype, device=device)
    key = torch.randn(1, kv, tokens, dim, dtype=dtype, device=device)
    peers: dict[str, Callable[[], Tensor]]
    if device.type == "cuda":
        wide = key.repeat_interleave(heads // kv, dim=1)  # not every backend supports GQA
        peers = {n: partial(_sdpa_by, backend, query, wide) for n, backend in _BACKENDS.items()}
        if flex:
            peers["flex"] = _flex(query, key)
    else:
        peers = {
            "sdpa": lambda: F.scaled_dot_product_attention(
                query, key, key, is_causal=True, enable_gqa=True
            )
        }
    return Work(
        op="paged_attention",
        case=f"prefill {tokens}, {heads}/{kv} x {dim}, {name}",
        run=fast("paged_attention", case),
        peers=peers,
        num_flops=2.0 * heads * dim * tokens * (tokens + 1),
        limit=name,
        device=device,
    )


def latent_work(name: str, new: int, context: int, device: torch.device = CPU) -> Work:
    """Latent attention with DeepSeek-V2-Lite's sizes; torch's SDPA uses the keys and values of all
    heads, expanded in the same call."""
    dtype, heads, dim, shared, rank = DTYPES[name], 16, 128, 64, 512
    query, cache, _, *rest = attention_case(
        [(new, context)], heads, 1, rank + shared, dtype, device
    )
    query = query[..., : dim + shared].contiguous()
    weight = torch.randn(heads * 2 * dim, rank, dtype=dtype, device=device) * rank**-0.5
    latent = torch.randn(context, rank + shared, dtype=dtype, device=device)
    seen = torch.ones(new, context, dtype=torch.bool, device=device).tril(context - new)

    def peer() -> Tensor:
        made = F.linear(latent[:, :rank], weight).unflatten(1, (heads, -1))
        common = latent[:, None, rank:].expand(-1, heads, -1)
        key = torch.cat((made[..., :dim], common), -1).transpose(0, 1)
        value = made[..., dim:].transpose(0, 1)
        return F.scaled_dot_product_attention(
            query.transpose(0, 1), key, value, attn_mask=None if new == context else seen,
            is_causal=new == context,
        )  # fmt: skip

    pairs = new * context - new * (new - 1) // 2
    flops = 2.0 * heads * (context * rank * 2 * dim + pairs * (2 * dim + shared))
    return Work(
        op="latent_attention",
        case=f"{new} of {context}, {heads} x {dim} + {shared} of {rank}, {name}",
        run=fast("latent_attention", (query, weight, cache, *rest)),
        peers={"sdpa": peer},
        num_bytes=float(weight.nbytes + latent.nbytes) * (new == 1),
        num_flops=flops * (new > 1),
        limit="read" if new == 1 else name,
        device=device,
    )


def _sdpa_by(backend: SDPBackend, query: Tensor, key: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, key, is_causal=True)


def _flex(query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    """FlexAttention with a causal block mask, compiled (https://arxiv.org/abs/2412.05496)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = query.shape[2]
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=query.device.type
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, key, key, block_mask=mask, enable_gqa=True)


def row_work(name: str, rows: int, width: int, device: torch.device = CPU) -> Iterator[Work]:
    """Norms, activation and cache writes of a step with `rows` tokens."""
    dtype, size = DTYPES[name], DTYPES[name].itemsize

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, residual, weight, gate_up = (
        rand(rows, width), rand(rows, width), rand(width), rand(rows, 6 * width),
    )  # fmt: skip
    label = f"{rows} x {width}, {name}"
    yield Work(
        op="rms_norm", case=label, num_bytes=2.0 * rows * width * size, device=device,
        run=fast("rms_norm", (x, weight, 1e-6, 0.0)),
        peers={"rms_norm": lambda: F.rms_norm(x, (width,), weight, 1e-6)},
    )  # fmt: skip
    yield Work(
        op="add_rms_norm", case=label, num_bytes=4.0 * rows * width * size, device=device,
        run=fast("add_rms_norm", (x, residual, weight, 1e-6, 0.0)),
        peers={"eager": lambda: F.rms_norm(x + residual, (width,), weight, 1e-6)},
    )  # fmt: skip
    yield Work(
        op="act_mul", case=label, num_bytes=9.0 * rows * width * size, device=device,
        run=fast("act_mul", (gate_up, "silu")),
        peers={"eager": lambda: F.silu(gate_up[:, : 3 * width]) * gate_up[:, 3 * width :]},
    )  # fmt: skip
    key, query, norm = rand(rows, 8, 128), rand(rows, 16, 128), rand(128)
    caches = torch.zeros(2, rows // 32 + 1, 8, 32, 128, dtype=dtype, device=device)
    slots = torch.arange(rows, device=device)
    cos, sin = (torch.rand(4096, 128, device=device) for _ in range(2))

    def peer_write() -> None:
        caches[0][slots // 32, :, slots % 32] = key
        caches[1][slots // 32, :, slots % 32] = key

    yield Work(
        op="write_kv", case=label, num_bytes=4.0 * key.nbytes, device=device,
        run=fast("write_kv", (key, key, caches[0], caches[1], slots)),
        peers={"eager": peer_write},
    )  # fmt: skip
    yield Work(
        op="rope_write", case=label, num_bytes=2.0 * (query.nbytes + 2 * key.nbytes), device=device,
        run=fast("rope_write", (query, key, key, norm, norm, 1e-6, 0.0, cos, sin, slots % 4096,
                                False, caches[0], caches[1], slots)),
    )  # fmt: skip


def sample_work(rows: int, vocab: int, kind: str, device: torch.device = CPU) -> Work:
    logits = torch.randn(rows, vocab, device=device) * 3
    temperature, top_k, top_p = {
        "greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top_k": (1.0, 50, 1.0),
        "top_p": (1.0, 0, 0.9), "top_k+top_p": (0.8, 50, 0.9),
    }[kind]  # fmt: skip
    ones, ids = torch.ones(rows, device=device), torch.arange(rows, device=device)
    case = (logits, ones * temperature, ones.int() * top_k, ones * top_p, ones * 0, ids, ids)

    def draw(probs: Tensor) -> Tensor:
        # torch.multinomial reads its input on the host, which can't be captured in a graph
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)

    def peer() -> Tensor:
        if kind == "greedy":
            return logits.argmax(-1)
        if kind == "top_p":
            probs, order = logits.softmax(-1).sort(-1, descending=True)
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)
            return order.gather(-1, draw(probs))
        if kind == "plain":
            return draw(logits.softmax(-1))
        values, order = logits.topk(top_k)
        probs = (values / temperature).softmax(-1)
        if top_p < 1:
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)
        return order.gather(-1, draw(probs))

    return Work(
        op="sample", case=f"{rows} x {vocab}, {kind}", num_bytes=logits.nbytes, device=device,
        run=fast("sample", case), peers={"sort": peer},
    )  # fmt: skip


def process_work(rows: int, vocab: int, device: torch.device = CPU) -> Work:
    dtype = torch.bfloat16
    logits = torch.randn(rows, vocab, dtype=dtype, device=device)
    ids = torch.arange(rows, device=device)
    zero, one = torch.zeros(rows, device=device), torch.ones(rows, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    case = (
        logits, ids, ids.int() + 100, ints(rows, 256), ids.int(), one, zero, zero,
        ints(rows), ints(rows, 4) - 1, torch.zeros(rows, 4, device=device), ints(rows, 4),
        ints(rows), ints(rows, (vocab + 31) // 32),
    )  # fmt: skip
    return Work(
        op="process_logits", case=f"{rows} x {vocab}, neutral", num_bytes=3.0 * logits.nbytes,
        run=fast("process_logits", case), peers={"float": logits.float}, device=device,
    )  # fmt: skip


def prepare_work(rows: int, context: int, device: torch.device, block_size: int = 16) -> Work:
    """A decode step of `rows` requests, prepared as in the runner; bytes are those of the block
    tables."""
    tables = RowTables(
        num_rows=rows,
        max_model_len=context + 2,
        block_size=block_size,
        vocab_size=1024,
        device=device,
    )
    step = [RowWork(row=r, start=context - 1, num_tokens=1, sample=True) for r in range(rows)]
    delta = encode(tables, StepPlan(step=0, work=step))
    sent = torch.from_numpy(delta.words).to(device)
    lines = work_of(sent, delta.num_requests)
    buffers = StepBuffers(tables, max_tokens=rows, max_requests=rows)
    return Work(
        op=prepare_step.name,
        case=f"decode {rows} x {context}",
        run=partial(buffers.prepare, lines, delta.num_tokens, delta.num_samples),
        num_bytes=8.0 * rows * (context // block_size),
        device=device,
    )
