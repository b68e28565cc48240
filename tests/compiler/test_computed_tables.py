"""Buffers that follow from the config are computed; others in a checkpoint are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_configs import tiny_config
from torch import Tensor, nn

from llmc.compiler.build import build, computed_tables
from llmc.errors import CheckpointError
from llmc.weights.load import DirectWeights, check_tables
from llmc.weights.parameters import describe_parameters


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4))
        self.register_buffer("begin", torch.empty(4))
        self.register_buffer("left_out", torch.empty(4), persistent=False)


class Drawn(Buffers):
    """One random number, and none of its buffers can be told from it."""


class Model(tf.PreTrainedModel):
    config_class = tf.PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.plain, self.drawn = Buffers(), Drawn()

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, Buffers):
            module.table.copy_(torch.arange(4) / 3)
            module.begin.fill_(1)[-1] = -1
        if isinstance(module, Drawn):
            module.table.add_(torch.randn(4))


def made(dtype: torch.dtype = torch.bfloat16) -> Model:
    with torch.device("meta"):
        return Model(tf.PretrainedConfig()).to(dtype)


def test_tables_are_what_the_initializer_computes_without_drawing() -> None:
    model = made()
    state = torch.get_rng_state()
    found = computed_tables(model)
    assert torch.equal(state, torch.get_rng_state())
    assert found.keys() == {"plain.table"}  # not what statistics begin with, and not drawn
    assert found["plain.table"].dtype == torch.float32
    assert torch.equal(found["plain.table"], torch.arange(4) / 3)
    assert {b.device.type for b in model.buffers()} == {"meta"}


def test_decays_of_a_model_are_tables_and_what_is_trained_is_none() -> None:
    built = build(tiny_config("minimax"), torch.bfloat16)
    slopes = built.buffers["model.layers.1.self_attn.slope_rate"]
    factor = 1 - 1 / (2 + 1e-5) + 1e-5
    want = 2.0 ** (-2.0 * torch.arange(1, 5)) * factor
    torch.testing.assert_close(slopes[:, 0, 0], want)
    trained = build(tiny_config("deepseek_v3"), torch.bfloat16)
    assert not any("bias" in name for name in trained.buffers)


class Stored:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, out: Tensor | None = None) -> Tensor:
        return self.tensor


def check(stored: Mapping[str, Tensor]) -> None:
    model = made()
    parameters = describe_parameters(model, computed_tables(model))
    assert parameters.tables == {"plain.table": pytest.approx(0.5)}
    readable: Any = {name: Stored(tensor) for name, tensor in stored.items()}
    check_tables(DirectWeights(parameters, readable), parameters.tables)


def test_a_checkpoint_may_hold_the_table_rounded_or_not_at_all() -> None:
    check({})
    check({"plain.table": (torch.arange(4) / 3).bfloat16()})


@pytest.mark.parametrize("other", [torch.arange(4) / 2, torch.full((4,), float("nan"))])
def test_a_checkpoint_with_another_table_is_refused(other: Tensor) -> None:
    with pytest.raises(
        CheckpointError, match=r"plain.table .* differs from the one computed from its config.json"
    ):
        check({"plain.table": other})
