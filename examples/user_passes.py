"""Your own graph passes: a steering vector, and a tap on a hidden state.

python examples/user_passes.py [MODEL]
llmc chat --extra-pass examples/user_passes.py:steer_default
llmc check --extra-pass examples/user_passes.py:steer_default
"""

import sys

import torch
from torch import Tensor, fx

from llmc import LLM, SamplingParams
from llmc.passes.base import Notes, Pass, graph_pass
from llmc.passes.edit import aten, insert_after
from llmc.passes.inputs import add_constant
from llmc.passes.layers import copy_out, layer_outputs


@graph_pass(changes_model=True)
def steer(gm: fx.GraphModule, *, layer: int, vector: Tensor) -> Notes:
    """Add a vector to the hidden state that leaves a layer.

    Before:
        h = what leaves the layer
    After:
        h = aten.add(what leaves the layer, vector)
    """
    hidden = layer_outputs(gm.graph)[layer]
    constant = add_constant(gm.graph, "steering", vector.to(hidden.meta["val"].dtype), hidden)
    insert_after(hidden, aten.add.Tensor, constant)
    return []


@graph_pass(cached=False)
def tap(gm: fx.GraphModule, *, layer: int, into: Tensor) -> Notes:
    """Copy the hidden state that leaves a layer to a tensor of the caller, at every step.

    Before:
        h = what leaves the layer
    After:
        into[:T].copy_(h)
    """
    copy_out(layer_outputs(gm.graph)[layer], into, "tapped")
    return []


def steer_default() -> Pass:
    """Called by `--extra-pass`: returns the pass with its options chosen."""
    return steer(layer=1, vector=torch.full((1,), 0.05))  # the same number for every channel


def main(model: str | None = None) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(model, opt_level=0, extra_passes=[steer_default()]) as llm:
        [output] = llm.generate("The capital of France is", sampling)
        print(repr(output.outputs[0].text))
        print([line for line in llm.info.pass_reports if "steer" in str(line)])


if __name__ == "__main__":
    main(*sys.argv[1:])
