"""Describes a module's parameters without keeping the module: names, shapes, ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from llmc.weights.stacked_experts import linears_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """`aliases` lists all names of a parameter that has several (tied embeddings).

    `is_plain`: transformers has no rule that changes a tensor of this architecture on loading, so
    a checkpoint that has all the names has all the parameters. `tables`: the mean of each buffer
    that is computed from the config, although a checkpoint may contain it.

    `experts`: for a parameter that stacks routed experts, the names of one expert's modules in
    checkpoints that store experts separately, in the order of their channels. {} is the number of
    the expert. `former_names`: for modules that transformers renames on loading, their present name
    by the one in checkpoints.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    is_plain: bool
    tables: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    former_names: Mapping[str, str] = field(default_factory=dict)


def describe_parameters(
    module: nn.Module, computed: Mapping[str, Tensor] | None = None
) -> Parameters:
    """Describe a module's parameters. `computed`: buffers by name that are not read from a
    checkpoint. It is omitted when the module is about to be filled, for which `tables`, `experts`
    and `former_names` are not needed."""
    state = module.state_dict()
    return Parameters(
        shapes={name: tuple(p.shape) for name, p in state.items()},
        aliases=_aliases(module),
        is_plain=not _has_converters(module),
        tables={n: mean_of(t) for n, t in (computed or {}).items() if n in state},
        experts={} if computed is None else _experts(module),
        former_names={} if computed is None else _former_names(module),
    )


def mean_of(table: Tensor) -> float:
    return float(table.double().mean())


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group if len(group) > 1}


def _has_converters(module: nn.Module) -> bool:
    from transformers.core_model_loading import WeightRenaming

    if linears_of(module):
        return True
    return any(not isinstance(rule, WeightRenaming) for rule in _rules(module))


def _rules(module: nn.Module) -> list[Any]:
    """transformers' rules for this architecture's checkpoints. Those for the old names of norms'
    weights, which apply to every model, are left out."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(module, PreTrainedModel):
        return []
    return list(get_model_conversion_mapping(module, add_legacy=False))


def _former_names(module: nn.Module) -> dict[str, str]:
    """Find the former names of linears and embeddings by letting transformers save them."""
    if not _rules(module):
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = module  # a PreTrainedModel
    found = {}
    for name in [n for n, p in module.named_parameters() if p.dim() == 2 and n.endswith(".weight")]:
        try:
            (former,) = revert_weight_conversion(model, {name: torch.empty(1, 1)})
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, NotImplementedError):
            continue  # it is stored in parts
        if former != name and former.endswith(".weight"):
            found[former.removesuffix(".weight")] = name.removesuffix(".weight")
    return found


def _experts(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Find the names of experts by letting transformers split a stack of two experts with two
    channels each, numbered 0 and 1, 2 and 3."""
    if not _has_converters(module):
        return {}
    found = linears_of(module)
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = module  # a PreTrainedModel
    for name in [n for n, p in module.named_parameters() if p.dim() == 3 and n not in found]:
        try:
            parts = revert_weight_conversion(model, {name: torch.arange(4).view(2, 2, 1)})
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, NotImplementedError):
            continue
        named = {tuple(t.flatten().tolist()): n.removesuffix(".weight") for n, t in parts.items()}
        for pairs in ([((0, 1), (2, 3))], [((0,), (2,)), ((1,), (3,))]):  # one part each, or two
            if named.keys() == {channels for pair in pairs for channels in pair}:
                templates = tuple(_template(*(named[one] for one in pair)) for pair in pairs)
                if all(templates):
                    found[name] = templates
    return found


def _template(first: str, second: str) -> str:
    """A module's names in experts 0 and 1 -> the name with {} for the number; "" if none fits."""
    pairs = list(zip(first.split("."), second.split("."), strict=False))
    template = ".".join("{}" if pair == ("0", "1") else pair[0] for pair in pairs)
    is_it = template.replace("{}", "0") == first and template.replace("{}", "1") == second
    return template if is_it and template.count("{}") == 1 else ""
