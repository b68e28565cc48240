"""What is known of a module's parameters without the module: names, shapes, ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """`aliases` lists all names of a parameter that has several (tied embeddings).

    `is_plain`: transformers has no rule that changes a tensor of this architecture on loading, so
    a checkpoint that has all the names has all the parameters. `tables`: the mean of each buffer
    that is computed from the config though a checkpoint may hold it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    is_plain: bool
    tables: Mapping[str, float] = field(default_factory=dict)


def describe_parameters(
    module: nn.Module, computed: Mapping[str, Tensor] | None = None
) -> Parameters:
    """`computed`: buffers by name that are not read from a checkpoint."""
    state = module.state_dict()
    return Parameters(
        shapes={name: tuple(p.shape) for name, p in state.items()},
        aliases=_aliases(module),
        is_plain=not _has_converters(module),
        tables={n: mean_of(t) for n, t in (computed or {}).items() if n in state},
    )


def mean_of(table: Tensor) -> float:
    return float(table.double().mean())


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group if len(group) > 1}


def _has_converters(module: nn.Module) -> bool:
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    if not isinstance(module, PreTrainedModel):
        return False
    # The rules for old names apply to every model; they rename and nothing else.
    rules = get_model_conversion_mapping(module, add_legacy=False)
    return any(not isinstance(rule, WeightRenaming) for rule in rules)
