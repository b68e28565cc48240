"""Replaces blocks whose own code loops over experts with code for all tokens at once.

Such code asks which tokens chose an expert, so it can't be captured. Here it is run on random
tokens (record.py), what it computes is found by its values (find.py), and the code around the
loop is kept (generalize.py). The experts' code is that of one of them over stacked weights
(expert_code.py). The result is compared with the block's own for other numbers of tokens, where
some experts get none. Blocks that are not understood are left as they are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from llmc.compiler.expert_blocks.expert_code import ExpertCode, expert_code, likeness
from llmc.compiler.expert_blocks.find import Analysis, common_routing, is_close
from llmc.compiler.expert_blocks.generalize import generalize
from llmc.compiler.expert_blocks.record import (
    NotUnderstood,
    Recording,
    StandIns,
    num_needed,
    record,
    run_block,
)
from llmc.compiler.expert_blocks.routing import Experts
from llmc.compiler.expert_blocks.slices import SliceProducts, experts_of, slice_code
from llmc.compiler.model_errors import MODEL_ERRORS
from llmc.errors import CompileError
from llmc.weights.stacked_experts import StackedExperts

_ERRORS = (*MODEL_ERRORS, NotUnderstood)
_RECORDED = (7, 19)  # numbers of tokens that no size equals
# Code may need that its float32 routers are not narrower than the states of tokens.
_DTYPES = ((torch.float64, torch.float32), (torch.bfloat16, torch.float32))
_COMPARED = (1, 2, 12, 129)  # numbers of tokens
_ROUNDED = 2**-6  # relative deviation in 16 bits, of sums in another order
_CLOSE = 1e-4  # and in float32
_UNKNOWN = object()
_MOST_VALUES = 1 << 27  # of parameters that are filled at a time


def use_expert_blocks(
    model: nn.Module, dtype: torch.dtype, buffers: dict[str, Tensor]
) -> tuple[str, ...]:
    """Replace what is understood. -> why other loops are not. `buffers`: values by name, to which
    those of new buffers are added: NaN, for tensors that blocks leave in attributes."""
    made: dict[Any, _Replacement | str] = {}  # for equal blocks
    shared: dict[str, Callable[..., Any]] = {}
    reasons: list[str] = []
    for around in list(dict.fromkeys(candidates(model))):
        for name, path in around:
            block = model.get_submodule(name)
            key = path, likeness(block)
            if key not in made:
                own = {n.removeprefix(f"{name}."): b for n, b in buffers.items()}
                made[key] = _understand(model, block, path, dtype, own)
            found = made[key]
            if isinstance(found, _Replacement):
                buffers |= {f"{name}.{n}": b for n, b in found.install(block, shared).items()}
                break
        else:
            reasons += [found] if isinstance(found, str) and found else []
    return tuple(dict.fromkeys(reasons))


def candidates(model: nn.Module) -> Iterator[tuple[tuple[str, str], ...]]:
    """For each list of equal modules, the names of blocks around it, of which one is replaced, and
    of the list in each; "" for parameters that may have a slice for each expert.

    A block takes the states of tokens only. Before it, one that takes more is tried with None.
    """
    for name, module in model.named_modules():
        is_list = _is_list_of_equals(module)
        has_slices = not isinstance(module, nn.Conv1d) and any(
            p.dim() == 3 for p in module.parameters(recurse=False)
        )
        if not is_list and not has_slices:
            continue
        block = name if has_slices else name.rpartition(".")[0]
        found: list[tuple[str, str]] = []
        while block:
            needed = num_needed(model.get_submodule(block))
            inner = list(model.get_submodule(block).modules())
            # what was replaced before has a function of its own
            if any(isinstance(m, nn.Embedding) or "forward" in vars(m) for m in inner):
                break
            if needed == 1 or (needed and not found):
                found.append((block, name.removeprefix(f"{block}.") if is_list else ""))
            if needed == 1:
                break
            block = block.rpartition(".")[0]
        if found:
            yield tuple(found)


def _is_list_of_equals(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    shapes = [(type(e), [p.shape for p in e.parameters()]) for e in module]
    is_equal = all(shape == shapes[0] for shape in shapes[1:])
    return is_equal and any(len(shape) > 1 for shape in shapes[0][1])


def _understand(
    model: nn.Module,
    block: nn.Module,
    path: str,
    dtype: torch.dtype,
    buffers: Mapping[str, Tensor],
) -> _Replacement | str:
    """The replacement, or why there is none; "" for what is no loop over experts."""
    kind = _ModuleTrial if path else _SliceTrial
    trial = kind(block, path, dtype, buffers)
    what = f"{type(block).__name__} computes its experts in a loop that is not understood"
    codes: dict[int, fx.GraphModule] = {}
    problems: list[Exception] = []
    try:
        if trial.num_values > _MOST_VALUES:
            raise NotUnderstood("the rest of it is too large to try")
        for width in _widths(model, trial.shapes):
            for shape in ((1,), ()):
                for dtypes in _DTYPES:
                    try:
                        codes[len(shape) + 2] = trial.understand(*shape, width=width, dtypes=dtypes)
                        break
                    except NotUnderstood as e:
                        problems.append(e)
                        break
                    except _ERRORS as e:
                        problems.append(e)
            if codes:
                break
        if not codes:
            raise next((p for p in problems if isinstance(p, NotUnderstood)), problems[0])
        code = trial.expert(width)
    except _ERRORS as e:
        return f"{what}: {e}" if trial.is_loop else ""
    return _Replacement(path=path, codes=codes, expert=code, attributes=trial.attributes)


def _widths(model: nn.Module, shapes: Sequence[torch.Size]) -> Sequence[int]:
    """What the width of hidden states may be."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    sizes = [size for shape in shapes for size in reversed(shape)]
    known = [getattr(text, "hidden_size", None), *sizes]
    return [width for width in dict.fromkeys(known) if isinstance(width, int)]


class _Trial:
    """Runs a block of which only the experts have no values."""

    count: int  # of experts
    shapes: Sequence[torch.Size]  # of an expert's parameters

    def __init__(
        self, block: nn.Module, path: str, dtype: torch.dtype, buffers: Mapping[str, Tensor]
    ) -> None:
        self._block, self._path = block, path
        self._dtype, self._buffers = dtype, buffers
        self._copies: dict[tuple[torch.dtype, int], nn.Module] = {}
        self.attributes: dict[tuple[str, str], Any] = {}  # that the code sets; see _Replacement
        self.is_loop = False  # whether experts were found to get some of the tokens only
        own = block.named_parameters()
        self.num_values = sum(p.numel() for n, p in own if not self._is_of_experts(n))

    def understand(
        self, *batch: int, width: int, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> fx.GraphModule:
        """The general code of the block, which is recorded in two dtypes. Raises what the code
        raises, and NotUnderstood."""
        recordings = []
        for tokens, dtype in zip(_RECORDED, dtypes, strict=True):
            hidden = self._hidden((*batch, tokens, width), dtype)
            recording = self._record(self._copy(dtype, seed=0), hidden)
            calls = recording.expert_calls
            if not calls:
                raise NotUnderstood("it calls none of them with the states of tokens")
            sizes = {call.rows.numel() for call in calls}
            self.is_loop |= len(calls) < self.count or sizes != {hidden.numel()}
            recordings.append(recording)
        first, second = recordings
        for place, value in first.attributes.items():
            other = second.attributes.get(place)
            if isinstance(value, Tensor) and isinstance(other, Tensor):
                self.attributes[place] = _unset(value, other, dtypes, self._dtype)
                continue
            is_plain = isinstance(value, bool | int | float | str | None)
            self.attributes[place] = value if is_plain and other == value else _UNKNOWN
        self._compare_recordings(first, second)
        stands = [self._stand_ins(self._copy(dtype, seed=0), width) for dtype in dtypes]
        analyses = (
            Analysis(first, stands[0], self.count),
            Analysis(second, stands[1], self.count),
        )
        routing, results = common_routing(analyses)
        self._num_extras = len(routing.extras)
        made = generalize(analyses, routing, (results[0], results[1]))
        cases = [*((n, torch.float32) for n in _COMPARED), (_RECORDED[0], self._dtype)]
        for tokens, dtype in dict.fromkeys(cases):
            hidden = self._hidden((*batch, tokens, width), dtype)
            self._compare(made, hidden, self._copy(dtype, seed=1))
        return made

    def expert(self, width: int) -> ExpertCode:
        """The code of the experts, after `understand`. Raises NotUnderstood."""
        raise NotImplementedError

    def _is_of_experts(self, name: str) -> bool:
        """Whether a parameter or buffer is of the experts."""
        raise NotImplementedError

    def _record(self, copied: nn.Module, hidden: Tensor) -> Recording:
        raise NotImplementedError

    def _run(self, copied: nn.Module, hidden: Tensor) -> Any:
        raise NotImplementedError

    def _stand_ins(self, copied: nn.Module, width: int) -> Experts:
        """What runs in place of the experts."""
        raise NotImplementedError

    def _compare_recordings(self, first: Recording, second: Recording) -> None:
        """Raise NotUnderstood if the experts did different things."""

    def _compare(self, code: fx.GraphModule, hidden: Tensor, copied: nn.Module) -> None:
        with torch.no_grad():
            wanted = self._run(copied, hidden.clone())
            found = code(copied, hidden.clone(), self._stand_ins(copied, hidden.shape[-1]))
        tolerance = _CLOSE if hidden.dtype == torch.float32 else _ROUNDED
        pairs = list(zip(_flat(wanted), _flat(found), strict=True))
        for one, other in pairs:
            if one.shape != other.shape or one.dtype != other.dtype:
                raise NotUnderstood(f"its code differs for {hidden.shape[-2]} tokens")
            if not is_close(other, one, tolerance):
                raise NotUnderstood(f"its results differ for {hidden.shape[-2]} tokens")

    def _hidden(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(shape[-2])
        return torch.randn(*shape, generator=generator).to(dtype)

    def _copy(self, dtype: torch.dtype, seed: int) -> nn.Module:
        """The block with random values in `dtype` instead of the model's."""
        if (dtype, seed) in self._copies:
            return self._copies[dtype, seed]
        generator = torch.Generator().manual_seed(seed)
        copied = copy.deepcopy(self._block)
        for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
            owner, _, leaf = name.rpartition(".")
            module = copied.get_submodule(owner)
            to = dtype if tensor.dtype == self._dtype else tensor.dtype
            if self._is_of_experts(name):
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(tensor.to("meta", to), False)
                continue
            known = self._buffers.get(name)
            if known is not None:
                module._buffers[leaf] = known.to(to, copy=True)
                continue
            value = torch.zeros(tensor.shape)
            if tensor.is_floating_point() and tensor.dim() > 1:
                value.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
            elif tensor.is_floating_point():
                value.uniform_(0.5, 1.5, generator=generator)
            if leaf in module._buffers:
                module._buffers[leaf] = value.to(to)
            else:
                module._parameters[leaf] = nn.Parameter(value.to(to), requires_grad=False)
        self._copies[dtype, seed] = copied
        return copied


def _around(block: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """The modules in which something has these names, and those around them."""
    found = {block}
    for name in names:
        parts = name.split(".")
        found |= {block.get_submodule(".".join(parts[:i])) for i in range(1, len(parts))}
    return found


def _stand_in(experts: StandIns, number: int, rows: Tensor, *extras: Tensor) -> Tensor:
    return experts(rows, number, *extras)


def _unset(
    one: Tensor, other: Tensor, dtypes: tuple[torch.dtype, torch.dtype], models: torch.dtype
) -> Any:
    """What stands for a tensor that the code sets, by those of two recordings."""
    is_models = (one.dtype, other.dtype) == dtypes
    if one.shape != other.shape or not (is_models or one.dtype == other.dtype):
        return _UNKNOWN
    dtype = models if is_models else one.dtype
    return torch.full(one.shape, float("nan"), dtype=dtype) if dtype.is_floating_point else _UNKNOWN


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in _flat(part)]
    return [result] if isinstance(result, Tensor) else []


class _ModuleTrial(_Trial):
    """Of a block with a list of modules."""

    def __init__(
        self, block: nn.Module, path: str, dtype: torch.dtype, buffers: Mapping[str, Tensor]
    ) -> None:
        super().__init__(block, path, dtype, buffers)
        self._experts = list(block.get_submodule(path).children())
        self.count = len(self._experts)
        self.shapes = [p.shape for p in self._experts[0].parameters()]
        self._num_extras = 0

    def _is_of_experts(self, name: str) -> bool:
        return name.startswith(f"{self._path}.")

    def _record(self, copied: nn.Module, hidden: Tensor) -> Recording:
        experts = copied.get_submodule(self._path).children()
        numbers = {expert: i for i, expert in enumerate(experts)}
        return record(copied, hidden, numbers, _around(copied, [self._path + "."]))

    def _stand_ins(self, copied: nn.Module, width: int) -> Experts:
        return StandIns(self.count, width)

    def _run(self, copied: nn.Module, hidden: Tensor) -> Any:
        stand_ins = StandIns(self.count, hidden.shape[-1])
        for number, expert in enumerate(copied.get_submodule(self._path).children()):
            vars(expert)["forward"] = partial(_stand_in, stand_ins, number)
        return run_block(copied, hidden)

    def expert(self, width: int) -> ExpertCode:
        code = expert_code(self._experts, self._num_extras)
        expert = self._experts[0]
        if 2 * sum(p.numel() for p in expert.parameters()) > _MOST_VALUES:
            return code  # to compare it would take too long; it is shown to be that of all experts
        generator = torch.Generator().manual_seed(0)
        values: list[dict[str, Tensor]] = [{}, {}]
        for own in values:
            for name, p in expert.named_parameters():
                value = torch.randn(p.shape, generator=generator)
                if p.dim() > 1:
                    value *= p.shape[-1] ** -0.5
                own[name] = value.to(torch.float32 if p.dtype == self._dtype else p.dtype)
        stacks = []
        for stack in code.stacks:
            parts = [[own[part] for part in stack.parts] for own in values]
            stacks.append(torch.stack([torch.cat(p) if len(p) > 1 else p[0] for p in parts]))
        number = torch.tensor([0, 1, 1, 0, 1])
        given = [
            torch.randn(len(number), size, generator=generator)
            for size in (width, *[1] * self._num_extras)
        ]
        with torch.no_grad():
            found = code.code(*given, number, *stacks)
            wanted = [
                functional_call(expert, values[e], tuple(one[i : i + 1] for one in given))
                for i, e in enumerate(number.tolist())
            ]
        if not is_close(found, torch.cat(wanted), _CLOSE):
            raise NotUnderstood("its experts do not compute each row by itself")
        return code


class _SliceTrial(_Trial):
    """Of a block with parameters that have a slice for each expert."""

    def __init__(
        self, block: nn.Module, path: str, dtype: torch.dtype, buffers: Mapping[str, Tensor]
    ) -> None:
        slices = {name: p.shape for name, p in block.named_parameters() if p.dim() == 3}
        self._names = list(slices)
        super().__init__(block, path, dtype, buffers)
        self.shapes = list(slices.values())
        self.count = self.shapes[0][0]
        self._products = SliceProducts(self.count)

    def _is_of_experts(self, name: str) -> bool:
        return name in self._names

    def _record(self, copied: nn.Module, hidden: Tensor) -> Recording:
        return record(copied, hidden, {}, _around(copied, self._names), self._products)

    def _compare_recordings(self, first: Recording, second: Recording) -> None:
        self._code = slice_code(self._block, first, second)

    def _stand_ins(self, copied: nn.Module, width: int) -> Experts:
        return experts_of(self._code, copied, self._products)

    def _run(self, copied: nn.Module, hidden: Tensor) -> Any:
        return self._record(copied, hidden).output

    def expert(self, width: int) -> ExpertCode:
        return self._code


def _arguments(block: nn.Module) -> tuple[list[str], list[str]]:
    """The names of its code's arguments, and of those that are None when it is tried."""
    _, *rest = inspect.signature(block.forward).parameters.values()
    taken = [p for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [*inspect.signature(block.forward).parameters][: len(taken) + 1]
    return names, [p.name for p in taken if p.default in (p.empty, None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """path: of the experts, "" for slices of parameters. codes: by the number of dimensions of the
    hidden states. attributes: those that the code sets, by module and name, such as terms of a
    loss. A tensor of NaN is a value that is not known: code may read it, but the model's result
    must not depend on it. _UNKNOWN ones are removed, so that code that reads them fails."""

    path: str
    codes: Mapping[int, fx.GraphModule]
    expert: ExpertCode
    attributes: Mapping[tuple[str, str], Any]

    def install(self, block: nn.Module, shared: dict[str, Callable[..., Any]]) -> dict[str, Tensor]:
        """-> the values of new buffers, by their names in the block. `shared`: functions by their
        code, as equal ones are captured faster."""
        texts = [f"{dims} {code.code}" for dims, code in self.codes.items()]
        names, others = _arguments(block)
        key = "\n".join([self.path, repr((names, others)), *texts, str(self.expert.code.code)])
        if key not in shared:
            shared[key] = self._forward(names, others)
        if self.path:
            owner, _, leaf = self.path.rpartition(".")
            experts = block.get_submodule(self.path)
            assert isinstance(experts, nn.ModuleList)
            parts = {stack.name: stack.parts for stack in self.expert.stacks}
            setattr(block.get_submodule(owner), leaf, StackedExperts(experts, parts))
        block.forward = MethodType(shared[key], block)
        unset: dict[str, Tensor] = {}
        for (name, attribute), value in self.attributes.items():
            owner_of = block.get_submodule(name)
            if value is _UNKNOWN or isinstance(value, Tensor):
                vars(owner_of).pop(attribute, None)
            if isinstance(value, Tensor):
                owner_of.register_buffer(attribute, value.to("meta"), persistent=False)
                unset[f"{name}.{attribute}".lstrip(".")] = value.clone()
            elif value is not _UNKNOWN:
                setattr(owner_of, attribute, value)
        return unset

    def _forward(self, arguments: Sequence[str], others: Sequence[str]) -> Callable[..., Any]:
        """`others`: the arguments that were None."""
        codes, one_expert = self.codes, self.expert.code
        stacks = self.expert.stacks
        names = [f"{self.path}.{s.name}" if self.path else s.parts[0] for s in stacks]
        paths = [name.split(".") for name in names]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(arguments, args, strict=False)) | kwargs
            given = {k: v for k, v in given.items() if v is not None or k not in others}
            hidden = given.get(arguments[0])
            if (
                len(given) != 1
                or len(args) > len(arguments)
                or hidden is None
                or hidden.dim() not in codes
            ):
                raise CompileError(
                    f"{type(self).__name__}, a block of routed experts, gets more than the states "
                    "of tokens, which is not supported"
                )

            def experts(rows: Tensor, number: Tensor, *extras: Tensor) -> Tensor:
                stacks = []
                for path in paths:
                    stack: Any = self
                    for step in path:
                        stack = getattr(stack, step)
                    stacks.append(stack)
                out: Tensor = one_expert(rows, *extras, number, *stacks)
                return out

            return codes[hidden.dim()](self, hidden, experts)

        return forward
