"""Rules for experts that are stored one by one, named after the parameters that stack them.

transformers has such rules for the names in models' own checkpoints. Quantizers that split stacked
experts into linears name them after the parameters instead: `gate_up_proj` becomes
`experts.<number>.gate_proj` and `.up_proj`, whatever the model's own checkpoint calls them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# The linears of each parameter, in the order of their channels.
_LINEARS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def separate_experts(module: nn.Module) -> list[Any]:
    """transformers' WeightConverters for the stacked experts of a model."""
    rules: dict[tuple[str, str], Any] = {}
    for path, experts in module.named_modules():
        shapes = {name: tuple(p.shape) for name, p in experts.named_parameters(recurse=False)}
        first = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
        if not all(len(shapes.get(name, ())) == 3 for name in (first, "down_proj")):
            continue
        is_transposed = _is_transposed(shapes[first], shapes["down_proj"], len(_LINEARS[first]))
        mixes = not getattr(experts, "is_concatenated", True)
        for name in (first, "down_proj"):
            for suffix, is_bias in (("", False), ("_bias", True)):
                key = path.rpartition(".")[2], name + suffix
                if key[1] in shapes and key not in rules:
                    rules[key] = _rule(*key, is_transposed=is_transposed, mixes=mixes, bias=is_bias)
    return list(rules.values())


def _is_transposed(first: tuple[int, ...], down: tuple[int, ...], num_linears: int) -> bool:
    """Whether the inputs come first. Both parameters have the experts' inner channels."""
    return first[2] == num_linears * down[1] and first[1] != num_linears * down[2]


def _rule(experts: str, parameter: str, *, is_transposed: bool, mixes: bool, bias: bool) -> Any:
    """`mixes`: the channels of gate and up alternate."""
    from transformers.core_model_loading import (
        Concatenate,
        ConversionOps,
        Interleave,
        MergeModulelist,
        Transpose,
        WeightConverter,
    )

    linears = _LINEARS[parameter.removesuffix("_bias")]
    steps: list[ConversionOps] = [MergeModulelist(dim=0)]
    if len(linears) > 1:
        steps.append(Concatenate(dim=1))
        if mixes:
            steps.append(Interleave(dim=1, inverse=True))
    if is_transposed and not bias:
        steps.append(Transpose(dim0=1, dim1=2))
    kind = "bias" if bias else "weight"
    return WeightConverter(
        source_patterns=[rf"\.{experts}\.\d+\.{linear}\.{kind}" for linear in linears],
        target_patterns=f".{experts}.{parameter}",
        operations=steps,
    )
