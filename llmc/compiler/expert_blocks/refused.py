"""Says which loops over experts were not even tried, where capture stops at one."""

from __future__ import annotations

import inspect
from types import FunctionType

from torch import nn

from llmc.compiler.expert_blocks.record import num_needed
from llmc.compiler.expert_blocks.use import candidates


def loop_reason(model: nn.Module, filename: str, line: int) -> str | None:
    """Why the loop over experts at a line of the model's code was left as it is; None if there is
    no module with a list of experts there."""
    found = {name: None for around in candidates(model) for name, _ in around}
    in_lists = [name for name, m in model.named_modules() if isinstance(m, nn.ParameterList)]
    for name in (*found, *_around(in_lists)):
        block = model.get_submodule(name)
        if not _has_line(type(block), filename, line):
            continue
        kind = type(block).__name__
        if name not in found:
            return (
                f"{kind} computes its experts in a loop over parameters in a list, which is not "
                "supported; a list of modules is, or a parameter with a slice for each expert"
            )
        parameters = list(inspect.signature(block.forward).parameters)
        needed = parameters[: num_needed(block)]
        supported = "such a loop is supported in a module whose forward takes only these states"
        if len(needed) > 1:
            return (
                f"{kind} computes its experts in a loop from more than the states of tokens "
                f"({', '.join(needed)}); {supported}"
            )
        return (
            f"{kind} computes its experts in a loop among other things, which can't be run with "
            f"the states of tokens alone; {supported}"
        )
    return None


def _around(names: list[str]) -> list[str]:
    """The names of the modules around these, innermost first."""
    found: dict[str, None] = {}
    for name in names:
        while name := name.rpartition(".")[0]:
            found[name] = None
    return list(found)


def _has_line(kind: type, filename: str, line: int) -> bool:
    codes = [f.__code__ for f in vars(kind).values() if isinstance(f, FunctionType)]
    return any(
        code.co_filename == filename
        and line in {number for _, _, number in code.co_lines() if number is not None}
        for code in codes
    )
