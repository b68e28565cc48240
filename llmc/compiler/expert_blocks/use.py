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
from llmc.compiler.expert_blocks.record import NotUnderstood, StandIns, record
from llmc.errors import CompileError
from llmc.weights.stacked_experts import StackedExperts

# Raised by models' code on unexpected inputs.
_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    NotUnderstood,
)
_RECORDED = ((7, torch.float64), (19, torch.float32))  # numbers of tokens that no size equals
_COMPARED = (1, 2, 12, 129)  # numbers of tokens
_ROUNDED = 2**-6  # relative deviation in 16 bits, of sums in another order
_CLOSE = 1e-4  # and in float32
_MOST_VALUES = 1 << 27  # of parameters that are filled at a time


def use_expert_blocks(
    model: nn.Module, dtype: torch.dtype, buffers: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Replace what is understood. -> why the others are not. `buffers`: values by name."""
    if type(model).__module__.startswith("transformers."):
        return ()  # its loops are known (experts.py, expert_loops.py)
    made: dict[Any, _Replacement | str] = {}  # for equal blocks
    shared: dict[str, Callable[..., Any]] = {}
    for name, path in list(_candidates(model)):
        block = model.get_submodule(name)
        key = path, likeness(block)
        if key not in made:
            own = {n.removeprefix(f"{name}."): b for n, b in buffers.items()}
            made[key] = _understand(model, block, path, dtype, own)
        found = made[key]
        if isinstance(found, _Replacement):
            found.install(block, shared)
    return tuple(dict.fromkeys(found for found in made.values() if isinstance(found, str)))


def _candidates(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The names of blocks, and of the list of equal modules in each."""
    for name, experts in model.named_modules():
        if not isinstance(experts, nn.ModuleList) or len(experts) < 2:
            continue
        shapes = [(type(e), [p.shape for p in e.parameters()]) for e in experts]
        if any(shape != shapes[0] for shape in shapes[1:]):
            continue
        if not any(len(shape) > 1 for shape in shapes[0][1]):
            continue
        block = name.rpartition(".")[0]
        while block and not _takes_states(model.get_submodule(block)):
            block = block.rpartition(".")[0]
        if block and not any(
            isinstance(m, nn.Embedding) for m in model.get_submodule(block).modules()
        ):
            yield block, name.removeprefix(f"{block}.")


def _takes_states(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needed) == 1


def _understand(
    model: nn.Module,
    block: nn.Module,
    path: str,
    dtype: torch.dtype,
    buffers: Mapping[str, Tensor],
) -> _Replacement | str:
    trial = _Trial(block, path, dtype, buffers)
    what = f"{type(block).__name__} computes its experts in a loop that is not understood"
    if trial.num_values > _MOST_VALUES:
        return f"{what}: the rest of it is too large to try"
    codes: dict[int, fx.GraphModule] = {}
    problems: list[Exception] = []
    for width in _widths(model, trial.experts[0]):
        for shape in ((1,), ()):
            try:
                codes[len(shape) + 2] = trial.code(*shape, width=width)
            except _ERRORS as e:
                problems.append(e)
        if codes:
            break
    try:
        if not codes:
            raise next((p for p in problems if isinstance(p, NotUnderstood)), problems[0])
        code = expert_code(list(trial.experts), trial.num_extras)
        _compare_expert(code, trial, dtype, width)
    except _ERRORS as e:
        return f"{what}: {e}"
    return _Replacement(path=path, codes=codes, expert=code)


def _widths(model: nn.Module, expert: nn.Module) -> Sequence[int]:
    """What the width of hidden states may be."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    known = [getattr(text, "hidden_size", None), *(p.shape[-1] for p in expert.parameters())]
    return [width for width in dict.fromkeys(known) if isinstance(width, int)]


class _Trial:
    """Runs a block of which only the experts have no values."""

    def __init__(
        self, block: nn.Module, path: str, dtype: torch.dtype, buffers: Mapping[str, Tensor]
    ) -> None:
        self._block, self._path = block, path
        self._dtype, self._buffers = dtype, buffers
        self._copies: dict[tuple[torch.dtype, int], nn.Module] = {}
        experts = block.get_submodule(path)
        assert isinstance(experts, nn.ModuleList)
        self.experts = experts
        self.num_extras = 0
        self.num_values = sum(
            p.numel() for n, p in block.named_parameters() if not n.startswith(f"{path}.")
        )

    def code(self, *batch: int, width: int) -> fx.GraphModule:
        """The general code of the block. Raises what it raises, and NotUnderstood."""
        count = len(self.experts)
        analyses = []
        for tokens, dtype in _RECORDED:
            copied = self._copy(dtype, seed=0)
            hidden = self._hidden((*batch, tokens, width), dtype)
            experts = copied.get_submodule(self._path).children()
            numbers = {expert: i for i, expert in enumerate(experts)}
            recording = record(copied, hidden, numbers, {copied, *_above(copied, self._path)})
            if not recording.expert_calls:
                raise NotUnderstood("it calls none of them with the states of tokens")
            analyses.append(Analysis(recording, StandIns(count, width), count))
        routing, results = common_routing(analyses)
        self.num_extras = len(routing.extras)
        made = generalize((analyses[0], analyses[1]), routing, (results[0], results[1]))
        cases = [*((n, torch.float32) for n in _COMPARED), (_RECORDED[0][0], self._dtype)]
        for tokens, dtype in dict.fromkeys(cases):
            hidden = self._hidden((*batch, tokens, width), dtype)
            self._compare(made, hidden, self._copy(dtype, seed=1))
        return made

    def _compare(self, code: fx.GraphModule, hidden: Tensor, copied: nn.Module) -> None:
        stand_ins = StandIns(len(self.experts), hidden.shape[-1])
        for number, expert in enumerate(copied.get_submodule(self._path).children()):
            vars(expert)["forward"] = partial(_stand_in, stand_ins, number)
        with torch.no_grad():
            wanted = type(copied).forward(copied, hidden.clone())
            found = code(copied, hidden.clone(), stand_ins)
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
            if name.startswith(f"{self._path}."):
                continue
            owner, _, leaf = name.rpartition(".")
            module = copied.get_submodule(owner)
            to = dtype if tensor.dtype == self._dtype else tensor.dtype
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


def _above(block: nn.Module, path: str) -> list[nn.Module]:
    """The modules that contain the experts."""
    parts = path.split(".")
    return [block.get_submodule(".".join(parts[:i])) for i in range(1, len(parts) + 1)]


def _stand_in(experts: StandIns, number: int, rows: Tensor, *extras: Tensor) -> Tensor:
    return experts(rows, number, *extras)


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in _flat(part)]
    return [result] if isinstance(result, Tensor) else []


def _compare_expert(code: ExpertCode, trial: _Trial, dtype: torch.dtype, width: int) -> None:
    """Compare the code for all rows with two experts, row by row. Raises NotUnderstood."""
    expert = trial.experts[0]
    if 2 * sum(p.numel() for p in expert.parameters()) > _MOST_VALUES:
        return  # it would take too long; the code has been shown to be that of all experts
    generator = torch.Generator().manual_seed(0)
    values: list[dict[str, Tensor]] = [{}, {}]
    for own in values:
        for name, p in expert.named_parameters():
            value = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                value *= p.shape[-1] ** -0.5
            own[name] = value.to(torch.float32 if p.dtype == dtype else p.dtype)
    stacks = []
    for stack in code.stacks:
        parts = [[own[part] for part in stack.parts] for own in values]
        stacks.append(torch.stack([torch.cat(own) if len(own) > 1 else own[0] for own in parts]))
    number = torch.tensor([0, 1, 1, 0, 1])
    given = [
        torch.randn(len(number), size, generator=generator)
        for size in (width, *[1] * trial.num_extras)
    ]
    with torch.no_grad():
        found = code.code(*given, number, *stacks)
        wanted = [
            functional_call(expert, values[e], tuple(one[i : i + 1] for one in given))
            for i, e in enumerate(number.tolist())
        ]
    if not is_close(found, torch.cat(wanted), _CLOSE):
        raise NotUnderstood("its experts do not compute each row by itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """path: of the experts. codes: by the number of dimensions of the hidden states."""

    path: str
    codes: Mapping[int, fx.GraphModule]
    expert: ExpertCode

    def install(self, block: nn.Module, shared: dict[str, Callable[..., Any]]) -> None:
        """`shared`: functions by their code, as equal ones are captured faster."""
        texts = [f"{dims} {code.code}" for dims, code in self.codes.items()]
        [name, *_] = inspect.signature(block.forward).parameters
        key = "\n".join([self.path, name, *texts, str(self.expert.code.code)])
        if key not in shared:
            shared[key] = self._forward(name)
        owner, _, leaf = self.path.rpartition(".")
        experts = block.get_submodule(self.path)
        assert isinstance(experts, nn.ModuleList)
        parts = {stack.name: stack.parts for stack in self.expert.stacks}
        setattr(block.get_submodule(owner), leaf, StackedExperts(experts, parts))
        block.forward = MethodType(shared[key], block)

    def _forward(self, name: str) -> Callable[..., Any]:
        codes, one_expert = self.codes, self.expert.code
        steps = self.path.split(".")
        names = [stack.name for stack in self.expert.stacks]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            if len(given) != 1 or (kwargs and name not in kwargs) or given[0].dim() not in codes:
                raise CompileError(
                    f"{type(self).__name__}, a block of routed experts, gets more than the states "
                    "of tokens, which is not supported"
                )
            stacked: Any = self
            for step in steps:
                stacked = getattr(stacked, step)

            def experts(rows: Tensor, number: Tensor, *extras: Tensor) -> Tensor:
                stacks = (getattr(stacked, name) for name in names)
                out: Tensor = one_expert(rows, *extras, number, *stacks)
                return out

            return codes[given[0].dim()](self, given[0], experts)

        return forward
