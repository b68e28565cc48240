"""What other ranks are told of an adapter in a slot is the parts that rank 0's own slots lack."""

from __future__ import annotations

import gc
import socket
import weakref
from pathlib import Path

import pytest
import torch

from llmc.errors import InvalidRequestError
from llmc.lora_request import LoRARequest
from llmc.passes.inputs import Shard
from llmc.runner.adapter_store import (
    AdapterStore,
    LoraTarget,
    LoraTargets,
    fill_slot,
    follow_slot_order,
    slot_orders,
    target_sizes,
)
from llmc.runner.ranks import receive
from llmc.weights.lora_places import LoraPlace, LoraSize
from llmc.weights.parameters import Parameters

SLOTS, RANK = 2, 4
UP, DOWN, EXPERTS = LoraPlace("up"), LoraPlace("down"), LoraPlace("experts", "experts")


def targets(ranks: int, dtype: torch.dtype) -> LoraTargets:
    """`up` by its 6 channels, `down` by its 6 inputs, experts' down by their 6 inputs; of NaN."""

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def shard(dim: int) -> Shard | None:
        return Shard(dim=dim, sections=((6, ranks),), size=ranks) if ranks > 1 else None

    own = 6 // ranks
    return {
        UP: [LoraTarget(a=nan(SLOTS, RANK, 3), b=nan(SLOTS, RANK, own), shard=shard(0))],
        DOWN: [LoraTarget(a=nan(SLOTS, RANK, own), b=nan(SLOTS, RANK, 3), shard=shard(1))],
        EXPERTS: [LoraTarget(a=nan(SLOTS, 2, RANK, own), b=nan(SLOTS, 2, RANK, 5), shard=shard(1))],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_have_the_parts_of_one(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {
        place: (torch.randn(a, generator=draw).to(dtype), torch.randn(b, generator=draw).to(dtype))
        for place, a, b in (
            (DOWN, (3, 6), (3, 3)),  # 27 values, no whole words of bfloat16
            (UP, (2, 3), (6, 2)),
            (EXPERTS, (2, 3, 6), (2, 5, 3)),
        )
    }
    whole, parts = targets(1, dtype), [targets(2, dtype) for _ in range(2)]
    assert target_sizes(whole) == target_sizes(parts[0])
    assert target_sizes(whole)[EXPERTS] == LoraSize(5, 6, RANK, 2)
    fill_slot(whole, 2, weights)
    fill_slot(parts[0], 2, weights)
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            for order in slot_orders(parts[0], 2, weights):
                ours.sendall(order.pack())
        while (told := receive(theirs)) is not None:
            follow_slot_order(parts[1], told, 1)
    for place, dim_a, dim_b in ((UP, None, -1), (DOWN, -1, None), (EXPERTS, -1, None)):
        (want,), got = whole[place], [one[place][0] for one in parts]
        for name, dim in (("a", dim_a), ("b", dim_b)):
            mine = [getattr(target, name)[1] for target in got]
            joined = mine[1] if dim is None else torch.cat(mine, dim)
            torch.testing.assert_close(joined, getattr(want, name)[1], equal_nan=True)
            assert getattr(got[1], name)[0].isnan().all()  # the other slot


def test_an_empty_slot_adds_nothing() -> None:
    """What an adapter has nothing on does not keep what an earlier one had."""
    parts = targets(2, torch.float32)
    order = next(slot_orders(parts, 1, {}))
    follow_slot_order(parts, order, 1)
    assert all(not one.b[0].any() for some in parts.values() for one in some)


def test_adapters_that_cannot_be_read_are_not_kept(tmp_path: Path) -> None:
    """A server gives each attempt to load one another number, and the error keeps what was read."""
    plain = Parameters(shapes={}, aliases={}, is_plain=True)
    store = AdapterStore(targets(1, torch.float32), plain, {}, num_slots=1, max_in_memory=1)
    failed = []
    for number in range(1, 4):
        adapter = LoRARequest("missing", number, str(tmp_path))
        future = store.begin(adapter, None)
        assert isinstance(future.exception(60), InvalidRequestError)
        failed.append(weakref.ref(future))
        del future
    gc.collect()
    assert [ref() is None for ref in failed] == [True, True, False]
