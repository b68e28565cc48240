"""`attention`: the marker for a layer's attention in a captured graph, before paging.

The model's own code calls it through transformers' attention interface. It represents attention
over one sequence. The layer's caches are tensor arguments (still without a size), so that equal
layers give equal graphs. `passes/page_attention.py` replaces it with a cache write and
`paged_attention`, or with `encoder_attention` in an encoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.kernels.registry import op


def visible(query_pos: Tensor, key_pos: Tensor, window: int, chunk: int) -> Tensor:
    """Which keys are visible to each query: [Q], [K] -> bool [Q, K]. A window or chunk of 0 is off.

    With a window of w, a token sees itself and the w - 1 tokens before it. With a chunk of c, it
    sees the tokens of the same aligned block of c, up to itself.
    """
    q, k = query_pos[:, None], key_pos[None, :]
    mask = k <= q
    if window > 0:
        mask = mask & (q - k < window)
    if chunk > 0:
        mask = mask & (q // chunk == k // chunk)
    return mask


def within(query_pos: Tensor, key_pos: Tensor, window: int) -> Tensor:
    """Which keys are visible to each query of an encoder: [Q], [K] -> bool [Q, K]. These are the
    keys less than `window` positions away in either direction; 0: all."""
    distance = (query_pos[:, None] - key_pos[None, :]).abs()
    return distance < window if window > 0 else torch.ones_like(distance, dtype=torch.bool)


def first_visible(position: int, window: int, chunk: int) -> int:
    """The first key that is visible to any query from `position` on."""
    first = max(position - window + 1, 0) if window > 0 else 0
    return max(first, position // chunk * chunk) if chunk > 0 else first


def among(chosen: Tensor, sparse_block_size: int, num_keys: int) -> Tensor:
    """Sparse blocks [Q, G, N], of which negative ones are unused, as a mask [G, Q, num_keys]."""
    queries, groups, _ = chosen.shape
    count = -(-num_keys // sparse_block_size)
    mask = torch.zeros(queries, groups, count + 1, dtype=torch.bool, device=chosen.device)
    rest = torch.where(chosen < 0, count, chosen.long())
    mask = mask.scatter(2, rest, True)[..., :count].repeat_interleave(sparse_block_size, 2)
    return mask[..., :num_keys].transpose(0, 1)


def attend(
    query: Tensor,  # [Q, H, D]
    key: Tensor,  # [K, Hkv, D]
    value: Tensor,  # [K, Hkv, Dv]
    query_pos: Tensor,  # [Q]
    key_pos: Tensor,  # [K]
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,  # [H], or [Q, H]
    slopes: Tensor | None,  # [H]
    allowed: Tensor | None = None,  # [G, Q, K] bool, for G groups of heads: restricts the keys
    also: Tensor | None = None,  # [Q, K] bool: keys that are visible in addition
    distance_bias: Tensor | None = None,  # [Q, H, E]: per query, by the distance to a key
) -> Tensor:
    """Softmax attention of one sequence in float32, rounded once: [Q, H, Dv] in query's dtype."""
    groups = query.shape[1] // key.shape[1]
    q = query.float().transpose(0, 1)  # [H, Q, D]
    k = key.float().transpose(0, 1).repeat_interleave(groups, 0)  # [H, K, D]
    v = value.float().transpose(0, 1).repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        distance = (key_pos[None, :] - query_pos[:, None]).float()
        scores = scores + slopes.float()[:, None, None] * distance
    if distance_bias is not None:
        scores = scores + by_distance(distance_bias, query_pos, key_pos)
    seen = visible(query_pos, key_pos, window, chunk)
    if also is not None:
        seen = seen | also
    if allowed is not None:
        seen = seen & allowed.repeat_interleave(query.shape[1] // allowed.shape[0], 0)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:  # a logit that takes part in the softmax but has no value
        sink = sinks.float().expand(scores.shape[1], -1).t()[..., None]
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(0, 1).to(query.dtype).contiguous()


def by_distance(distance_bias: Tensor, query_pos: Tensor, key_pos: Tensor) -> Tensor:
    """The bias to add to the scores [H, Q, K], from each query's numbers [Q, H, E] by distance: the
    query's number for keys 0 to E - 1 positions before it, 0 for others."""
    extent = distance_bias.shape[2]
    distance = query_pos[:, None] - key_pos[None, :]
    index = distance.clamp(0, extent - 1).expand(distance_bias.shape[1], -1, -1)
    added = distance_bias.float().transpose(0, 1).gather(2, index)
    return added.masked_fill((distance < 0) | (distance >= extent), 0.0)


def expand(latent: Tensor, weight: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Expand latents to the keys [K, H, dim] and values [K, H, Dv] of all heads, in float32.

    latent [K, 1, R + Dr]: the latent, then the last Dr channels of every head's key. weight
    [H * (dim - Dr + Dv), R]: for each head, the other channels of its key, then its value.
    """
    own, shared = latent.float().split([weight.shape[1], latent.shape[2] - weight.shape[1]], -1)
    made = (own[:, 0] @ weight.float().t()).unflatten(1, (heads, -1))
    key, value = made.split([dim - shared.shape[2], made.shape[2] - dim + shared.shape[2]], -1)
    return torch.cat((key, shared.expand(-1, heads, -1)), -1), value


def expanded_dim(query_dim: int, heads: int, weight: Tensor, cached: int) -> int:
    """Dv: channels of a head's value that is expanded from `cached` values per token."""
    return int(weight.shape[0]) // heads - query_dim + cached - int(weight.shape[1])


def _shape(
    *, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, **others: object
) -> Tensor:
    batch, heads, tokens, dim = query.shape
    width = value.shape[-1] if weight is None else expanded_dim(dim, heads, weight, key.shape[-1])
    return query.new_empty(batch, tokens, heads, width)


@op(shape=_shape)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    chosen: Tensor | None = None,
    sparse_block_size: int = 1,
    causal: bool = True,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv].

    Causal attention over one sequence of T tokens; the caches are not read. If not `causal`, tokens
    also see later ones, within the window on both sides (`encoder_attention`). chosen [T, G, N],
    with `sparse_block_size`: the keys that each token attends to, if the model chooses them, in the
    form of `paged_attention`; before `find_indexers`, in the model's form.
    bias [0, H, T, T]: what the model computed from a mask marker, which has no values yet;
    `find_key_biases` replaces it.
    weight [H * (D - Dr + Dv), R]: key [1, 1, T, R + Dr] is a latent, which the weight expands to
    the keys and values of all heads, as in `expand`; `value` is the latent's first R channels.
    sinks [H], or [T, H]: a logit per head, or per token and head, without a value. distance_bias
    [1, H, T, E]: what each token adds to the scores of keys 0 to E - 1 positions before it; before
    `find_distance_biases`, in the model's form, [1, H, T, T] for each key.
    """
    if bias is not None:
        raise ValueError("a mask that the model changed has no values before find_key_biases")
    pos = torch.arange(query.shape[2], device=query.device)
    later = None if causal else within(pos, pos, window)
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if weight is not None:
        keys, values = expand(keys, weight, query.shape[1], query.shape[3])
    out = attend(
        query[0].transpose(0, 1),
        keys,
        values,
        pos,
        pos,
        scale,
        window,
        chunk,
        softcap,
        sinks,
        slopes,
        None if chosen is None else among(chosen, sparse_block_size, len(pos)),
        also=later,
        distance_bias=None if distance_bias is None else distance_bias[0].transpose(0, 1),
    )
    return out[None]
