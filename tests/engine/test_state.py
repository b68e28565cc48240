"""What the engine says of itself to people who watch: it must agree with its books."""

from __future__ import annotations

import random

import pytest

from llmc.engine import state
from llmc.engine.kv.block_pool import BlockPool

BLANK, CACHED, USED, SHARED = range(4)


@pytest.mark.parametrize("max_cells", [1, 7, 40, 1000])
def test_the_map_of_the_pool_agrees_with_what_was_done_to_it(max_cells: int) -> None:
    rng = random.Random(max_cells)
    pool = BlockPool(40, 4)
    held: list[int] = []
    digests: list[bytes] = []
    states = [BLANK] * 40
    for step in range(400):
        if rng.random() < 0.5 and pool.num_free:
            held.append(pool.allocate())
            if rng.random() < 0.6:
                digests.append(step.to_bytes(4, "big"))
                pool.publish(held[-1], digests[-1])
        elif held:
            block = rng.choice(held)
            if rng.random() < 0.3:
                pool.share([block])
                held.append(block)
            else:
                held.remove(block)
                pool.free([block])
        drawn = pool.draw(max_cells)
        for block in range(40):
            uses = held.count(block)
            states[block] = min(uses + 1, SHARED) if uses else BLANK
        named = {pool.find(digest) for digest in digests} - {-1}
        cached = [block for block in named if states[block] == BLANK]
        for block in cached:
            states[block] = CACHED
        width = drawn.blocks_per_cell
        cells = [max(states[i : i + width]) for i in range(0, 40, width)]
        pairs = zip(drawn.runs[::2], drawn.runs[1::2], strict=True)
        assert [kind for kind, count in pairs for _ in range(count)] == cells
        assert len(cells) <= max_cells
        assert drawn.num_blank + drawn.num_cached + drawn.num_used == pool.num_blocks
        assert (drawn.num_cached, drawn.num_shared) == (len(cached), states.count(SHARED))
        assert drawn.num_saved == len(held) - len(set(held))


def test_runs_of_blocks() -> None:
    assert state.runs([]) == []
    assert state.runs([4, 5, 9, 8, 7]) == [4, 2, 9, 1, 8, 1, 7, 1]
