"""`find_indexers`: sparse indexers, found by what they compute, become ops with a cache of keys.

Only the product of an indexer's queries and keys is matched by shape, above the `topk` that
produces the positions, or blocks of positions, for attention. What lies between (scale, activation,
weights, mask) is not matched but run on random numbers. The result must agree with the scores of
`choose_keys` or the choices of `choose_blocks`, or the model is rejected.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.kernels.choose_blocks import choose_blocks
from llmc.kernels.choose_keys import choose_keys
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    set_arguments,
    through,
    val,
)
from llmc.passes.evaluate import NotEvaluable, evaluate, token_counts
from llmc.passes.inputs import CacheInput, add_input, input_of, step_input, token_input

CAUSAL = (0, 1, 1, 1)  # the shape of a mask marker without a window or chunks
_VIEWS = (
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.view.default,
    aten.reshape.default,
)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_OURS = (choose_keys.overload, choose_blocks.overload)
_HIDDEN = -1e4  # a score below this hides a key
_PROBE_TOKENS = (37, 23)
_MANY_TOKENS = 1 << 20
_SAME_ROWS = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexer:
    """The nodes between which scores are computed. T is the number of tokens."""

    scores: fx.Node  # [1, T, T], masked
    query: fx.Node  # four dimensions of 1, T, H and D
    key: fx.Node  # the second factor of the product: [..., D, T]
    weights: fx.Node  # dimensions T and H in any order, and dimensions of 1
    masks: tuple[fx.Node, ...]  # mask markers
    heads: int


@graph_pass(required=True)
def find_indexers(gm: fx.GraphModule, *, max_positions: int, block_size: int) -> Notes:
    """Choose keys over the whole context, from a paged cache of the indexer's keys.

    Layers that share positions share the op. For a context no longer than its budget, an indexer
    chooses all keys; if no context can be longer (`max_positions`), the indexer is dropped.

    Before:
        s = aten.matmul(weights, aten.relu(aten.matmul(q, k^T) * scale)) + mask
        i = aten.topk(s [1, T, T], 2048)[1]
        o = llmc.attention(..., chosen=i)
    After:
        i = llmc.choose_keys(q [T, H, D], k [T, D], weights [T, H], key_cache, slot_mapping,
                             query_start, context_len, block_table, 2048)
        o = llmc.attention(..., chosen=aten.unsqueeze(i, 1))

    Blocks become `llmc.choose_blocks` in the same way.
    """
    graph = gm.graph
    notes = []
    found: dict[fx.Node, fx.Node | None] = {}  # the model's positions -> ours; None: all keys
    for marker in calls(graph, attention.overload):
        chosen, size = arguments(marker).chosen, arguments(marker).sparse_block_size
        if chosen is None or is_call(through(chosen, *_VIEWS), *_OURS):
            continue
        if chosen not in found:
            topk = _topk(chosen) if size == 1 else _topk_of_blocks(chosen)
            budget = size * budget_of(graph, topk)
            if budget >= max_positions:
                found[chosen] = None
                notes.append(f"{topk.name} chooses all of {max_positions} tokens")
            elif size == 1:
                found[chosen] = _replace(graph, topk, budget, block_size)
            else:
                found[chosen] = _replace_blocks(graph, chosen, budget // size, size, block_size)
        ours = found[chosen]
        if ours is not None:
            check_plain(marker, ours)
        set_arguments(marker, chosen=ours, sparse_block_size=1 if ours is None else size)
    return notes


def _topk(chosen: fx.Node) -> fx.Node:
    """The call of topk over [1, T, T] scores whose indices these are."""
    topk = _source_of_indices(through(chosen, *CASTS))
    if topk is not None and _takes_best_keys(topk):
        return topk
    raise CompileError(
        f"{chosen.name}, the positions that attention is restricted to, is not a topk over the "
        "scores of all tokens, which llmc does not support"
    )


def _source_of_indices(node: fx.Node) -> fx.Node | None:
    """The call of topk whose indices are this node, or None."""
    if is_call(node, operator.getitem) and arguments(node).index == 1:
        topk: fx.Node = arguments(node).source
        return topk if is_call(topk, aten.topk.default) else None
    return None


def _topk_of_blocks(chosen: fx.Node) -> fx.Node:
    """The call of topk that these block numbers come from, whatever masks some of them."""
    stack, seen = [chosen], set[fx.Node]()
    while stack:
        node = stack.pop()
        topk = _source_of_indices(node)
        if topk is not None:
            return topk
        if node not in seen and isinstance(node.meta.get("val"), Tensor):
            seen.add(node)
            stack += node.all_input_nodes
    raise CompileError(
        f"{chosen.name}, the blocks that attention is restricted to, do not come from a topk, "
        "which llmc does not support"
    )


def _takes_best_keys(topk: fx.Node) -> bool:
    given = arguments(topk)
    dims = val(given.self).dim()
    is_last = given.dim in (-1, dims - 1)
    return bool(given.largest and is_last and dims == 3 and is_over_keys(given.self))


def is_over_keys(node: fx.Node) -> bool:
    """Whether the last dimension, and one before it, are the number of tokens."""
    shape = [str(s) for s in val(node).shape]
    return shape[-1] == str(num_tokens(node)) and shape[-1] in shape[:-1]


def _token_dim(node: fx.Node) -> int:
    return [str(s) for s in val(node).shape].index(str(num_tokens(node)))


def num_tokens(node: fx.Node) -> Any:
    return val(token_input(node.graph)).shape[0]


def budget_of(graph: fx.Graph, topk: fx.Node) -> int:
    """How many keys it chooses from a long context; in the graph it is min(budget, T)."""
    k = arguments(topk).k
    if isinstance(k, int):
        return k
    tokens = _MANY_TOKENS
    size = dict.fromkeys(calls(graph, aten.sym_size.int), tokens)

    def value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node in size:
            return size[node]
        if node.op != "call_function" or isinstance(node.meta.get("val"), Tensor):
            raise CompileError(f"{topk.name} chooses {k} keys, a number that llmc can't compute")
        return node.target(*map(value, node.args))  # type: ignore[operator]

    return int(value(k))


def check_plain(marker: fx.Node, chosen: fx.Node) -> None:
    """Raise CompileError if paged attention does not support chosen keys for such a call."""
    given = arguments(marker)
    groups, kv_heads = val(chosen).shape[1], val(given.key).shape[1]
    if groups not in (1, kv_heads):
        raise CompileError(
            f"{marker.name} has {kv_heads} KV heads and {groups} choices of keys for each token; "
            "llmc supports one for all heads, or one for each KV head"
        )
    biases = (given.slopes, given.distance_bias)
    if given.window or given.chunk or any(bias is not None for bias in biases):
        raise CompileError(
            f"{marker.name} attends to chosen positions within a window or with a position bias, "
            "which llmc does not support"
        )


def _replace(graph: fx.Graph, topk: fx.Node, budget: int, block_size: int) -> fx.Node:
    """Replace `topk` with `choose_keys` over a new cache."""
    try:
        indexer = _find(arguments(topk).self)
        _prove(graph, indexer)
    except (NotEvaluable, RuntimeError, IndexError) as e:
        raise CompileError(
            f"{topk.name} chooses the keys of attention, but not by weighted sums of products "
            f"between queries and keys ({' '.join(str(e).split())[:200]}); it chooses all of up to "
            f"{budget} tokens, so max_model_len={budget} works"
        ) from e
    with graph.inserting_before(topk):
        shared = _op_inputs(graph, indexer.query, indexer.key, indexer.heads, block_size)
        tokens = emit(graph, aten.sym_size.int, token_input(graph), 0)
        weights = emit(graph, aten.movedim.int, indexer.weights, _token_dim(indexer.weights), 0)
        weights = emit(graph, aten.reshape.default, weights, [tokens, indexer.heads])
        chosen = emit(
            graph,
            choose_keys.overload,
            **shared,
            weights=_cast(graph, weights, torch.float32),
            top_k=budget,
        )
        return emit(graph, aten.unsqueeze.default, chosen, 1)


def _op_inputs(
    graph: fx.Graph, query: fx.Node, key: fx.Node, heads: int, block_size: int
) -> dict[str, fx.Node]:
    """The inputs of both ops: query [T, H, D] and key [T, D] from the product's factors, a cache
    and step inputs."""
    names = ("slot_mapping", "query_start", "context_len", "block_table")
    tokens = emit(graph, aten.sym_size.int, token_input(graph), 0)
    dim = val(query).shape[3]
    query = emit(graph, aten.movedim.int, query, _token_dim(query), 0)
    query = emit(graph, aten.reshape.default, query, [tokens, heads, dim])
    key = emit(graph, aten.transpose.int, key, -1, -2)
    key = emit(graph, aten.reshape.default, key, [tokens, dim])
    # the dtype before the casts to float32, which models use for scoring
    dtype = torch.promote_types(*(_source_dtype(n) for n in (query, key)))
    query, key = (_cast(graph, n, dtype) for n in (query, key))
    caches = {"key_cache": index_cache(graph, key, block_size)}
    return {"query": query, "key": key, **caches, **{n: step_input(graph, n) for n in names}}


def _replace_blocks(
    graph: fx.Graph, chosen: fx.Node, top_k: int, size: int, block_size: int
) -> fx.Node:
    """Replace `chosen` with `choose_blocks` over a new cache."""
    try:
        query, key = _factors(_product(chosen))
        recent = _recent_blocks(graph, chosen, query, key, top_k, size)
    except (NotEvaluable, RuntimeError, IndexError) as e:
        raise CompileError(
            f"{chosen.name} chooses blocks of keys for attention, but not those whose keys have "
            f"the greatest products with its query ({' '.join(str(e).split())[:200]}); it chooses "
            f"all of up to {top_k * size} tokens, so max_model_len={top_k * size} works"
        ) from e
    with graph.inserting_before(chosen):
        shared = _op_inputs(graph, query, key, _heads(query), block_size)
        sizes = {"top_k": top_k, "sparse_block_size": size, "recent": recent}
        return emit(graph, choose_blocks.overload, **shared, **sizes)


def _product(chosen: fx.Node) -> fx.Node:
    """The product [..., T, T] that the choice of blocks is based on."""
    products, seen, stack = set[fx.Node](), set[fx.Node](), [chosen]
    tokens = str(num_tokens(chosen))
    while stack:
        node = stack.pop()
        if is_call(node, *_PRODUCTS) and [str(s) for s in val(node).shape[-2:]] == [tokens] * 2:
            products.add(node)
        elif node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    if len(products) != 1:
        raise NotEvaluable(f"they come from {len(products)} products")
    return products.pop()


def _recent_blocks(
    graph: fx.Graph, chosen: fx.Node, query: fx.Node, key: fx.Node, top_k: int, size: int
) -> int:
    """The number of most recent blocks, including a token's own, that are always chosen. Raises
    NotEvaluable if the choices for random numbers differ from those of `choose_blocks`."""
    recent = None
    for seed, tokens in enumerate(((top_k + 4) * size + size // 2, (top_k + 2) * size)):
        gen = torch.Generator().manual_seed(seed)
        heads, dim = _heads(query), int(val(query).shape[3])
        q = torch.randn(tokens, heads, dim, generator=gen)
        k = torch.randn(tokens, dim, generator=gen)
        given: dict[fx.Node, Any] = {
            query: _shaped(q, query, tokens),
            key: _shaped(k, key, tokens),
            **token_counts(graph, tokens),
        }
        got = evaluate(graph, chosen, tokens, given)
        if got.shape[:3] != (1, heads, tokens):
            raise NotEvaluable(f"they are {list(got.shape)}")
        got = got[0].transpose(0, 1).sort(dim=2).values
        candidates = range(top_k + 1) if recent is None else (recent,)
        fits = (r for r in candidates if _is_as_chosen(got, q, k, top_k, size, r))
        recent = next(fits, None)
        if recent is None:
            raise NotEvaluable("random numbers give other blocks")
    assert recent is not None, "there are probes"
    return recent


def _is_as_chosen(got: Tensor, q: Tensor, k: Tensor, top_k: int, size: int, recent: int) -> bool:
    """Whether the choices agree, but for a few rows whose scores differ by rounding errors."""
    tokens = q.shape[0]
    want = choose_blocks.reference(
        q,
        k,
        k.new_empty(1, 1, tokens, k.shape[1]),
        torch.arange(tokens),
        torch.tensor([0, tokens]),
        torch.tensor([tokens]),
        torch.zeros(1, 1, dtype=torch.int32),
        top_k,
        size,
        recent,
    )
    want = want.sort(dim=2).values
    is_same = got.shape == want.shape and (got == want).all(dim=2).float().mean()
    return bool(is_same > _SAME_ROWS)


def _source_dtype(node: fx.Node) -> torch.dtype:
    return val(through(node, *CASTS, *_VIEWS)).dtype


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if val(node).dtype == dtype else emit(graph, aten.to.dtype, node, dtype)


def index_cache(graph: fx.Graph, key: fx.Node, block_size: int) -> fx.Node:
    """Add a placeholder for a cache of these keys, with the next number."""
    roles = [input_of(n) for n in graph.nodes if n.op == "placeholder"]
    layer = 1 + max((role.layer for role in roles if isinstance(role, CacheInput)), default=-1)
    empty = val(key).new_empty(2, 1, block_size, val(key).shape[1])
    return add_input(graph, f"index_cache_{layer}", CacheInput(layer=layer, part="key"), empty)


def _find(scores: fx.Node) -> _Indexer:
    """What the scores are computed from; NotEvaluable if they do not look like an indexer's."""
    products, others = [], []
    seen = set()
    stack = [scores]
    while stack:
        node = stack.pop()
        if node in seen or not isinstance(node.meta.get("val"), Tensor):
            continue
        seen.add(node)
        if not is_over_keys(node):
            others.append(node)
        elif (
            is_call(node, *_PRODUCTS)
            and not is_over_keys(arguments(node).self)
            and (not is_over_keys(_right(node)))
        ):
            products.append(node)
        else:
            stack += node.all_input_nodes
    if len(products) != 1:
        raise NotEvaluable(f"its scores come from {len(products)} products")
    masks = {m for node in others for m in mask_markers(node)}
    weights = [n for n in others if not mask_markers(n)]
    if len(weights) != 1:
        raise NotEvaluable(f"its scores are computed from {len(weights)} other tensors")
    [product] = products
    query, key = _factors(product)
    tokens, heads = str(num_tokens(scores)), _heads(query)
    sizes = [s for s in map(str, val(weights[0]).shape) if s != "1"]
    if sorted(sizes) != sorted([tokens, *([str(heads)] if heads > 1 else [])]):
        raise NotEvaluable(f"its weights are {sizes}")
    return _Indexer(
        scores=scores,
        query=query,
        key=key,
        weights=weights[0],
        masks=tuple(masks),
        heads=heads,
    )


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Queries with the four dimensions 1, T, H and D, and keys [..., D, T] shared by all heads."""
    query, key = arguments(product).self, _right(product)
    tokens, shape = str(num_tokens(product)), [str(s) for s in val(query).shape]
    if len(shape) != 4 or shape[0] != "1" or tokens not in shape[1:3]:
        raise NotEvaluable(f"its queries are {shape}")
    dim, sizes = shape[3], [str(s) for s in val(key).shape]
    if sizes[-2:] != [dim, tokens] or set(sizes[:-2]) > {"1"}:
        raise NotEvaluable(f"its keys are {sizes}: not shared by all heads")
    return query, key


def _heads(query: fx.Node) -> int:
    return int(val(query).shape[1 if _token_dim(query) == 2 else 2])


def _right(product: fx.Node) -> Any:
    given = arguments(product)
    return given.mat2 if hasattr(given, "mat2") else given.other


def mask_markers(node: fx.Node) -> list[fx.Node]:
    """The mask markers (llmc/compiler/interface.py) that a value is computed from."""
    found, seen, stack = [], set(), [node]
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        if is_call(at, aten.empty.memory_format) and val(at).dim() == 4 and val(at).shape[0] == 0:
            found.append(at)
        stack += at.all_input_nodes
    return found


def _prove(graph: fx.Graph, indexer: _Indexer) -> None:
    """Check that scores for random numbers are those of `choose_keys` times a positive scale."""
    if any(tuple(val(mask).shape) != CAUSAL for mask in indexer.masks):
        raise NotEvaluable("it is limited to a window")
    for seed, tokens in enumerate(_PROBE_TOKENS):
        gen = torch.Generator().manual_seed(seed)
        dim = int(val(indexer.query).shape[3])
        q = torch.randn(tokens, indexer.heads, dim, generator=gen)
        k = torch.randn(tokens, dim, generator=gen)
        w = torch.randn(tokens, indexer.heads, generator=gen)
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        given: dict[fx.Node, Any] = {
            indexer.query: _shaped(q, indexer.query, tokens),
            indexer.key: _shaped(k, indexer.key, tokens),
            indexer.weights: _shaped(w, indexer.weights, tokens),
            **dict.fromkeys(indexer.masks, causal[None, None]),
        }
        got = evaluate(graph, indexer.scores, tokens, given).reshape(tokens, tokens).float()
        products = torch.einsum("qhd,kd->qhk", q, k).relu()
        want = (w[:, :, None] * products).sum(1)
        if bool((got[~causal] > _HIDDEN).any()):
            raise NotEvaluable("it sees later tokens")
        got, want = got[causal], want[causal]
        scale = float((got * want).sum() / (want * want).sum())
        if not scale > 0 or not torch.allclose(got, scale * want, rtol=1e-3, atol=1e-4 * scale):
            raise NotEvaluable("random numbers give other scores")


def _shaped(x: Tensor, like: fx.Node, tokens: int) -> Tensor:
    """x [T, ...] with its token dimension, and dimensions of 1, placed as in `like`."""
    sizes = [s if isinstance(s, int) else tokens for s in val(like).shape]
    place = _token_dim(like)
    return x.reshape([tokens, *sizes[:place], *sizes[place + 1 :]]).movedim(0, place)
