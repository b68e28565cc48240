"""Experts stored one by one under the parameters' names, as quantizers write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import make_config
from torch import Tensor

from llmc.weights.assignment import Assignment


@dataclass(frozen=True)
class InMemory:
    """A stored tensor."""

    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def read(self, out: Tensor | None = None) -> Tensor:
        return self.value if out is None else out.copy_(self.value)

    def equals(self, other: object) -> bool:
        return self == other


def without_decorator() -> Any:
    """A model whose stacks have their inputs first, without a flag that says so."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 2, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return tf.Llama4TextConfig(
        **sizes, **heads, num_hidden_layers=1, interleave_moe_layer_step=1, intermediate_size_mlp=32
    )


def separate(
    name: str, stack: Tensor, *, inputs_first: bool, alternates: bool
) -> dict[str, Tensor]:
    """A parameter's experts as the linears that quantizers make of them."""
    kind = "bias" if name.endswith("_bias") else "weight"
    path, _, parameter = name.removesuffix("_bias").rpartition(".")
    made = {}
    for number, channels in enumerate(stack):
        rows = channels.T if inputs_first and kind == "weight" else channels
        parts = {parameter: rows}
        if parameter == "gate_up_proj":
            gate, up = (rows[0::2], rows[1::2]) if alternates else rows.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up}
        made |= {f"{path}.{number}.{part}.{kind}": value for part, value in parts.items()}
    return made


@pytest.mark.parametrize(
    ("config", "inputs_first", "alternates"),
    [
        pytest.param(lambda: make_config("mixtral"), False, False, id="other-names"),
        pytest.param(lambda: make_config("gpt_oss"), True, True, id="alternating-with-biases"),
        pytest.param(without_decorator, True, False, id="inputs-first"),
    ],
)
def test_separate_experts_are_stacked(config: Any, inputs_first: bool, alternates: bool) -> None:
    model = tf.AutoModelForCausalLM.from_config(config())
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    stored, stacked = dict(state), []
    for name in state:
        path, _, parameter = name.rpartition(".")
        if path.endswith(".experts") and parameter.startswith(("gate_up_proj", "down_proj")):
            stack = stored.pop(name)
            stored |= separate(name, stack, inputs_first=inputs_first, alternates=alternates)
            stacked.append(name)
    found = Assignment(model, {name: InMemory(value) for name, value in stored.items()})
    assert not found.unexpected and stacked and set(found.converted) == set(stacked)
    for name in stacked:
        torch.testing.assert_close(found.convert(name)[name], state[name], rtol=0, atol=0)
