"""Experts that a model's own code has one by one, in parameters that stack them.

Checkpoints have them one by one too, so each such module has rules for what its parameters are made
of, like those of transformers for its own models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class StackedExperts(nn.Module):
    """Takes the place of a list of equal experts. `parts`: by the name of each parameter, those of
    an expert that are joined in it."""

    def __init__(self, experts: nn.ModuleList, parts: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.channels: dict[str, int] = {}  # of each part
        for name, own in parts.items():
            joined: list[Tensor] = [experts[0].get_parameter(part) for part in own]
            self.channels |= {n: len(p) if p.dim() else 1 for n, p in zip(own, joined, strict=True)}
            one = torch.cat(joined) if len(joined) > 1 else joined[0]
            stack = one.new_empty(len(experts), *one.shape)
            self.register_parameter(name, nn.Parameter(stack, requires_grad=False))

    def forward(self, *args: Any) -> Tensor:
        raise AssertionError("the block computes its experts itself")


def stacked_experts(module: nn.Module) -> dict[str, StackedExperts]:
    return {n: m for n, m in module.named_modules() if isinstance(m, StackedExperts)}


def linears_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter that stacks linears, their names in one expert, with {} for its number."""
    return {
        f"{path}.{name}": tuple(f"{path}.{{}}.{part.removesuffix('.weight')}" for part in own)
        for path, experts in stacked_experts(module).items()
        for name, own in experts.parts.items()
        if experts.get_parameter(name).dim() == 3 and all(p.endswith(".weight") for p in own)
    }


def parts_of(module: nn.Module) -> dict[str, list[dict[str, int]]]:
    """For each stack, the number of channels of each part of every expert, by name."""
    return {
        f"{path}.{name}": [
            {f"{path}.{i}.{part}": experts.channels[part] for part in own}
            for i in range(experts.get_parameter(name).shape[0])
        ]
        for path, experts in stacked_experts(module).items()
        for name, own in experts.parts.items()
    }


def rules_of(module: nn.Module) -> list[Any]:
    """transformers' WeightConverters for all StackedExperts of a model."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    rules: dict[tuple[str, ...], Any] = {}
    for path, experts in stacked_experts(module).items():
        name_of_list = path.rpartition(".")[2]
        for name, own in experts.parts.items():
            parts = [part.replace(".", r"\.") for part in own]
            sources = tuple(rf"\.{name_of_list}\.\d+\.{part}" for part in parts)
            steps: list[Any] = [MergeModulelist(dim=0)]
            if len(own) > 1:
                steps.append(Concatenate(dim=1))
            if sources not in rules:
                rules[sources] = WeightConverter(
                    source_patterns=list(sources),
                    target_patterns=f".{name_of_list}.{name}",
                    operations=steps,
                )
    return list(rules.values())
