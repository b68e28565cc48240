"""Calls of C++ ops as a file for tests/kernels/harness.cpp, and its answers.

All numbers are int64 or float64; strings and lists are preceded by their length. A call: name,
number of results, number of arguments. An argument: kind (n, t, d, i, s), whether it is optional (a
byte), value. A tensor: dtype, sizes, strides, all elements in its storage range. The answer has the
results of a call, then its tensor arguments: dtype, sizes, elements.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.registry import Case

_CODES = {  # torch's own numbers, as in its C ABI
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _list(values: Sequence[int]) -> bytes:
    return _number(len(values)) + b"".join(map(_number, values))


def _tensor(t: Tensor) -> bytes:
    spread = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    flat = t.as_strided((spread + 1 if t.numel() else 0,), (1,))
    head = _number(_CODES[t.dtype]) + _list(t.shape) + _list(t.stride())
    return head + flat.contiguous().view(torch.uint8).numpy().tobytes()


def _argument(value: Any, kind: str) -> bytes:
    optional = b"\1" if kind.startswith("Optional") else b"\0"
    if value is None:
        return b"n" + optional
    if isinstance(value, Tensor):
        return b"t" + optional + _tensor(value)
    if isinstance(value, str):
        return b"s" + optional + _number(len(value)) + value.encode()
    if "float" in kind:
        return b"d" + optional + struct.pack("<d", value)
    if isinstance(value, torch.dtype):
        return b"i" + optional + _number(_CODES[value])
    return b"i" + optional + _number(int(value))


def pack_calls(calls: Sequence[tuple[Any, Case]]) -> bytes:
    """Calls of (operator overload, its arguments)."""
    parts = [_number(len(calls))]
    for overload, case in calls:
        schema = overload._schema
        name = schema.name.partition("::")[2]
        parts += [_number(len(name)), name.encode(), _number(len(schema.returns))]
        parts.append(_number(len(schema.arguments)))
        given = [*case, *(a.default_value for a in schema.arguments[len(case) :])]
        parts += [_argument(x, str(a.type)) for x, a in zip(given, schema.arguments, strict=True)]
    return b"".join(parts)


def unpack_answers(answer: bytes, calls: Sequence[tuple[Any, Case]]) -> list[list[Tensor]]:
    """For each call its results, then the tensors among its arguments."""
    place = 0

    def number() -> int:
        nonlocal place
        place += 8
        return int(struct.unpack_from("<q", answer, place - 8)[0])

    def tensor() -> Tensor:
        nonlocal place
        dtype = _DTYPES[number()]
        shape = [number() for _ in range(number())]
        size = dtype.itemsize * torch.Size(shape).numel()
        data = bytearray(answer[place : place + size])
        place += size
        flat = torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0).byte()
        return flat.view(dtype).view(shape)

    found = [
        [
            tensor()
            for _ in range(len(overload._schema.returns) + sum(isinstance(x, Tensor) for x in case))
        ]
        for overload, case in calls
    ]
    assert place == len(answer), "the answer has extra bytes"
    return found
