"""A hanging engine: the stacks of all threads are written once for each hang."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from scripted_engine import REPLY, Scripted, make_scripted

from llmc import async_llm
from llmc.async_llm import AsyncLLM
from llmc.processes import watchdog
from llmc.sampling_params import SamplingParams

DUMP = "Current thread"


async def collect(llm: AsyncLLM) -> str:
    text = ""
    async for output in llm.generate("x", SamplingParams(max_tokens=200)):
        text = output.outputs[0].text
    return text


def make_llm(scripted: Scripted) -> AsyncLLM:
    return AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]


def test_the_stacks_are_written_once_for_each_hang(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "PAUSE_S", 0.01)
    scripted = make_scripted()
    released = threading.Event()
    execute = scripted.runner.execute

    def hang(plan: Any) -> Any:
        assert released.wait(60), "the test is gone"
        return execute(plan)

    monkeypatch.setattr(scripted.runner, "execute", hang)

    async def run(llm: AsyncLLM, *, hangs: bool) -> str:
        """What is written on stderr during one request."""
        monkeypatch.setattr(async_llm, "WATCHDOG_S", 0.05 if hangs else 60.0)
        released.clear() if hangs else released.set()
        task = asyncio.create_task(collect(llm))
        written, deadline = "", time.monotonic() + 30
        while hangs and DUMP not in written and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            written += capfd.readouterr().err
        await asyncio.sleep(0.2)  # time for a second dump, which must not come
        assert llm.is_stalled is hangs
        monkeypatch.setattr(async_llm, "WATCHDOG_S", 60.0)
        released.set()
        assert await task == REPLY
        return written + capfd.readouterr().err

    async def main() -> list[str]:
        llm = make_llm(scripted)
        written = [await run(llm, hangs=hangs) for hangs in (True, False, True)]
        await llm.shutdown()
        return written

    first, healthy, second = asyncio.run(main())
    for text in (first, second):
        assert text.count(DUMP) == 1, text
        assert "test_watchdog.py" in text and "in hang" in text  # where the engine hangs
    assert DUMP not in healthy


def test_an_idle_engine_is_no_hanging_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(async_llm, "WATCHDOG_S", 0.05)

    async def main() -> None:
        llm = make_llm(make_scripted())
        assert await collect(llm) == REPLY
        capfd.readouterr()  # a slow machine may have looked stalled while it worked
        await asyncio.sleep(0.2)
        assert not llm.is_stalled and llm.is_ready
        await llm.shutdown()

    asyncio.run(main())
    assert DUMP not in capfd.readouterr().err
