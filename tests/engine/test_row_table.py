"""RowTable: rows and blocks of requests that come, leave and come back."""

from __future__ import annotations

import pytest

from llmc.engine.kv.block_pool import BlockPool
from llmc.engine.kv.row_table import RowTable
from llmc.engine.request import Request
from llmc.sampling_params import SamplingParams


def request(name: str, prompt: list[int]) -> Request:
    return Request(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=99,
    )


def test_rows_are_given_smallest_first_and_released_once() -> None:
    table = RowTable(3, BlockPool(8, 2))
    requests = [request(name, [1, 2]) for name in "abc"]
    assert all(table.allocate(one, 0) for one in requests)
    assert [one.row for one in requests] == [0, 1, 2] and not table.num_free_rows
    for one in (requests[2], requests[0]):
        table.free(one)
    assert table.pop_released() == [0, 2] and table.pop_released() == []
    again = request("d", [1])
    assert table.allocate(again, 0) and again.row == 0
    table.release_again([0, 2])
    assert table.pop_released() == [2]
    table.check()


def test_room_counts_idle_shared_blocks_and_spare_ones() -> None:
    pool = BlockPool(3, 2)
    table = RowTable(2, pool)
    first = request("a", [1, 2, 3, 4, 5])
    assert table.allocate(first, 0)
    table.publish(first, 5)
    table.free(first)
    second = request("b", [1, 2, 3, 4, 5, 6])
    assert not table.allocate(second, 1)  # two cached and one new are all there is
    assert second.table.blocks == [] and pool.num_free == 3
    assert table.allocate(second, 0)
    assert second.num_computed == 4 and pool.num_free == 0
    assert table.pop_released() == [0]
    table.check()


def test_who_comes_back_publishes_its_blocks_anew() -> None:
    pool = BlockPool(4, 2)
    table = RowTable(1, pool)
    one = request("a", [1, 2, 3, 4, 5])
    assert table.allocate(one, 0)
    table.publish(one, 5)
    table.free(one)
    pool.free([pool.allocate() for _ in range(4)])  # others come and evict what was cached
    assert pool.find_prefix(one.table.digests) == []
    assert table.allocate(one, 0)
    assert one.num_computed == 0
    table.publish(one, 5)
    assert pool.find_prefix(one.table.digests) == one.table.blocks[:2]


def test_check_finds_a_wrong_row_and_a_wrong_capacity() -> None:
    table = RowTable(2, BlockPool(4, 2))
    one = request("a", [1, 2, 3])
    assert table.allocate(one, 0)
    table.check()
    one.table.capacity += 1
    with pytest.raises(AssertionError, match="'a' miscounts its blocks"):
        table.check()
    one.table.capacity -= 1
    one.row = 1
    with pytest.raises(AssertionError, match="'a' does not know its row 1"):
        table.check()
