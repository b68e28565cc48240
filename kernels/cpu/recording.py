"""Records a sequence of ops on fixed tensors while it runs, to replay it without torch.

This is the counterpart of a CUDA graph: torch's dispatcher takes a large part of a one-token step.
Our own kernels and lookups of rows are replayed in C++ (recording.h). Other ops that compute
something are called again through torch, into the same results; views need no replay.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmc.kernels.cpu.build import c_functions

_ops = torch.ops.aten
_READ_BY_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NotRecordable(Exception):
    """The sequence depends on values, or does not consist of ops on the CPU."""


@dataclass(frozen=True, slots=True)
class _TorchCall:
    """An op that torch calls again. `results` are those to copy new ones into, None for one that
    aliases its arguments; empty if nothing has to be copied."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...]

    def replay(self) -> None:
        again = self.op(*self.args, **self.kwargs)
        if self.results:
            for result, new in zip(self.results, _tensors(again), strict=True):
                if result is not None:
                    result.copy_(new)


class _Kernels:
    """A sequence of calls of our own kernels."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._run = _library().llmc_replay
        weakref.finalize(self, _library().llmc_free_recording, handle)

    def replay(self) -> None:
        error = self._run(self._handle)
        if error is not None:
            raise RuntimeError(f"a kernel of a recorded step failed: {error.decode()}")


class Recorded:
    """A recorded sequence. `results` are the same tensors at every replay."""

    def __init__(self, mode: _Mode, results: Any) -> None:
        self._parts = mode.parts
        self._num_ours = mode.num_ours
        self._reason = mode.reason
        self._kept = mode.kept
        self.results = results

    @property
    def num_torch_calls(self) -> int:
        return sum(isinstance(part, _TorchCall) for part in self._parts)

    def check(self) -> None:
        """Raise NotRecordable if a replay would be wrong, or not worthwhile."""
        if self._reason is not None:
            raise NotRecordable(self._reason)
        if self.num_torch_calls > self._num_ours:
            raise NotRecordable(
                f"{self.num_torch_calls} ops are torch's, and {self._num_ours} are llmc's"
            )

    def replay(self) -> Any:
        for part in self._parts:
            part.replay()
        return self.results


def record(run: Callable[[], Any]) -> Recorded:
    """Call `run` and record the ops that it calls; its results are valid.

    `run` must only call ops on tensors whose memory does not move. `check` detects some violations.
    """
    mode = _Mode()
    library = _library()
    library.llmc_record()
    try:
        with mode:
            results = run()
        mode.take_kernels()
    finally:
        library.llmc_stop_recording()
    return Recorded(mode, results)


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is traced here; without this, torch would import all of Dynamo, in seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[_TorchCall | _Kernels] = []
        self.num_ours = 0  # ops that C++ replays
        self.kept: list[Tensor] = []  # whose memory it reads and writes
        self.reason: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(tag in func.tags for tag in _READ_BY_HOST):
            self.reason = f"{func} reads values on the host"
        is_ours = func.namespace == "llmc_cpu"
        is_whole = _library().llmc_record_op()
        if (is_ours and is_whole) or self._records_rows(func, args, result):
            self.num_ours += 1
            return result
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        made = tuple(None if t.untyped_storage()._cdata in given else t for t in _tensors(result))
        if func._schema.is_mutable or any(t is not None for t in made):
            self._call_again(_call(func, args, kwargs, made))
        return result

    def _records_rows(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """Record a lookup of whole rows of a dense table, if `func` is one."""
        if func is _ops.embedding.default:
            table, index, dim = args[0], args[1], 0
        elif func is _ops.index_select.default:
            table, dim, index = args
            dim %= max(1, table.dim())
        else:
            return False
        is_one_table = all(size == 1 for size in table.shape[:dim])
        tensors = (table, index, out)
        if not is_one_table or not table.dim() or not all(t.is_contiguous() for t in tensors):
            return False
        rows = table.shape[dim]
        row_bytes = table.nbytes // rows if rows else 0
        _library().llmc_record_rows(
            table.data_ptr(), rows, index.data_ptr(), index.dtype == torch.int64, index.numel(),
            out.data_ptr(), row_bytes,
        )  # fmt: skip
        self.kept += tensors
        return True

    def _call_again(self, call: _TorchCall) -> None:
        self.take_kernels()
        self.parts.append(call)

    def take_kernels(self) -> None:
        handle = _library().llmc_take_recording()
        if handle:
            self.parts.append(_Kernels(handle))


def _call(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: tuple[Tensor | None, ...]
) -> _TorchCall:
    """`made`: the op's results, None for those that alias its arguments."""
    if len(made) == 1 and made[0] is not None and (into := _with_out(op)) is not None:
        return _TorchCall(into, args, {**kwargs, "out": made[0]}, ())
    return _TorchCall(op, args, kwargs, made if any(t is not None for t in made) else ())


def _with_out(op: Any) -> Any:
    """The overload of an op that writes its result to one more argument, `out`, or None."""
    wanted = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        *given, last = other._schema.arguments or [None]
        is_into = last is not None and last.is_out and last.name == "out"
        if is_into and [(argument.name, str(argument.type)) for argument in given] == wanted:
            return other
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@cache
def _library() -> ctypes.CDLL:
    library = c_functions()
    library.llmc_record_op.restype = ctypes.c_bool
    library.llmc_take_recording.restype = ctypes.c_void_p
    library.llmc_replay.argtypes, library.llmc_replay.restype = [ctypes.c_void_p], ctypes.c_char_p
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.llmc_record_rows.argtypes = [
        address, number, address, ctypes.c_bool, number, address, number,
    ]  # fmt: skip
    library.llmc_record_rows.restype = None
    library.llmc_free_recording.argtypes = [ctypes.c_void_p]
    return library
