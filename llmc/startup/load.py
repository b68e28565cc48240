"""CompiledModel -> LoadedModel: the program's weights, read from the checkpoint or made up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llmc.compiler.program import Program, load_weights, open_weights
from llmc.runner import kv_cache
from llmc.startup.compile import CompiledModel, build_as_stored
from llmc.startup.resolve import ModelSource
from llmc.weights.load import DummyWeights, WeightSource
from llmc.weights.quantized.kept_quantized import tell_widened


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A program and its weights, ready to be given a cache."""

    source: ModelSource
    program: Program
    weights: dict[str, torch.Tensor]

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._distinct)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.numel() * weight.dtype.itemsize for weight in self._distinct)

    @property
    def state_bytes(self) -> int:
        """Of recurrent layers, for each request; 0 for a model with attention only."""
        return kv_cache.state_bytes(self.program.states)

    @property
    def _distinct(self) -> list[torch.Tensor]:
        return list({id(weight): weight for weight in self.weights.values()}.values())


def load_model(model: CompiledModel) -> LoadedModel:
    """Raises CheckpointError where the checkpoint lacks a weight, or has it in another shape."""
    source, program = model.source, model.program

    def make_module() -> nn.Module:
        return (model.built or build_as_stored(source)).module

    weights: WeightSource
    if source.is_dummy:
        weights = DummyWeights(source.config.seed)
    else:
        tensors = source.open_tensors()
        if source.stored is not None and source.config.quantization is None:
            tell_widened(tensors, (role for _, role in program.weight_inputs()))
        weights = open_weights(program, tensors, make_module)
    return LoadedModel(source=source, program=program, weights=load_weights(program, weights))
