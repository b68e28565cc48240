"""A sum over one index of two tensors, `aten.einsum`, as a product of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from torch import fx

from llmc.passes.edit import arguments, aten, emit, replace, val


def terms_of(node: fx.Node) -> tuple[list[str], str] | None:
    """The indices of each tensor and of the result of an einsum; those of an ellipsis, which all
    tensors must then have, get letters of their own. None for an implicit result."""
    given = arguments(node)
    terms, arrow, result = "".join(given.equation.split()).partition("->")
    if not arrow:
        return None
    names = terms.split(",")
    letters = (name.replace("...", "") for name in names)
    rest = {val(x).dim() - len(own) for x, own in zip(given.tensors, letters, strict=True)}
    if len(rest) == 1:  # the dimensions of an ellipsis, if there is one
        unused = [c for c in ascii_letters if c not in given.equation]
        spelled = "".join(unused[: rest.pop()])
        names = [name.replace("...", spelled) for name in names]
        result = result.replace("...", spelled)
    return names, result


def to_matmul(graph: fx.Graph, node: fx.Node, left: fx.Node) -> bool:
    """Replace an einsum of two tensors by aten.matmul, whose first factor is `left`, transposed.

    False, and nothing is changed, unless it sums over one index, and each factor has one that the
    other does not have: `bqhd,bkhd->bhqk`. The indices of both, such as b and h, come first. The
    left factor may have more indices of a fixed size, as of the heads that share a key: they come
    next, and the other factor has a size of 1 there."""
    factors, spelled = list(arguments(node).tensors), terms_of(node)
    if spelled is None or len(factors) != 2 or left not in factors:
        return False
    names, result = spelled
    if factors[0] is not left:
        factors.reverse()
        names.reverse()
    first, second = names
    if not all(term.isalpha() and len(set(term)) == len(term) for term in (*names, result)):
        return False
    both = [i for i in result if i in first and i in second]
    rows = [i for i in first if i not in second]
    columns = [i for i in second if i not in first]
    summed = [i for i in first if i in second and i not in result]
    sizes = dict(zip(first, val(factors[0]).shape, strict=True))
    shared = [i for i in rows if isinstance(sizes[i], int)] if len(rows) > 1 else []
    rows = [i for i in rows if i not in shared]
    if {len(rows), len(columns), len(summed)} != {1} or {*rows, *columns, *shared} - set(result):
        return False
    with graph.inserting_before(node):
        one = _ordered(graph, factors[0], first, [*both, *shared, *rows, *summed])
        other = _ordered(graph, factors[1], second, [*both, *summed, *columns])
        for _ in shared:
            other = emit(graph, aten.unsqueeze.default, other, len(both))
        made = emit(graph, aten.matmul.default, one, other)
        made = _ordered(graph, made, [*both, *shared, *rows, *columns], result)
    replace(node, made)
    return True


def _ordered(graph: fx.Graph, node: Any, have: Sequence[str], want: Sequence[str]) -> fx.Node:
    if list(have) == list(want):
        return node  # type: ignore[no-any-return]
    return emit(graph, aten.permute.default, node, [have.index(i) for i in want])
