"""The lock whose callers take turns."""

from __future__ import annotations

import asyncio

from llmc.frontend.turns import Turns


def test_callers_take_turns() -> None:
    """One who asks often delays the others by one turn each."""
    served: list[str] = []

    async def main() -> None:
        turns = Turns()

        async def ask(name: str) -> None:
            async with turns.turn(name[0]):
                served.append(name)
                await asyncio.sleep(0)

        names = ("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        await asyncio.gather(*(ask(name) for name in names))
        await asyncio.wait_for(ask("d1"), 1)

    asyncio.run(main())
    assert served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4", "d1"]


def test_a_cancelled_wait_keeps_no_turn() -> None:
    async def main() -> None:
        turns = Turns()
        waits: list[asyncio.Task[None]] = []

        async def ask() -> None:
            async with turns.turn("a"):
                pass

        async with turns.turn("a"):
            waits += [asyncio.create_task(ask()) for _ in range(3)]
            await asyncio.sleep(0)
            waits[0].cancel()  # while it waits
        waits[1].cancel()  # when its turn has come, before it runs
        await asyncio.wait(waits)
        assert [wait.cancelled() for wait in waits] == [True, True, False]
        await asyncio.wait_for(ask(), 1)

    asyncio.run(main())
