"""Checks whether a captured graph is valid for every number of tokens.

Capture keeps no guards, so if the model's Python code depends on the number of tokens (a branch, a
loop over blocks), the graph would silently contain only one of the outcomes. Such dependences are
recorded as guards on the symbolic size. Sizes that violate a guard are captured too, and must give
the same graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from llmc.passes.inputs import ConstantInput

# Primes: torch specializes on a number of tokens that fills a model's blocks.
_SIZES = (2, 3, 7, 67, 151, 1009, 5003, 40009, 300007)
_MOST = 1 << 24  # no context is longer, whatever a config says
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")


def sizes_in_doubt(graph: fx.Graph, config: Any) -> tuple[int, ...]:
    """Numbers of tokens for which the model's code may have behaved differently.

    A single sequence never exceeds the model's context. Only packed sequences do, which run the
    same code as a sequence that fits. The longest size is close to the context, since a threshold
    can be anywhere below it.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    context = next(
        (n for c in _CONTEXT if isinstance(n := getattr(text, c, None), int)), _SIZES[-1]
    )
    mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes])
    guards = [guard.expr for guard in mode.shape_env.guards] if mode and mode.shape_env else []
    sizes = sorted({*_SIZES, _largest_prime(min(context, _MOST))})
    return tuple(
        size for size in sizes if size <= context and any(_is_broken(expr, size) for expr in guards)
    )


def _largest_prime(most: int) -> int:
    """The largest prime up to `most`, or 2."""
    primes = (n for n in range(most, 2, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return next(primes, 2)


def _is_broken(expr: Any, size: int) -> bool:
    """Whether a guard, a sympy expression, fails for this size. All symbols are the token count."""
    return bool(expr.subs(dict.fromkeys(expr.free_symbols, size)) == False)  # noqa: E712


def same_code(one: fx.Graph, other: fx.Graph, tokens: int) -> bool:
    """Whether two graphs make the same calls for this number of tokens."""
    return text_of(one, tokens) == text_of(other, tokens)


def text_of(graph: fx.Graph, tokens: int) -> Sequence[str]:
    """Text that is equal for graphs that compute the same for this number of tokens.

    Sizes are written as numbers. Slices of everything and padding by nothing are left out, because
    torch may specialize on the number of tokens (if a slice has one element), and models pad only
    if there is something to pad; neither affects the result.
    """
    sizes = {n: _at(n.meta["val"], tokens) for n in graph.nodes if _is_size(n.meta.get("val"))}
    names = {n: str(v) for n, v in sizes.items()}
    kept: list[fx.Node] = []
    for node in graph.nodes:
        if _changes_nothing(node, tokens):
            names[node] = names[node.args[0]]
        elif node not in sizes:
            names[node] = f"%{len(kept)}"
            kept.append(node)
    lines = []
    for node in kept:
        given = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(names[n]))
        role = node.meta.get("input")
        named = type(role).__name__ if isinstance(role, ConstantInput) else role
        target = named if node.op == "placeholder" else node.target
        lines.append(f"{node.op} {target} {given}")
    return lines


def _changes_nothing(node: fx.Node, tokens: int) -> bool:
    """Whether it is one of the ops that do nothing if the shape stays the same."""
    aten = torch.ops.aten
    targets = (
        aten.slice.Tensor,
        aten.alias.default,
        aten.pad.default,
        aten.constant_pad_nd.default,
    )
    if node.op != "call_function" or node.target not in targets:
        return False
    before, after = (
        [_at(n, tokens) for n in x.meta["val"].shape]
        for x in (node.args[0], node)
        if isinstance(x, fx.Node)
    )
    return before == after


class _Name(str):
    """A string whose repr has no quotes, like a number among the arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _at(value: Any, tokens: int) -> Any:
    expr = getattr(getattr(value, "node", None), "expr", None)
    if expr is None:
        return value
    return expr.subs(dict.fromkeys(expr.free_symbols, tokens))
