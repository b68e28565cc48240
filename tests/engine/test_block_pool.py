"""BlockPool: counts, sharing, eviction order, and that its own check finds damage."""

from __future__ import annotations

import pytest

from llmc.engine.kv.block_pool import BlockPool


def cached(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> bytes:
    """Take a block, publish it as the first block with these tokens, give it back."""
    digest = pool.chain_digest(pool.root_digest(salt), tokens)
    block = pool.allocate()
    pool.publish(block, digest)
    pool.free([block])
    return digest


def test_blocks_leave_in_order_and_come_back() -> None:
    pool = BlockPool(3, 4)
    blocks = [pool.allocate() for _ in range(3)]
    assert blocks == [0, 1, 2] and pool.num_free == 0
    pool.check([blocks])
    pool.free(blocks)
    assert pool.num_free == 3
    pool.check()


def test_a_shared_block_is_free_only_when_all_have_left() -> None:
    pool = BlockPool(2, 2)
    digest = cached(pool, [1, 2])
    [block] = pool.find_prefix([digest])
    assert pool.num_idle([block]) == 1
    pool.share([block])
    pool.share([block])
    assert pool.num_idle([block]) == 0 and pool.num_free == 1
    pool.check([[block], [block]])
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2
    assert pool.find_prefix([digest]) == [block]


def test_blank_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(3, 1)
    held = [pool.allocate() for _ in range(2)]
    root = pool.root_digest()
    digests = [pool.chain_digest(root, [n]) for n in range(2)]
    for block, digest in zip(held, digests, strict=True):
        pool.publish(block, digest)
    pool.free([held[1]])
    pool.free([held[0]])
    assert pool.allocate() == 2  # the blank one
    assert pool.allocate() == held[1]  # given back first
    assert pool.find_prefix(digests[1:]) == []
    assert pool.find_prefix(digests[:1]) == [held[0]]


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(2, 1)
    held = [pool.allocate(), pool.allocate()]
    first = pool.chain_digest(pool.root_digest(), [1])
    second = pool.chain_digest(first, [2])
    pool.publish(held[0], first)
    pool.publish(held[1], second)
    pool.free(held)
    assert pool.allocate() == held[1]
    assert pool.find_prefix([first, second]) == [held[0]]


def test_digests_depend_on_tokens_parents_and_salts() -> None:
    pool = BlockPool(1, 2)
    root = pool.root_digest()
    digests = {
        root,
        pool.root_digest(b"tenant"),
        pool.chain_digest(root, [1, 2]),
        pool.chain_digest(root, [2, 1]),
        pool.chain_digest(pool.root_digest(b"tenant"), [1, 2]),
        pool.chain_digest(pool.chain_digest(root, [1, 2]), [1, 2]),
    }
    assert len(digests) == 6 and {len(digest) for digest in digests} == {16}
    assert pool.chain_digest(root, [1, 2]) == BlockPool(9, 2).chain_digest(root, [1, 2])


def test_a_second_copy_stays_private() -> None:
    pool = BlockPool(2, 1)
    digest = pool.chain_digest(pool.root_digest(), [7])
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, digest)
    pool.publish(second, digest)
    assert pool.find_prefix([digest]) == [first]
    pool.free([first, second])
    pool.check()


def test_forgotten_blocks_are_not_found() -> None:
    pool = BlockPool(2, 1)
    digest = cached(pool, [7])
    [block] = pool.find_prefix([digest])
    pool.share([block])
    pool.forget([block])
    assert pool.find_prefix([digest]) == []
    pool.free([block])
    idle = cached(pool, [8])
    pool.forget(pool.find_prefix([idle]))
    assert pool.find_prefix([idle]) == []
    assert pool.num_free == 2
    pool.check()


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    pool = BlockPool(2, 1, enable_prefix_caching=False)
    digest = cached(pool, [7])
    pool.count_lookup(5, 0)
    assert pool.find_prefix([digest]) == [] and pool.num_queries == 0
    pool.check()


def test_giving_back_too_often_is_caught() -> None:
    pool = BlockPool(2, 1)
    block = pool.allocate()
    pool.free([block])
    with pytest.raises(AssertionError, match="block 0 was freed more often than allocated"):
        pool.free([block])


def test_check_finds_a_leak_and_a_double_owner() -> None:
    pool = BlockPool(2, 1)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check()
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([[block], [block]])
    with pytest.raises(AssertionError, match="twice"):
        pool.check([[block, block]])
    pool._blank.append(block)
    with pytest.raises(AssertionError, match="both free and in a table"):
        pool.check([[block]])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_blocks} and {block_size}"):
        BlockPool(num_blocks, block_size)
