"""The delta rule for prompts: 16 tokens at a time with matrix products, instead of one by one.

With one decay per head, a chunk's corrections u depend on the state S before it and on each other.
G[t] is the log decay from the chunk's start through token t, b are the betas:

    u[t] = b[t] (v[t] - exp(G[t]) k[t] S - sum over j < t of exp(G[t] - G[j]) (k[t] k[j]) u[j])

This is a triangular system, (I + A) u = b (v - exp(G) k S). Its inverse is computed by forward
substitution, which stays accurate where powers of A would grow. Outputs and the next state are sums
over u (Yang et al., 2024, https://arxiv.org/abs/2412.06464, section 3.3). Every exponent is at most
0. For decays per channel there is no such form that is safe for all gates, so they are processed
token by token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmc.kernels.triton.state import sigmoid, softplus, span


@triton.jit(do_not_specialize=["rows"])
def delta_units_kernel(
    query, key, queries, keys, rows, scale, norm_eps, query_token, query_head, key_token, key_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Normalize and scale queries and keys for delta_chunks_kernel, which has no registers left for
    it, and whose programs would repeat it for every tile of values and every head of a group."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, head = row // HEADS, row % HEADS
    d = tl.arange(0, DIM_PAD)[None, :]
    inside = (row < rows)[:, None] & (d < DIM)
    at = (token * query_token + head * query_head)[:, None] + d
    q = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
    at = (token * key_token + head * key_head)[:, None] + d
    k = tl.load(key + at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        q *= (1 / tl.sqrt(tl.sum(q * q, axis=1) + norm_eps))[:, None]
        k *= (1 / tl.sqrt(tl.sum(k * k, axis=1) + norm_eps))[:, None]
    place = row[:, None] * DIM + d
    tl.store(queries + place, q * scale, mask=inside)
    tl.store(keys + place, k, mask=inside)


@triton.jit
def delta_chunks_kernel(
    query, key, value, decay, beta, decay_rate, decay_bias, beta_scale, state, out,
    query_start, context_len, request_row,
    query_token, query_head, key_token, key_head, value_token, value_head,
    decay_token, decay_head, beta_token, beta_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SIGMOID: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last, slot, kept = span(query_start, context_len, request_row, request)
    d = tl.arange(0, DIM_PAD)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.arange(0, CHUNK)
    tile = state + ((slot * HEADS + head) * DIM + d[:, None]) * V_DIM + v[None, :]
    inside = (d < DIM)[:, None] & (v < V_DIM)[None, :]
    memory = tl.load(tile, mask=inside & kept, other=0.0)
    lower = c[:, None] >= c[None, :]
    strictly = c[:, None] > c[None, :]
    query += head // GROUP * query_head
    key += head // GROUP * key_head
    for start in range(first, last, CHUNK):
        token = (start + c).to(tl.int64)
        live = start + c < last
        wide = live[:, None] & (d < DIM)[None, :]
        k = tl.load(key + token[:, None] * key_token + d[None, :], mask=wide, other=0.0)
        k = k.to(tl.float32)
        stored = live[:, None] & (v < V_DIM)[None, :]
        x = tl.load(value + token[:, None] * value_token + head * value_head + v[None, :],
                    mask=stored, other=0.0).to(tl.float32)  # fmt: skip
        b = tl.load(beta + token * beta_token + head * beta_head, mask=live, other=0.0)
        b = b.to(tl.float32)
        if SIGMOID:
            b = tl.where(live, beta_scale * sigmoid(b), 0.0)
        g = tl.load(decay + token * decay_token + head * decay_head, mask=live, other=0.0)
        g = g.to(tl.float32)
        if decay_rate is not None:
            g = softplus(g + tl.load(decay_bias + head).to(tl.float32))
            g = tl.where(live, tl.load(decay_rate + head).to(tl.float32) * g, 0.0)
        total = tl.sum(g, axis=0)
        sums = tl.cumsum(g, axis=0)
        fade = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], 0.0))
        keys = tl.trans(k)
        a = tl.dot(k, keys, input_precision=PRECISION) * fade * b[:, None]
        a = tl.where(strictly, a, 0.0)
        inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
        for i in tl.static_range(1, CHUNK):
            row = tl.sum(tl.where(c[:, None] == i, a, 0.0), axis=0)
            known = tl.sum(row[:, None] * inverse, axis=0)
            inverse = tl.where(c[:, None] == i, inverse - known[None, :], inverse)
        begun = tl.exp(sums)[:, None]
        wanted = b[:, None] * (x - begun * tl.dot(k, memory, input_precision=PRECISION))
        u = tl.dot(inverse, wanted, input_precision=PRECISION)
        q = tl.load(query + token[:, None] * query_token + d[None, :], mask=wide, other=0.0)
        q = q.to(tl.float32)
        seen = tl.where(lower, tl.dot(q, keys, input_precision=PRECISION) * fade, 0.0)
        y = begun * tl.dot(q, memory, input_precision=PRECISION)
        y += tl.dot(seen, u, input_precision=PRECISION)
        place = out + (token[:, None] * HEADS + head) * V_DIM + v[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=stored)
        rest = tl.trans(k * tl.exp(total - sums)[:, None])
        memory = memory * tl.exp(total) + tl.dot(rest, u, input_precision=PRECISION)
    tl.debug_barrier()  # all threads of the program have read the state
    tl.store(tile, memory, mask=inside)
