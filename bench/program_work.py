"""The calls of a model's program that can ask for launch options, with random arguments.

The program is the one for a GPU. As by `llmc inspect`, it is made from the config alone, without
weights. So these are the calls that the engine makes, whatever the model; each runs with several
numbers of tokens, and its weights rotate through more memory than any cache can hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from bench.kernel_work import InTurn, Maker, Work, fast, make_pages
from bench.linear_work import cold_copies, picked_experts
from llmc.config import EngineConfig
from llmc.inspect.inspect import inspect_model
from llmc.kernels.expert_linear import expert_linear, sort_experts
from llmc.kernels.fused_linear import add_linear, fused_linear, norm_add_linear
from llmc.kernels.fused_quantized_linear import (
    fused_quantized_linear,
    norm_add_quantized_linear,
)
from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import quantized_linear
from llmc.kernels.registry import Op
from llmc.kernels.rope_attention import rope_attention
from llmc.kernels.rope_latent_attention import rope_latent_attention
from llmc.kernels.route import route
from llmc.kernels.sum_expert_linear import sum_expert_linear, sum_quantized_expert_linear
from llmc.passes.edit import arguments, aten, is_call, val

_PRODUCTS = (
    fused_linear, norm_add_linear, quantized_linear, fused_quantized_linear,
    norm_add_quantized_linear, route, expert_linear, quantized_expert_linear, sum_expert_linear,
    sum_quantized_expert_linear,
)  # fmt: skip
_ATTENTION = (paged_attention, rope_attention, latent_attention, rope_latent_attention)
_OPS: Mapping[Any, Op] = {op.overload: op for op in (*_PRODUCTS, *_ATTENTION)}
_OPTIONAL = (
    "bias", "norm_weight", "gate", "residual", "zero", "minimum", "sinks", "slopes", "k_scale",
    "distance_bias", "correction",
)  # fmt: skip
_PLACED = ("query_start", "context_len", "block_table", "positions", "slot_mapping")
_FEW = (32, 64)  # queries of a head group and request, as with draft tokens and short prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The steps whose kernels are called: products of so many tokens, attention of one token over
    such contexts, and to a prompt."""

    tokens: tuple[int, ...] = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    contexts: tuple[tuple[int, ...], ...] = ((4096,) * 64, (1024,))
    prompt: int = 2048

    def steps(self, group: int) -> Iterator[list[tuple[int, int]]]:
        """New tokens and context of each request, for `group` query heads per head of keys."""
        for contexts in self.contexts:
            yield [(1, context) for context in contexts]
        for queries in _FEW:
            new = max(1, queries // group)
            yield [(new, max(new, context)) for context in self.contexts[0][:8]]
        yield [(self.prompt, self.prompt)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call of the program. `given`: the op's arguments by name, tensors without memory."""

    op: Op
    given: Mapping[str, Any]

    def __str__(self) -> str:
        """Differs for calls that differ."""
        return json.dumps({self.op.name: self.given}, default=_described)


def program_work(
    configs: Iterable[EngineConfig], device: torch.device, sizes: Sizes
) -> Iterator[Maker]:
    """The work of the programs; equal calls are made once."""
    calls: dict[str, _Call] = {}
    for config in configs:
        for node in inspect_model(config).stages[-1].graph.graph.nodes:
            if (call := _call(node)) is not None:
                calls[str(call)] = call
    for call in calls.values():
        if call.op in _PRODUCTS:
            yield partial(_products, call, sizes.tokens, device)
            continue
        group = call.given["query"].shape[1] // call.given["key_cache"].shape[1]
        for step in sizes.steps(group):
            yield partial(_attention, call, step, device)


def _call(node: fx.Node) -> _Call | None:
    given = {} if node.op != "call_function" else vars(arguments(node))
    given = {name: val(v) if isinstance(v, fx.Node) else v for name, v in given.items()}
    if is_call(node, aten.linear.default):  # which `lower_kernels` replaces
        return _Call(op=fused_linear, given=_plain(**given))
    if is_call(node, add_linear.overload):  # adds in place: it can't be repeated
        return _Call(op=fused_linear, given={"residual": given.pop("out"), **given})
    if not is_call(node, *_OPS) or given.get("chosen") is not None:
        return None
    return _Call(op=_OPS[node.target], given=given)


def _plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Any]:
    none = dict.fromkeys(("norm_weight", "eps", "act", "residual"))
    return {"x": input, "weight": weight, "bias": bias, "offset": 0.0, **none}


def _products(call: _Call, counts: tuple[int, ...], device: torch.device) -> Iterator[Work]:
    tensors = {name: value for name, value in call.given.items() if isinstance(value, Tensor)}
    weights = {n for n, value in tensors.items() if not _is_per_token(value)} - {"x", "offsets"}

    def made() -> dict[str, Tensor]:
        return {name: _filled(name, tensors[name], tensors[name].shape, device) for name in weights}

    copies = cold_copies(made)
    for tokens in counts:
        given = dict(call.given)
        for name in tensors.keys() - weights - {"expert", "order", "offsets"}:
            value = tensors[name]
            few = [tokens, value.shape[-1]]  # the output head's rows, which are chosen before
            shape = _shape(value, tokens) if _is_per_token(value) else few
            given[name] = _filled(name, value, shape, device)
        if (expert := tensors.get("expert")) is not None:
            experts, top_k = tensors["weight"].shape[0], _shape(expert, 1)[0]
            given["expert"] = picked_experts(tokens, experts, top_k, device)
            given["order"], given["offsets"] = sort_experts.reference(given["expert"], experts)
        runs = [fast(call.op.name, _positional(call.op, {**given, **own})) for own in copies]
        case = f"{tokens} tokens, {_case(call)}"
        yield Work(op=call.op.name, case=case, run=InTurn(runs), device=device)


def _attention(call: _Call, step: list[tuple[int, int]], device: torch.device) -> Work:
    given = dict(call.given)
    pages = make_pages(step, given["key_cache"].shape[2], device)
    tokens, longest = int(pages.query_start[-1]), max(context for _, context in step)
    for name, value in given.items():
        if isinstance(value, Tensor):
            shape = _shape(value, tokens)
            if name in ("key_cache", "value_cache"):
                shape[0] = pages.num_blocks
            elif name in ("cos_table", "sin_table"):
                shape[0] = longest
            given[name] = _filled(name, value, shape, device)
    given |= {name: getattr(pages, name) for name in _PLACED if name in given}
    given["prompts"] = None  # which another kernel would compute
    new, count = step[0][0], len(step)
    return Work(
        op=call.op.name,
        case=f"{new} tokens for each of {count} x {longest}, {_case(call)}",
        run=fast(call.op.name, _positional(call.op, given)),
        device=device,
    )


def _positional(op: Op, given: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(op.bind((), given).values())


def _is_per_token(value: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in value.shape)


def _shape(value: Tensor, tokens: int) -> list[int]:
    return [_size(size, tokens) for size in value.shape]


def _size(size: int | torch.SymInt, tokens: int) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))


def _filled(name: str, like: Tensor, shape: Any, device: torch.device) -> Tensor:
    """A random tensor. Codes of weights are any, and scales such that the products are small."""
    if like.dtype.is_floating_point:
        wide = torch.bfloat16 if like.dtype.itemsize == 1 else like.dtype
        drawn = torch.randn(*shape, dtype=wide, device=device)
        if name == "scale":
            drawn = drawn.abs() / 64
        elif like.dim() >= 2 and name in ("weight", "router") and like.dtype.itemsize > 1:
            drawn *= max(shape[-2:]) ** -0.5
        return drawn.to(like.dtype)
    if name == "scale":  # exponents, or pairs of bytes that make up float16 and int8
        value = 120 if like.dtype == torch.uint8 else 0x1414
        return torch.full(tuple(shape), value, dtype=like.dtype, device=device)
    if name in ("weight", "zero"):
        most = 16 if name == "zero" else 256
        drawn = torch.randint(0, most, tuple(shape), dtype=torch.uint8, device=device)
        return drawn.view(like.dtype)
    return torch.zeros(*shape, dtype=like.dtype, device=device)


def _case(call: _Call) -> str:
    """The weight or the cache, and what differs from the simplest call."""
    given, defaults = call.given, call.op.defaults
    of = given.get("weight", given.get("router", given.get("key_cache")))
    sizes = f"{' x '.join(str(size) for size in of.shape)} {str(of.dtype)[6:]}"
    tensors = [name for name in _OPTIONAL if isinstance(given.get(name), Tensor)]
    others = [
        f"{name} {value}" for name, value in given.items()
        if isinstance(value, int | str) and value and value != defaults[name]
    ]  # fmt: skip
    return ", ".join([sizes, *tensors, *others])


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)
