"""tap_states: what enters some layers is written to caches, beside the keys and values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_graphs import Arg, Values, apply, roles, run, step, trace, weight
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.kernels.write_kv import write_kv
from llmc.passes.base import histogram
from llmc.passes.edit import calls
from llmc.passes.inputs import CacheInput, input_of
from llmc.passes.tap_states import tap_names, tap_states

GEN = torch.Generator().manual_seed(0)
COUNT, WIDTH, SIZE = 6, 8, 4
INPUTS: dict[str, Arg] = {
    "token_ids": step(torch.randint(0, 12, (5,), generator=GEN)),
    "embed": weight("embed", torch.randn(12, WIDTH, generator=GEN)),
    **{
        f"w{i}": weight(f"layers.{i}.weight", torch.randn(WIDTH, WIDTH, generator=GEN))
        for i in range(COUNT)
    },
    "head": weight("head", torch.randn(12, WIDTH, generator=GEN)),
}


def model(token_ids: Tensor, embed: Tensor, *weights: Tensor) -> Tensor:
    x = F.embedding(token_ids.unsqueeze(0), embed)
    for w in weights[:-1]:
        x = x + torch.tanh(F.linear(x, w))
    return F.linear(x, weights[-1])


def hidden_states() -> list[Tensor]:
    """What enters each layer, and what leaves the last."""
    tensors = [arg.tensor for arg in INPUTS.values()]
    x = F.embedding(tensors[0], tensors[1])
    states = [x]
    for w in tensors[2:-1]:
        states.append(states[-1] + torch.tanh(states[-1] @ w.T))
    return states


def tapped(*layers: int) -> fx.GraphModule:
    gm, _ = apply(trace(model, **INPUTS), tap_states(layers=layers, block_size=SIZE))
    return gm


@pytest.mark.parametrize("layers", [(), (1,), (2, 4, COUNT)])
def test_each_token_is_kept_in_its_slot(layers: tuple[int, ...]) -> None:
    gm = tapped(*layers)
    wanted = layers or (2, COUNT // 2, COUNT - 3)
    found = roles(gm, CacheInput)
    assert [role.layer for role in found if role.part == "key"] == list(range(len(wanted)))
    assert tap_names(gm.graph) == [f"tap_{i}" for i in range(len(wanted))]
    caches = {
        (r.layer, r.part): torch.full((3, 1, SIZE, WIDTH if r.part == "key" else 0), torch.nan)
        for r in found
    }
    slots = torch.tensor([9, 2, -1, 3, 0])
    values = Values.of(caches=caches, **INPUTS, slot_mapping=step(slots))
    plain = trace(model, **INPUTS)
    torch.testing.assert_close(run(gm, values), run(plain, values))
    states = hidden_states()
    for number, layer in enumerate(wanted):
        kept = caches[number, "key"].view(-1, WIDTH)
        live = slots >= 0
        torch.testing.assert_close(kept[slots[live]], states[layer][live])
        assert int(kept.isfinite().all(-1).sum()) == int(live.sum())


def test_nothing_else_changes() -> None:
    plain, gm = trace(model, **INPUTS), tapped(2, 3)
    added = histogram(gm) - histogram(plain)
    assert set(added) <= {
        "llmc.write_kv.default", "aten.squeeze.dim", "aten.unsqueeze.default", "aten.slice.Tensor"
    }  # fmt: skip
    assert added["llmc.write_kv.default"] == 2 and not histogram(plain) - histogram(gm)


def test_the_caches_follow_those_of_attention() -> None:
    """Of which a model has one a layer, numbered from 0."""

    def attending(key_cache: Tensor, token_ids: Tensor, *rest: Tensor) -> Tensor:
        return model(token_ids, *rest) + 0 * key_cache.sum()

    key = Arg(tensor=torch.zeros(1), role=CacheInput(layer=4, part="key"))
    gm, _ = apply(
        trace(attending, key_cache=key, **INPUTS), tap_states(layers=(1, 2), block_size=SIZE)
    )
    layers = [input_of(call.args[2]).layer for call in calls(gm.graph, write_kv.overload)]  # type: ignore[union-attr]
    assert layers == [5, 6]


@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 3, COUNT + 1)])
def test_a_layer_that_is_not_there(layers: tuple[int, ...]) -> None:
    with pytest.raises(CompileError, match="the model has 6 layers; heads can read from 1 to 6"):
        tapped(*layers)
