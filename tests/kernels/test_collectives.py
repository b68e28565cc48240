"""Collectives: the fast version against the reference, among ranks and alone."""

from __future__ import annotations

import json

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

from llmc.kernels.collectives import Group, all_gather, all_reduce, embed_shard, first_rank
from llmc.kernels.registry import Op

TURN = torch.zeros(1)


def _by_rank(group: Group, x: Tensor) -> Tensor:
    return x * (group.rank + 1) - group.rank


@pytest.mark.parametrize("op", [all_reduce, first_rank], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_fast_versions_equal_the_reference(op: Op, dtype: torch.dtype, size: int) -> None:
    cases = [x for maker in op.case_makers for x, _ in maker(torch.device("cpu"), dtype)]
    strided = torch.randn(4, 6).to(dtype).T

    def run(group: Group) -> list[tuple[Tensor, Tensor]]:
        given = [_by_rank(group, x) for x in (*cases, strided)]
        return [(op.run(x, TURN), op.reference(x, TURN)) for x in given]

    results = on_ranks(size, run)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for of_case in zip(*results, strict=True):
        first = of_case[0][0]
        for fast, reference in of_case:
            torch.testing.assert_close(fast, reference, **tolerance)
            assert torch.equal(fast, first), "ranks differ in bits"


def test_torch_records_no_collectives() -> None:
    """torch 2.11 has no lock on its record: the ranks of these tests crash in it now and then."""
    on_ranks(2, lambda group: all_reduce.run(torch.ones(1), TURN))
    record = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
    assert "pg_status" in record and not record.get("entries")


def test_the_sum_is_that_of_all_ranks() -> None:
    x = torch.arange(6.0).view(2, 3)
    results = on_ranks(4, lambda group: all_reduce.run(x + group.rank, TURN))
    assert all(torch.equal(result, 4 * x + 6) for result in results)
    assert all(
        torch.equal(result, x)
        for result in on_ranks(2, lambda group: first_rank.run(x + group.rank, TURN))
    )


def test_what_ranks_hold_side_by_side() -> None:
    x = torch.arange(6.0).view(2, 3)
    for result in on_ranks(3, lambda group: all_gather.run(x.T.T + group.rank, 3, TURN)):
        assert torch.equal(result, torch.cat((x, x + 1, x + 2), -1))
    assert torch.equal(all_gather.run(x, 2, TURN), torch.cat((x, x), -1))


def test_each_token_is_embedded_by_the_rank_that_holds_its_row() -> None:
    table, ids = torch.randn(12, 5), torch.tensor([[0, 3, 4, 11, 7]])

    def run(group: Group) -> Tensor:
        return embed_shard.run(ids, table[4 * group.rank :][:4])

    parts = on_ranks(3, run)
    assert torch.equal(torch.stack(parts).sum(0), table[ids])
    assert [int((part != 0).any(-1).sum()) for part in parts] == [2, 2, 1]
    alone = embed_shard.run(torch.tensor([11, 12, -1]), table)
    assert torch.equal(alone, torch.stack((table[11], torch.zeros(5), torch.zeros(5))))


@pytest.mark.parametrize("op", [all_reduce, first_rank], ids=lambda op: op.name)
def test_alone_it_is_a_copy(op: Op) -> None:
    x = torch.arange(5)
    for made in (op.run(x, TURN), op.reference(x, TURN)):
        assert torch.equal(made, x)
        assert made.data_ptr() != x.data_ptr()


def test_a_rank_that_does_not_come_is_an_error() -> None:
    def run(group: Group) -> str:
        if group.rank == 1:
            return "left"
        with pytest.raises(RuntimeError) as error:
            all_reduce.run(torch.ones(3), TURN)
        return str(error.value)

    message, left = on_ranks(2, run, timeout_s=2.0)
    assert left == "left" and message
