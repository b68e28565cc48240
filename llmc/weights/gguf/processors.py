"""What undoes the changes that the format's converter makes to a model's tensors.

transformers has a processor for most architectures: rows in another order, norms one higher,
matrices turned. Here is what those leave out, by rules.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llmc.weights.gguf.rules import rules, squashed


class Processed(NamedTuple):
    """`name` is None where the numbers were put among the parsed parameters."""

    weights: NDArray[Any]
    name: str | None


@dataclass(frozen=True, kw_only=True)
class Processor:
    """`inner` is transformers'.

    `grouped`: of this matrix the rows of queries, keys and values of all heads lie one after the
    other in a file, and by group of heads in the model. `interleaved`: experts' parameters are
    turned, and their gate and up matrices alternate row by row.
    """

    inner: Any
    grouped: str | None
    groups: int
    interleaved: bool

    def preprocess_name(self, hf_name: str) -> str:
        name: str = self.inner.preprocess_name(hf_name)
        return name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        self.inner.perform_fallback_tensor_mapping(gguf_to_hf_name_map, suffix, qual_name, hf_name)

    def process(self, weights: NDArray[Any], name: str, **kwargs: Any) -> Any:
        """Of one tensor; what makes up a parameter with another is put there half by half."""
        if self.grouped and f".{self.grouped}." in name:
            return Processed(self._by_group(weights), name)
        names = kwargs["tensor_key_mapping"]
        parameter = parameter_of(names, name)
        if parameter is not None and other_half(names, name) is not None:
            made = kwargs["parsed_parameters"]["tensors"]
            self._put(weights, name, made, parameter)
            return Processed(weights, None)
        if self.interleaved and "_exps.weight" in name:
            return Processed(weights.swapaxes(-1, -2), name)
        return self.inner.process(weights=weights, name=name, **kwargs)

    def _put(
        self, weights: NDArray[Any], name: str, made: dict[str, torch.Tensor], parameter: str
    ) -> None:
        """Into the first or the second half of the rows, or into every other one."""
        is_up = "_up_" in name
        rows = -1 if name.endswith(".bias") else -2
        half = torch.from_numpy(np.array(weights))
        length = half.shape[rows]
        if self.interleaved and rows == -2:
            half, rows = half.mT, -1
        if parameter not in made:
            shape = list(half.shape)
            shape[rows] = 2 * length
            made[parameter] = torch.zeros(shape, dtype=half.dtype)
        whole = made[parameter].movedim(rows, 0)
        place = (
            whole[is_up::2] if self.interleaved else whole[length * is_up : length * (is_up + 1)]
        )
        place.copy_(half.movedim(rows, 0))

    def _by_group(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Rows [q of all heads; k; v] -> for each group of heads its q, k and v."""
        heads = int(self.inner.config["num_attention_heads"])
        size = len(weights) // (heads + 2 * self.groups)
        rest = weights.shape[1:]
        q, k, v = np.split(weights, [heads * size, (heads + self.groups) * size])
        by_group = [part.reshape(self.groups, -1, *rest) for part in (q, k, v)]
        return np.concatenate(by_group, axis=1).reshape(-1, *rest)


def parameter_of(names: Mapping[str, str], tensor: str) -> str | None:
    """Some parameters, like those of experts, end without `.weight` or `.bias`."""
    ends = (name for name in (tensor, tensor.removesuffix(".weight"), tensor.removesuffix(".bias")))
    return next((names[name] for name in ends if name in names), None)


def other_half(names: Mapping[str, str], tensor: str) -> str | None:
    """The tensor that makes up a parameter together with this one; None where it is whole."""
    one, two = ("_gate_", "_up_") if "_gate_" in tensor else ("_up_", "_gate_")
    other = tensor.replace(one, two)
    parameter = parameter_of(names, tensor)
    is_pair = parameter is not None and parameter_of(names, other) == parameter
    return other if is_pair and other != tensor else None


def processor_of(architecture: str, fields: Mapping[str, Any]) -> Processor:
    """`fields` are those of the config, in the names that transformers' processors ask for."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    own = {squashed(name): rule for name, rule in rules()["architectures"].items()}
    rule = own.get(squashed(architecture), {})
    kinds = {squashed(name): kind for name, kind in TENSOR_PROCESSORS.items()}
    kind: Any = kinds.get(squashed(rule.get("processor", architecture)), TensorProcessor)
    heads = fields.get("num_attention_heads")
    return Processor(
        inner=kind(config=dict(fields)),
        grouped=rule.get("grouped"),
        groups=fields.get("num_key_value_heads") or heads or 1,
        interleaved=rule.get("interleaved", False),
    )
