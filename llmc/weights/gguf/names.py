"""Which tensors of a GGUF file make up each parameter, by transformers' and gguf's name maps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmc.errors import CheckpointError, reason_of
from llmc.weights.gguf.config import FACTORS
from llmc.weights.gguf.reader import GgufHeader

log = logging.getLogger(__name__)

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMap:
    """`parts`: parameter -> tensors that make it up.

    `names`: transformers' map, tensor -> parameter; routed experts stand there without `.weight`.
    """

    parts: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]


def map_parameters(header: GgufHeader, hf_config: Any, fields: Mapping[str, Any]) -> ParameterMap:
    """Builds the model without weights, for its names and shapes."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(hf_config)
        names = get_gguf_hf_weights_map(module, processor_of(header.architecture, fields))
    except Exception as e:  # constructors and maps raise nearly every type
        raise CheckpointError(
            f"transformers can't build a model of what {header.files[0].name} says: {reason_of(e)}"
        ) from e
    shapes = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    if "lm_head.weight" in shapes:  # a module that ties it has no name for a separate head
        names.setdefault("output.weight", "lm_head.weight")
    parts: dict[str, list[str]] = {}
    unknown = []
    for name in header.tensors:
        parameter = names.get(name) or names.get(name.removesuffix(_WEIGHT))
        if parameter in shapes:
            parts.setdefault(parameter, []).append(name)
        elif name not in FACTORS:
            unknown.append(name)
    if unknown:
        log.warning(
            "%d tensors of %s have no place in the model: %s",
            len(unknown),
            header.files[0].name,
            ", ".join(unknown[:5]),
        )
    return ParameterMap(parts={n: tuple(p) for n, p in parts.items()}, shapes=shapes, names=names)


def processor_of(architecture: str, fields: Mapping[str, Any]) -> Any:
    """What undoes the changes that the format's converter makes to an architecture's tensors.

    Rows in another order, norms one higher, matrices turned.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    squashed = {k.replace("-", "").replace("_", ""): p for k, p in TENSOR_PROCESSORS.items()}
    kind: Any = squashed.get(architecture.replace("-", "").replace("_", ""), TensorProcessor)
    return kind(config=dict(fields))
