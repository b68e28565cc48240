"""`find_linear_attention`: linear attention that a model computes block by block becomes a scan.

Only the frame of the loop is matched by shape: blocks of three sequences go in, and the results are
concatenated. The code in between (and how state is carried from block to block) is not matched but
measured, and proved on random numbers. After this pass it no longer matters for how many tokens the
loop was unrolled, so capture compares its graphs after this pass too.
"""

from __future__ import annotations

import math
import operator
from itertools import permutations

import torch
from torch import Tensor, fx

from llmc.kernels.selective_scan import selective_scan
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, replace, update_below, val
from llmc.passes.evaluate import NotEvaluable, evaluate, token_counts
from llmc.passes.find_indexers import num_tokens
from llmc.passes.inputs import ConstantInput, add_constant, input_of

_TOKENS = 2  # the dimension of tokens in [1, H, T, D]
_VIEWS = (
    operator.getitem,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
)
_LEAST = 1e-30  # a response below this is too small to derive a decay from
_TOLERANCE = 1e-5  # for numbers that are computed in float64 from tables in float32


@graph_pass(required=True)
def find_linear_attention(gm: fx.GraphModule) -> Notes:
    """Turn linear attention with a decay per head, in a loop over blocks of B tokens, into a scan.

    Before:
        q1 [1, H, B, D] = aten.slice(q [1, H, T, D], 2, 0, B), and so on;  s = 0
        o1 = (q1 k1^T * decays within the block) v1 + (q1 * decays since the block before) s
        s = s * decay of a block + (k1 * decays to the block's end)^T v1
        o [1, H, T, Dv] = aten.cat([o1, o2, ...], 2)
    After:
        o^T [T, H, Dv] = llmc.selective_scan(v [T, H, Dv], ones [T, H], log of decays [H, 1],
                                             k [T, H, D], q [T, H, D], None, ...)
    """
    graph = gm.graph
    notes = []
    for joined in calls(graph, aten.cat.default):
        sequences = _sequences(joined)
        if len(sequences) != 3:
            continue
        try:
            (query, key, value), decay = _measure(graph, joined, sequences)
        except (NotEvaluable, RuntimeError) as e:
            notes.append(f"{joined.name}: not linear attention: {' '.join(str(e).split())[:200]}")
        else:
            _replace(graph, joined, query, key, value, decay)
            notes.append(f"{joined.name}: {len(decay)} heads")
    return notes


def same_decays(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether the decays per token are the same in two graphs that otherwise agree."""
    pairs = zip(_decays(one), _decays(other), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in pairs)


def _decays(graph: fx.Graph) -> list[Tensor]:
    roles = (input_of(arguments(scan).a) for scan in calls(graph, selective_scan.overload))
    return [role.tensor for role in roles if isinstance(role, ConstantInput)]


def _sequences(joined: fx.Node) -> list[fx.Node]:
    """The sequences [1, H, T, D] whose blocks the joined ones are computed from, in order of use;
    [] for other concatenations."""
    given = arguments(joined)
    if val(joined).dim() != 4 or given.dim not in (_TOKENS, _TOKENS - 4):
        return []
    found: dict[fx.Node, None] = {}
    seen, stack = set(), [joined]
    while stack:
        node = stack.pop()
        if node in seen or not isinstance(node.meta.get("val"), Tensor):  # sizes are known
            continue
        seen.add(node)
        source = _sequence(node)
        if source is None:
            stack += reversed(node.all_input_nodes)
        else:
            found[source] = None
    return list(found)


def _sequence(node: fx.Node) -> fx.Node | None:
    """The sequence that a block is sliced from, or the node itself if it is a whole sequence: a
    single block does not need a slice."""
    if is_call(node, aten.slice.Tensor):
        given = arguments(node)
        is_cut = given.dim in (_TOKENS, _TOKENS - 4) and given.step == 1
        return given.self if is_cut and _is_sequence(given.self) else None
    is_whole = node.op == "placeholder" or is_call(node, *_VIEWS)
    return node if is_whole and _is_sequence(node) else None


def _is_sequence(node: fx.Node) -> bool:
    shape = [str(s) for s in val(node).shape]
    return len(shape) == 4 and shape[0] == "1" and shape[_TOKENS] == str(num_tokens(node))


def _measure(
    graph: fx.Graph, joined: fx.Node, sequences: list[fx.Node]
) -> tuple[tuple[fx.Node, fx.Node, fx.Node], Tensor]:
    """Which of the sequences are queries, keys and values, and the logarithm of each head's decay
    per token [H]. Raises NotEvaluable if random numbers do not give the corresponding result."""
    # the loop is unrolled for this many tokens, or any number that fills as many blocks
    tokens = int(num_tokens(joined).node.hint)
    reason = NotEvaluable("there is only one token")
    for query, key, value in permutations(sequences) if tokens > 1 else ():
        nodes = (query, key, value)
        try:
            decay = _decay(graph, joined, nodes, tokens)
            _prove(graph, joined, nodes, decay, tokens)
        except NotEvaluable as e:
            reason = e
        else:
            return (query, key, value), decay.float()
    raise reason


def _decay(graph: fx.Graph, joined: fx.Node, nodes: tuple[fx.Node, ...], tokens: int) -> Tensor:
    """Each head's log decay per token: what remains at the last token of a 1 at the first."""
    given = [torch.zeros(_shape(n, tokens), dtype=torch.float64) for n in nodes]
    given[0][..., 0] = 1
    for seen in given[1:]:
        seen[:, :, 0, 0] = 1
    left = _run(graph, joined, nodes, given, tokens)[0, :, :, 0]  # [H, T]
    if not bool(((left[:, 0] - 1).abs() < _TOLERANCE).all()):
        raise NotEvaluable("a token's own value is scaled")
    last, next_one = left[:, -1].clamp(min=0), left[:, 1].clamp(min=0)
    decay = torch.where(last > _LEAST, last.log() / (tokens - 1), next_one.log())
    if not bool(decay.isfinite().all()):
        raise NotEvaluable("the first token is forgotten at once")
    return decay


def _prove(
    graph: fx.Graph, joined: fx.Node, nodes: tuple[fx.Node, ...], decay: Tensor, tokens: int
) -> None:
    gen = torch.Generator().manual_seed(0)
    given = [torch.randn(_shape(n, tokens), generator=gen, dtype=torch.float64) for n in nodes]
    got = _run(graph, joined, nodes, given, tokens)[0]
    q, k, v = (x[0] for x in given)
    if got.shape != (*q.shape[:2], v.shape[2]) or q.shape != k.shape:
        raise NotEvaluable(f"its result has shape {list(got.shape)}")
    position = torch.arange(tokens)
    distance = (position[:, None] - position[None, :]).double()
    for h, rate in enumerate(decay):
        kept = torch.exp(rate * distance.clamp(min=0)).tril()
        want = (q[h] @ k[h].T * kept) @ v[h]
        if not bool(((got[h] - want).abs() <= _TOLERANCE * want.abs().max()).all()):
            raise NotEvaluable("random numbers give another result")


def _shape(node: fx.Node, tokens: int) -> list[int]:
    return [n if isinstance(n, int) else tokens for n in val(node).shape]


def _run(
    graph: fx.Graph, joined: fx.Node, nodes: tuple[fx.Node, ...], given: list[Tensor], tokens: int
) -> Tensor:
    known = {**dict(zip(nodes, given, strict=True)), **token_counts(graph, tokens)}
    return evaluate(graph, joined, tokens, known, exact=True)


def _replace(
    graph: fx.Graph, joined: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, decay: Tensor
) -> None:
    rate = add_constant(graph, "decay", decay[:, None].contiguous(), joined)
    with graph.inserting_before(joined):
        q, k, v = (_tokens_first(graph, n) for n in (query, key, value))
        ones = emit(graph, aten.ones_like.default, emit(graph, aten.select.int, v, 2, 0))
        ones = emit(graph, aten.to.dtype, ones, torch.float32)
        out = emit(
            graph, selective_scan.overload,
            v, ones, rate, k, q, *[None] * 3, False, -math.inf, math.inf, val(v).dtype, *[None] * 4,
        )  # fmt: skip
        out = emit(graph, aten.unsqueeze.default, emit(graph, aten.transpose.int, out, 0, 1), 0)
    replace(joined, out)
    update_below(out)  # the sizes of concatenated blocks were sums


def _tokens_first(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[1, H, T, D] -> [T, H, D]"""
    return emit(graph, aten.transpose.int, emit(graph, aten.squeeze.dim, node, 0), 0, 1)
