"""Which tensors of a GGUF file make up each parameter, by transformers' and gguf's name maps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES

from llmc.errors import CheckpointError, reason_of
from llmc.weights.gguf.processors import other_half, parameter_of, processor_of
from llmc.weights.gguf.reader import GgufHeader, shown
from llmc.weights.gguf.rules import rules, squashed

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMap:
    """`parts`: parameter -> tensors that make it up.

    `names`: transformers' map, tensor -> parameter; routed experts stand there without `.weight`.
    """

    parts: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]


def map_parameters(header: GgufHeader, hf_config: Any, fields: Mapping[str, Any]) -> ParameterMap:
    """Builds the model without weights, for its names and shapes.

    Raises CheckpointError where the file has tensors that the model has no place for: without
    them it would say something else than the file does.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    file = header.files[0].name
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(hf_config)
        processor: Any = processor_of(header.architecture, fields)
        names = get_gguf_hf_weights_map(
            module,
            processor,
            model_type=_spelled(header.architecture),
            num_layers=hf_config.num_hidden_layers,
        )
    except Exception as e:  # constructors and maps raise nearly every type
        raise CheckpointError(
            f"transformers can't build a model of what {file} says: {reason_of(e)}"
        ) from e
    shapes = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    if "lm_head.weight" in shapes:  # a module that ties it has no name for a separate head
        names.setdefault("output.weight", "lm_head.weight")
    _add_names(names, shapes)
    parts: dict[str, list[str]] = {}
    unknown = []
    for name in header.tensors:
        parameter = parameter_of(names, name)
        if parameter is not None and parameter in shapes:
            parts.setdefault(parameter, []).append(name)
        elif not _is_unused(name, hf_config.num_hidden_layers):
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors of {file} have no place in transformers' model of "
            f"architecture {header.architecture!r}: {', '.join(map(shown, unknown[:5]))}"
        )
    missing = [name for name, _ in module.named_parameters() if name not in parts]
    if missing:
        raise CheckpointError(
            f"{file} has no tensors for {len(missing)} of the parameters that its metadata asks "
            f"for: {', '.join(missing[:5])}"
        )
    for parameter, tensors in parts.items():
        other = other_half(names, tensors[0])
        if other is not None and other not in tensors:
            raise CheckpointError(f"{file} has tensor {shown(tensors[0])}, but no {other!r}")
        stored = [list(header.tensors[name].shape) for name in tensors]
        if sum(math.prod(shape) for shape in stored) != math.prod(shapes[parameter]):
            raise CheckpointError(
                f"{parameter} has shape {', '.join(map(str, stored))} in {file}, its metadata asks "
                f"for {list(shapes[parameter])}"
            )
    return ParameterMap(parts={n: tuple(p) for n, p in parts.items()}, shapes=shapes, names=names)


def _is_unused(tensor: str, layers: int) -> bool:
    """Factors of rotary embeddings, which the config has, and layers for speculation alone."""
    block = _BLOCK.match(tensor)
    if block is not None and int(block[1]) >= layers:
        return True
    return any(re.search(pattern, tensor) for pattern in rules()["unused"])


def _spelled(architecture: str) -> str:
    """As the gguf package has it."""
    known = {squashed(name): name for name in MODEL_ARCH_NAMES.values()}
    return known.get(squashed(architecture), architecture)


def _add_names(names: dict[str, str], shapes: Iterable[str]) -> None:
    """Those that the gguf package's map lacks: of experts, which it has one by one, and others."""
    named = set(names.values())
    for parameter in shapes:
        layer = _LAYER.search(parameter)
        if parameter in named or layer is None:
            continue
        for end, tensors in rules()["names"].items():
            if parameter.endswith(end) and parameter[-len(end) - 1] in "._":
                for tensor in tensors:
                    names.setdefault(f"blk.{layer[1]}.{tensor}", parameter)
