"""`find_attention`: attention that a model's own code spells out becomes the attention marker.

Only the two products and the softmax are matched by shape. What lies between them (scale, mask,
position bias) is not matched but measured: it is run on chosen scores, and must turn out to be a
scale, a softcap, a causal window and a slope per head, or the model is rejected. What comes after
the softmax must turn out to leave the weights of visible keys unchanged. In encoders,
tokens may also see the whole sequence; an encoder with any other attention keeps it and processes
one sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention, visible
from llmc.passes.base import Notes, graph_pass, writes
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    emit,
    is_call,
    replace,
    reshaped,
    swapped,
    through,
    val,
)
from llmc.passes.einsum import terms_of, to_matmul
from llmc.passes.evaluate import NotEvaluable, evaluate
from llmc.passes.inputs import CacheInput, ConstantInput, add_input, input_of

SOFTMAX = (aten.softmax.int, aten._softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
_AFTER = (
    aten.to.dtype,
    aten._to_copy.default,
    aten.dropout.default,
    aten.contiguous.default,
    aten.view.default,  # of one sequence: adds or drops the batch of 1
    aten.reshape.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
)
# These can hide keys once more, or replace what would be left of a row without visible keys.
_HIDING = (
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.mul.Tensor,
    aten.nan_to_num.default,
)
_HIDDEN = -9.9e3  # a bias below this hides a key; -1e4 in bfloat16 is -9984
_PROBE_TOKENS = 37
_MAX_PROBE = 4096
_MAX_SCORE = 300.0  # about the largest scaled score to measure with: a softcap of 50 shows there
_MAX_PRODUCT = 3e4  # fits in float16


Run = Callable[[Tensor, int, int], Tensor]  # scores, tokens, seed -> what enters the softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What is applied to the product of queries and keys before the softmax."""

    scale: float
    softcap: float  # 0: none
    window: int
    chunk: int
    slopes: Tensor | None  # [H]
    causal: bool = True


@graph_pass(required=True)
def find_attention(gm: fx.GraphModule, *, max_positions: int, encoder: bool = False) -> Notes:
    """Turn attention over one sequence, written out as matrix products, into the marker.

    `encoder`: tokens can see later ones, and attention that is not recognized is left unchanged.

    Before:
        p = aten.softmax(aten.matmul(q, k^T) * scale + mask + slopes * distance, -1)
            (or softcap * tanh(aten.matmul(q, k^T) * scale / softcap) + ...; or aten.einsum)
        o = aten.matmul(p, v)
    After:
        o = llmc.attention(q [1, H, T, D], k, v, key_cache, value_cache, scale, window, ...)
    """
    graph = gm.graph
    notes = []
    if spells_attention(gm):
        for quotient, scores in list(_spelled_softmax(graph)):
            with graph.inserting_before(quotient):
                replace(quotient, emit(graph, aten.softmax.int, scores, -1))
        _multiply_matrices(graph)
        _join_products(graph)
    for softmax in calls(graph, *SOFTMAX):
        if not is_scores(softmax):
            continue
        try:
            scoring = _find(graph, softmax, max_positions, encoder)
        except CompileError as e:
            if not encoder:
                raise
            notes.append(f"{softmax.name} not rewritten, so sequences run one at a time: {e}")
        else:
            notes.append(f"{softmax.name}: {_describe(scoring)}")
    return notes


def _find(graph: fx.Graph, softmax: fx.Node, max_positions: int, encoder: bool) -> Scoring:
    product = _product(softmax)
    if any(writes(user) for user in product.users):
        raise CompileError(f"{product.name} is written to in place, which is not supported")
    mixed = _mixed(softmax)
    scoring = _measure(graph, softmax, product, max_positions, encoder)
    _check_weights(graph, softmax, _left(mixed), max_positions, scoring)
    _replace(graph, product, mixed, scoring)
    return scoring


def _multiply_matrices(graph: fx.Graph) -> None:
    """Write products of queries and keys, and of weights and values, that are sums over indices
    (`einsum`) as products of matrices."""
    for node in calls(graph, aten.einsum.default):
        given, spelled = arguments(node).tensors, terms_of(node)
        left = [factor for factor in given if is_scores(factor)]
        if is_scores(node) and spelled is not None:  # the queries have the index of its rows
            terms, result = spelled
            left = [x for x, term in zip(given, terms, strict=True) if result[-2] in term]
        if len(left) == 1:
            to_matmul(graph, node, left[0])


def _join_products(graph: fx.Graph) -> None:
    """Write sums of products of queries and keys, as of their parts with and without positions, as
    one product of vectors that have both parts."""
    for total in list(calls(graph, aten.add.Tensor)):
        given = arguments(total)
        terms = [given.self, given.other]
        if total.kwargs.get("alpha", 1) != 1 or not all(
            _is_own_product(term, total) for term in terms
        ):
            continue
        queries, keys = [_left(term) for term in terms], [_right(term) for term in terms]
        with graph.inserting_before(total):
            query, key = _joined(graph, queries, -1), _joined(graph, keys, -2)
            if query is not None and key is not None:
                replace(total, emit(graph, aten.matmul.default, query, key))


def _is_own_product(term: Any, total: fx.Node) -> bool:
    """Whether it is a product of queries and keys that is only read by this sum."""
    return (
        isinstance(term, fx.Node)
        and is_call(term, aten.matmul.default)
        and is_scores(term)
        and list(term.users) == [total]
        and str(val(term).shape) == str(val(total).shape)
    )


def _joined(graph: fx.Graph, parts: list[Any], dim: int) -> fx.Node | None:
    """The parts [..., rows, columns] side by side along `dim`, those of one head for every head;
    None if their heads differ otherwise."""
    leading = [val(part).shape[:-2] for part in parts]
    if len({len(sizes) for sizes in leading}) > 1:
        return None
    common = []
    for sizes in zip(*leading, strict=True):
        several = {str(size): size for size in sizes if size != 1}
        if len(several) > 1:
            return None
        common.append(next(iter(several.values()), 1))
    made = []
    for part, sizes in zip(parts, leading, strict=True):
        if [str(size) for size in sizes] != [str(size) for size in common]:
            part = emit(graph, aten.expand.default, part, (*common, -1, -1))
        made.append(part)
    return emit(graph, aten.cat.default, made, dim)


def spells_attention(gm: fx.GraphModule) -> bool:
    """Whether a newly captured graph has attention that is spelled out."""
    found = (n for n in calls(gm.graph, *SOFTMAX) if is_scores(n))
    return next(found, None) is not None or next(_spelled_softmax(gm.graph), None) is not None


def _spelled_softmax(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any]]:
    """Scores' exponentials divided by their sum, and the scores. A number that is subtracted from
    a whole row before, as its maximum, changes nothing."""
    for quotient in calls(graph, aten.div.Tensor):
        power, total = arguments(quotient).self, arguments(quotient).other
        if not (is_call(power, aten.exp.default) and is_call(total, aten.sum.dim_IntList)):
            continue
        summed = arguments(total)
        if not is_scores(power) or summed.self is not power or not summed.keepdim:
            continue
        if [dim % val(power).dim() for dim in summed.dim] != [val(power).dim() - 1]:
            continue
        scores = arguments(power).self
        while is_call(scores, aten.sub.Tensor) and _is_of_rows(arguments(scores).other):
            scores = arguments(scores).self
        yield quotient, scores


def _is_of_rows(node: Any) -> bool:
    return isinstance(node, fx.Node) and val(node).dim() > 0 and val(node).shape[-1] == 1


def is_scores(node: fx.Node) -> bool:
    """Whether the last two dimensions are both the tokens, as in attention that is spelled out."""
    shape = val(node).shape
    return (
        len(shape) >= 3 and isinstance(shape[-1], torch.SymInt) and str(shape[-1]) == str(shape[-2])
    )


def _describe(s: Scoring) -> str:
    parts = [f"scale {s.scale:.4g}"]
    parts += [f"softcap {s.softcap:.4g}"] if s.softcap else []
    parts += [f"window {s.window}"] if s.window else []
    parts += [f"chunk {s.chunk}"] if s.chunk else []
    parts += ["a slope per head"] if s.slopes is not None else []
    parts += [] if s.causal else ["all tokens"]
    return ", ".join(parts)


def _product(softmax: fx.Node) -> fx.Node:
    """The product of queries and keys above a softmax."""
    found = []
    seen = set()
    stack = [arguments(softmax).self]
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if is_call(node, *_PRODUCTS) and is_scores(node):
            found.append(node)
        else:
            stack += node.all_input_nodes
    if len(found) != 1:
        raise CompileError(
            f"{softmax.name} looks like attention, but its scores come from {len(found)} products"
        )
    return found[0]


def _mixed(softmax: fx.Node) -> fx.Node:
    """The product of the weights and the values below a softmax."""
    node = softmax
    while True:
        users = list(node.users)
        if len(users) == 1 and is_call(users[0], *_AFTER, *_HIDING) and is_scores(users[0]):
            node = users[0]
        elif len(users) == 1 and is_call(users[0], *_PRODUCTS[:2]) and _left(users[0]) is node:
            return users[0]
        else:
            raise CompileError(
                f"{softmax.name} looks like attention, but its weights do not simply multiply "
                "the values, so it can't be paged"
            )


def _left(product: fx.Node) -> Any:
    """The first of the two factors of matmul or bmm."""
    return arguments(product).self


def _right(product: fx.Node) -> Any:
    given = arguments(product)
    return given.mat2 if hasattr(given, "mat2") else given.other


def _measure(
    graph: fx.Graph, softmax: fx.Node, product: fx.Node, max_positions: int, encoder: bool
) -> Scoring:
    """Run the code in between on chosen scores, and derive scale, softcap, window and slopes."""
    shape = [int(s) if isinstance(s, int) else -1 for s in val(product).shape]
    heads = math.prod(shape[:-2])

    def run(scores: Tensor, tokens: int, seed: int) -> Tensor:
        given = {product: _biased(product, scores)}
        out = evaluate(graph, arguments(softmax).self, tokens, given, seed)
        return out.float().reshape(-1, tokens, tokens)

    def full(tokens: int) -> list[int]:
        return [tokens if s == -1 else s for s in shape]

    try:
        n = _PROBE_TOKENS
        zero = run(torch.zeros(full(n)), n, 0)
        if not torch.equal(zero, run(torch.zeros(full(n)), n, 1)):
            raise NotEvaluable("the mask depends on the tokens")
        shown = zero > _HIDDEN
        scale, softcap = _scale(run, zero, shown.expand(heads, n, n), full(n))
        slopes = _slopes(zero.expand(heads, n, n), shown.expand(heads, n, n))
        tokens = max(n, min(max_positions, _MAX_PROBE))
        seen = _seen(run, full(tokens), tokens, slopes)
        causal = not (encoder and bool(seen.all()))
        window, chunk = _limits(seen[0]) if causal else (0, 0)
        if not bool((seen == seen[:1]).all()):
            raise NotEvaluable("heads see different keys")
        if not causal and not torch.equal(zero, zero[:, :, :1].expand_as(zero)):
            raise NotEvaluable("it has a bias, and later tokens are visible")
    except (NotEvaluable, RuntimeError, IndexError) as e:
        raise CompileError(
            f"{softmax.name} looks like attention, but its scores are modified by something other "
            "than a scale, a softcap, a causal window and a slope per head "
            f"({' '.join(str(e).split())[:200]})"
        ) from e
    return Scoring(
        scale=scale, softcap=softcap, window=window, chunk=chunk, slopes=slopes, causal=causal
    )


def _check_weights(
    graph: fx.Graph, softmax: fx.Node, weights: Any, max_positions: int, s: Scoring
) -> None:
    """Check that what the softmax gives, which is 0 for hidden keys, is what multiplies the values.
    Raises CompileError."""
    if through(weights, *_AFTER) is softmax:
        return
    tokens = max(_PROBE_TOKENS, min(max_positions, _MAX_PROBE))
    given = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(0))
    if s.causal:
        position = torch.arange(tokens)
        given = given * visible(position, position, s.window, s.chunk)
    given = given.to(val(softmax).dtype)
    shape = [size if isinstance(size, int) else tokens for size in val(softmax).shape]

    def run(shape: list[int]) -> Tensor:
        out = evaluate(graph, weights, tokens, {softmax: given.expand(shape)})
        return out.reshape(-1, tokens, tokens)

    try:
        found = _of_one_head(run, shape)
        if not bool((found == given.to(found.dtype)).all()):
            raise NotEvaluable("they change behind it")
    except (NotEvaluable, RuntimeError, IndexError) as e:
        raise CompileError(
            f"{softmax.name} looks like attention, but its weights do not simply multiply the "
            f"values, so it can't be paged ({' '.join(str(e).split())[:200]})"
        ) from e


def _scale(run: Run, zero: Tensor, shown: Tensor, shape: list[int]) -> tuple[float, float]:
    """The scale and the softcap, measured with scores of every size: small ones only show a scale.
    NotEvaluable for anything else."""
    n = shape[-1]

    def change(scores: Tensor) -> tuple[Tensor, Tensor]:
        """The visible scores, and how much each changes what enters the softmax."""
        return scores.reshape(-1, n, n)[shown], (run(scores, n, 0) - zero)[shown]

    gen = torch.Generator().manual_seed(0)
    scores = torch.randn(shape, generator=gen)
    small, from_small = change(scores)
    scale, softcap = _slope(small, from_small), 0.0
    most = _MAX_SCORE / max(abs(scale), 1e-6)
    sizes = most ** torch.rand(shape, generator=gen)
    wide, from_wide = change((scores * sizes).clamp(-_MAX_PRODUCT, _MAX_PRODUCT))
    if not torch.allclose(from_wide, scale * wide, rtol=1e-2, atol=1.0):
        softcap = float(from_wide.abs().max())
        inner = from_small.abs() < softcap / 2
        scale = _slope(small[inner], softcap * torch.atanh(from_small[inner] / softcap))
    for given, changed, error in ((small, from_small, 1e-2), (wide, from_wide, 1.0)):
        expected = scale * given
        if softcap:
            expected = softcap * torch.tanh(expected / softcap)
        if not torch.allclose(changed, expected, rtol=1e-2, atol=error):
            raise NotEvaluable("the scores are not only scaled, with or without a softcap")
    return scale, softcap


def _slope(given: Tensor, changed: Tensor) -> float:
    """The factor between them, by least squares."""
    return float((changed * given).sum() / (given * given).sum())


def _seen(run: Run, shape: list[int], tokens: int, slopes: Tensor | None) -> Tensor:
    """Which keys are visible. Without a bias per head, one head represents all."""

    def seen(shape: list[int]) -> Tensor:
        return run(torch.zeros(shape), tokens, 0) > _HIDDEN

    return seen(shape) if slopes is not None else _of_one_head(seen, shape)


def _of_one_head(run: Callable[[list[int]], Tensor], shape: list[int]) -> Tensor:
    """What `run` gives for the shape of one head, which keeps long masks small, or for all heads:
    the shapes in some models only work with these."""
    try:
        return run([*shape[:-3], 1, *shape[-2:]])
    except RuntimeError:
        return run(shape)


def _biased(product: fx.Node, scores: Tensor) -> Any:
    """The product's value for the scores q k^T: baddbmm scales them and adds its first argument."""
    if not is_call(product, aten.baddbmm.default):
        return scores
    beta, alpha = (float(product.kwargs.get(k, 1.0)) for k in ("beta", "alpha"))  # type: ignore[arg-type]
    if beta == 0:  # what is multiplied by it may be uninitialized memory
        return alpha * scores
    return lambda value: beta * value(arguments(product).self) + alpha * scores


def _slopes(bias: Tensor, shown: Tensor) -> Tensor | None:
    """[H, T, T] -> each head's slope of the bias over key position - query position."""
    tokens = bias.shape[1]
    own = bias.diagonal(dim1=1, dim2=2)[:, :, None]
    relative = bias - own  # adding a number to a whole row changes no softmax
    position = torch.arange(tokens)
    distance = (position[None, :] - position[:, None]).float()
    if not shown.diagonal(dim1=1, dim2=2).all():
        raise NotEvaluable("a token does not see itself")
    inside = shown & (distance < 0)
    slopes = torch.stack(
        [
            (r[i] / distance[i]).median() if i.any() else r.new_zeros(())
            for r, i in zip(relative, inside, strict=True)
        ]
    )
    expected = slopes[:, None, None] * distance
    if not torch.allclose(relative[inside], expected[inside], rtol=2e-2, atol=1e-3):
        raise NotEvaluable("the bias is not linear in the distance")
    return None if bool((slopes == 0).all()) else slopes


def _limits(seen: Tensor) -> tuple[int, int]:
    """[T, T] bool -> (window, chunk), 0 for none. Raises NotEvaluable for any other mask."""
    tokens = seen.shape[0]
    position = torch.arange(tokens)
    window = int(seen[-1].sum())
    later = (~seen[:, 0]).nonzero()[:, 0]
    chunk = int(later[0]) if len(later) else 0
    for limits in ((0, 0), (window, 0), (0, chunk)):
        if torch.equal(visible(position, position, *limits), seen):
            return limits
    raise NotEvaluable("the mask is neither causal, nor a window, nor chunks")


def _replace(graph: fx.Graph, product: fx.Node, mixed: fx.Node, s: Scoring) -> None:
    query = arguments(product).batch1 if is_call(product, aten.baddbmm.default) else _left(product)
    key = arguments(product).batch2 if is_call(product, aten.baddbmm.default) else _right(product)
    value = _right(mixed)
    key_cache, value_cache = _caches(graph, val(mixed))
    slopes = None
    if s.slopes is not None:
        fake = val(mixed).new_empty(s.slopes.shape, dtype=torch.float32)
        slopes = add_input(graph, "slopes", ConstantInput(tensor=s.slopes.contiguous()), fake)
    with graph.inserting_before(mixed):
        groups = val(query).shape[1]
        q, columns, v = (_four(graph, x, groups) for x in (query, key, value))
        k = emit(graph, aten.transpose.int, columns, 2, 3)
        out = emit(
            graph,
            attention.overload,
            query=q,
            key=k,
            value=v,
            key_cache=key_cache,
            value_cache=value_cache,
            scale=s.scale,
            window=s.window,
            chunk=s.chunk,
            softcap=s.softcap,
            sinks=None,
            slopes=slopes,
            causal=s.causal,
        )
        heads_first = reshaped(graph, emit(graph, aten.transpose.int, out, 1, 2), val(mixed).shape)
        if val(heads_first).dtype != val(mixed).dtype:  # scores in float32, values in 16 bits
            heads_first = emit(graph, aten.to.dtype, heads_first, val(mixed).dtype)
    _prove(graph, mixed, heads_first, (query, key, value))
    replace(mixed, heads_first)
    rows = swapped(columns, 2, 3)  # before the model transposed them
    if rows is not None:
        replace(k, rows)


def _prove(graph: fx.Graph, old: fx.Node, new: fx.Node, inputs: tuple[Any, ...]) -> None:
    """Check that both give the same result for random queries, keys and values: measuring alone
    does not prove that."""
    gen = torch.Generator().manual_seed(1)

    def random(node: fx.Node) -> Tensor:
        shape = [s if isinstance(s, int) else _PROBE_TOKENS for s in val(node).shape]
        return torch.randn(shape, generator=gen).to(val(node).dtype)

    given: dict[fx.Node, Any] = {node: random(node) for node in inputs}
    want = evaluate(graph, old, _PROBE_TOKENS, given)
    empty = {n: torch.empty(0) for n in graph.nodes if isinstance(input_of(n), CacheInput)}
    got = evaluate(graph, new, _PROBE_TOKENS, given | empty)
    if not torch.allclose(got.float(), want.float(), rtol=2e-2, atol=2e-2):
        raise CompileError(f"{old.name} looks like attention, but does not compute the same")


def _four(graph: fx.Graph, node: Any, groups: Any) -> fx.Node:
    """[H, T, D] -> [1, H, T, D], and [1, G, H, T, D] for G groups of heads -> [1, G * H, T, D]"""
    if val(node).dim() == 5 and val(node).shape[1] != groups:  # all groups share these heads
        node = emit(graph, aten.expand.default, node, (-1, groups, -1, -1, -1))
    shape = val(node).shape
    if len(shape) == 3:
        return emit(graph, aten.unsqueeze.default, node, 0)
    if len(shape) == 5 and shape[0] == 1:
        return reshaped(graph, node, (1, shape[1] * shape[2], *shape[3:]))
    if len(shape) != 4:
        raise CompileError(
            f"{node.name} has {len(shape)} dimensions, so its attention can't be paged"
        )
    return node  # type: ignore[no-any-return]


def _caches(graph: fx.Graph, like: Tensor) -> tuple[fx.Node, fx.Node]:
    roles = [input_of(n) for n in graph.nodes if n.op == "placeholder"]
    layer = 1 + max((r.layer for r in roles if isinstance(r, CacheInput)), default=-1)
    empty = like.new_empty(0)
    return (
        add_input(graph, f"key_cache_{layer}", CacheInput(layer=layer, part="key"), empty),
        add_input(graph, f"value_cache_{layer}", CacheInput(layer=layer, part="value"), empty),
    )
