"""group_caches: layers of different windows write to shared caches, by separate block tables."""

from __future__ import annotations

import pytest
import torch
from tiny_graphs import Values, apply, assert_idempotent, cache, roles, run, step, trace
from torch import Tensor, fx

from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.write_kv import write_kv
from llmc.passes.group_caches import CacheGroup, cache_groups, group_caches, group_size
from llmc.passes.inputs import CacheInput, StepInput

HEADS, DIM, SIZE, BLOCKS, TOKENS = 2, 8, 4, 3, 10
GROUP = group_caches(max_positions=64)


def layers(windows: list[int], dims: list[int] | None = None) -> fx.GraphModule:
    """One write and one attention per layer, over caches and block tables."""
    dims = dims or [DIM] * len(windows)

    def model(
        token_ids: Tensor,
        x: Tensor,
        slot_mapping: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        *caches: Tensor,
    ) -> Tensor:
        out = x.sum()
        for i, (window, dim) in enumerate(zip(windows, dims, strict=True)):
            pair = caches[2 * i : 2 * i + 2]
            heads = x[:, :, :dim] * (i + 1)
            write_kv.overload(heads, heads, *pair, slot_mapping)
            where = (query_start, context_len, block_table)
            seen = paged_attention.overload(heads, *pair, *where, 0.5, window, 0, 0.0, None, None)
            out = out + seen.sum() * 10**i
        return out

    inputs = {
        "token_ids": step(torch.arange(TOKENS)),
        "x": step(torch.randn(TOKENS, HEADS, DIM)),
        "slot_mapping": step(torch.zeros(TOKENS, dtype=torch.long)),
        "query_start": step(torch.tensor([0, TOKENS], dtype=torch.int32), dynamic=None),
        "context_len": step(torch.tensor([TOKENS], dtype=torch.int32), dynamic=None),
        "block_table": step(torch.zeros(1, BLOCKS, dtype=torch.int32), dynamic=None),
    }
    for i, dim in enumerate(dims):
        for part in ("key", "value"):
            one = cache(i, part)
            shaped = torch.empty(2, HEADS, SIZE, dim)
            inputs[f"{part}_{i}"] = type(one)(tensor=shaped, role=one.role)
    return trace(model, **inputs)


def values(num_groups: int, num_caches: int) -> Values:
    """Caches full of NaN; each group has every `num_groups`-th block."""
    numbers = torch.arange(BLOCKS, dtype=torch.int32)
    position = torch.arange(TOKENS)
    given: dict[str, Tensor] = {
        "token_ids": position,
        "x": torch.linspace(-1, 1, TOKENS * HEADS * DIM).view(TOKENS, HEADS, DIM),
        "query_start": torch.tensor([0, TOKENS], dtype=torch.int32),
        "context_len": torch.tensor([TOKENS], dtype=torch.int32),
    }
    for group in range(num_groups):
        table = numbers * num_groups + group
        suffix = f"_{group}" if group else ""
        given[f"block_table{suffix}"] = table[None]
        given[f"slot_mapping{suffix}"] = table[position // SIZE].long() * SIZE + position % SIZE
    shape = (BLOCKS * num_groups, HEADS, SIZE, DIM)
    caches = {
        (i, part): torch.full(shape, float("nan"))
        for i in range(num_caches)
        for part in ("key", "value")
    }
    return Values(step=given, weights={}, caches=caches)


@pytest.mark.parametrize(
    ("windows", "groups", "num_caches"),
    [
        (
            [0, 3],
            [
                CacheGroup(window=0, chunk=0, num_layers=1),
                CacheGroup(window=3, chunk=0, num_layers=1),
            ],
            1,
        ),
        (
            [3, 3, 0, 3, 3, 0],
            [
                CacheGroup(window=0, chunk=0, num_layers=2),
                CacheGroup(window=3, chunk=0, num_layers=2),
                CacheGroup(window=3, chunk=0, num_layers=2),
            ],
            2,
        ),
        (
            [5, 5, *[3] * 15],  # the first group has one place to spare
            [
                CacheGroup(window=5, chunk=0, num_layers=2),
                *[CacheGroup(window=3, chunk=0, num_layers=3)] * 5,
            ],
            3,
        ),
    ],
)
def test_groups_share_caches_and_give_the_same_numbers(
    windows: list[int], groups: list[CacheGroup], num_caches: int
) -> None:
    gm = layers(windows)
    grouped, (report,) = apply(gm, GROUP)
    assert list(cache_groups(grouped.graph)) == groups and len(report.notes) == 2
    assert {role.layer for role in roles(grouped, CacheInput)} == set(range(num_caches))
    got = run(grouped, values(len(groups), num_caches))
    want = run(gm, values(1, len(windows)))
    assert torch.isfinite(want)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert_idempotent(gm, GROUP)


@pytest.mark.parametrize(
    ("windows", "dims", "why"),
    [
        ([0, 0], None, "all layers have the same attention window"),
        ([4, 4], None, "all layers have the same attention window"),
        ([0, 64], None, "all layers have the same attention window"),  # no sequence is longer
        ([0, 3], [8, 4], "caches of 2 shapes can't share blocks"),
        (list(range(1, 11)), None, "layers with 10 different windows would need too many groups"),
    ],
)
def test_what_is_left_alone(windows: list[int], dims: list[int] | None, why: str) -> None:
    gm = layers(windows, dims)
    same, (report,) = apply(gm, GROUP)
    assert list(report.notes) == [why]
    assert [str(n) for n in same.graph.nodes] == [str(n) for n in gm.graph.nodes]
    assert len(cache_groups(same.graph)) == 1


def test_a_window_of_all_layers_is_read_off_the_graph() -> None:
    (group,) = cache_groups(layers([4, 6]).graph)
    assert group == CacheGroup(window=6, chunk=0, num_layers=2)
    (group,) = cache_groups(layers([4, 0]).graph)
    assert group.window == 0


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ([12, 12], 12),
        ([4, 22], 4),
        ([10, 52], 10),
        ([8, 24], 8),
        ([1, 1], 1),
        ([7], 7),
        ([3, 15], 3),
    ],
)
def test_groups_are_full_where_most_is_seen(counts: list[int], size: int) -> None:
    assert group_size(counts) == size


def test_names_of_the_step_inputs() -> None:
    grouped, _ = apply(layers([0, 3]), GROUP)
    names = {role.name for role in roles(grouped, StepInput)}
    assert {"slot_mapping", "slot_mapping_1", "block_table", "block_table_1"} <= names
