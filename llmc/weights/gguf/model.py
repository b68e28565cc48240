"""The weights of a GGUF model, located by an index that is built from its header once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from llmc.errors import CheckpointError
from llmc.weights.gguf.blocks import RowOrder
from llmc.weights.gguf.files import INDEX
from llmc.weights.gguf.names import ParameterMap
from llmc.weights.gguf.processors import RULES as OF_PROCESSORS
from llmc.weights.gguf.reader import GgufHeader, GgufTensorInfo
from llmc.weights.gguf.rules import rule_of
from llmc.weights.gguf.tensors import GgufNumber, GgufTensor, Undo

_SAME = "same"  # rows are not reordered


def write_index(
    folder: Path, header: GgufHeader, parameters: ParameterMap, config: Mapping[str, Any]
) -> None:
    """Write the index into `folder`. `config`: the result of `read_config` for the header."""
    files = {file: i for i, file in enumerate(header.files)}
    of_processor = {k: v for k, v in rule_of(header).items() if k in OF_PROCESSORS}
    undo = Undo(architecture=header.architecture, config=config, rule=of_processor)
    orders: dict[str, list[int]] = {}  # by digest: layers share one list

    def key_of(numbers: NDArray[np.int64]) -> str:
        key = hashlib.sha256(numbers.tobytes()).hexdigest()[:16]
        orders[key] = numbers.tolist()
        return key

    def order(name: str) -> tuple[str | None, bool, str | None]:
        """The order of a parameter's rows, as a key of `orders` (None if it is more than a
        reordering), whether it is transposed, and the order of its columns (None: they are in
        order)."""
        shapes = {part.name: part.shape for part in parameters.parts[name]}
        found = undo.order(shapes, parameters.shapes[name])
        if found is None:
            return None, False, None
        rows, turned, columns = found
        is_same = np.array_equal(rows, np.arange(len(rows)))
        return (
            _SAME if is_same else key_of(rows),
            turned,
            None if columns is None else key_of(columns),
        )

    index = {
        "architecture": header.architecture,
        "config": dict(config),
        "rule": of_processor,
        "orders": orders,
        "files": [[str(file), file.stat().st_size] for file in header.files],
        "parameters": {
            name: {
                "shape": parameters.shapes[name],
                "order": order(name),
                "parts": [
                    [t.name, files[t.file], t.shape, int(t.type), t.offset, t.num_bytes]
                    for t in parts
                ],
            }
            for name in parameters.shapes  # in the model's order
            if (parts := parameters.parts.get(name)) is not None
        },
        "numbers": {
            name: [parameters.shapes[name], value] for name, value in parameters.numbers.items()
        },
    }
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def open_gguf(folder: Path) -> dict[str, GgufTensor | GgufNumber]:
    """The parameters of an index. CheckpointError if a file has changed."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = [Path(file) for file, _ in index["files"]]
        for file, (_, size) in zip(files, index["files"], strict=True):
            if not file.is_file() or file.stat().st_size != size:
                raise CheckpointError(f"{file.name} has changed or is missing; restart")
        undo = Undo(**{part: index[part] for part in ("architecture", "config", "rule")})
        listed = {key: np.array(rows, np.int64) for key, rows in index["orders"].items()}
        orders: dict[str | None, RowOrder | None] = {None: None, _SAME: slice(None), **listed}
        numbers = {
            name: GgufNumber(shape=tuple(shape), dtype=torch.float32, value=value)
            for name, (shape, value) in index["numbers"].items()
        }
        return numbers | {
            name: GgufTensor(
                name=name,
                shape=tuple(entry["shape"]),
                dtype=torch.float32,
                parts=tuple(
                    GgufTensorInfo(
                        name=part,
                        file=files[number],
                        shape=tuple(shape),
                        type=GGMLQuantizationType(kind),
                        offset=offset,
                        num_bytes=num_bytes,
                    )
                    for part, number, shape, kind, offset, num_bytes in entry["parts"]
                ),
                row_order=orders[entry["order"][0]],
                transposed=entry["order"][1],
                columns=listed.get(entry["order"][2]),
                undo=undo,
            )
            for name, entry in index["parameters"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise CheckpointError(f"{INDEX} in the cache can't be read: {str(e)[:200]}") from e
