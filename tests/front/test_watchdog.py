"""A hanging engine: the stacks of all threads are written once for each hang."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import make_scripted

from llmc import async_llm
from llmc.async_llm import AsyncLLM
from llmc.sampling_params import SamplingParams


def test_the_stacks_are_written_once_for_each_hang(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(async_llm, "WATCHDOG_S", 0.05)
    scripted = make_scripted()
    found: list[str] = []

    async def main() -> None:
        llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
        for delay_s in (0.5, 0.0, 0.5):
            scripted.runner.delay_s = delay_s
            async for _ in llm.generate("x", SamplingParams(max_tokens=1)):
                pass
            found.append(capfd.readouterr().err)
            assert llm.is_ready
        await llm.shutdown()

    asyncio.run(main())
    first, healthy, second = found
    for text in (first, second):
        assert text.count("Current thread") == 1, text
        assert "scripted_engine.py" in text and "execute" in text  # where it hangs
    assert "Current thread" not in healthy


def test_an_idle_engine_is_no_hanging_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(async_llm, "WATCHDOG_S", 0.05)
    scripted = make_scripted()

    async def main() -> None:
        llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
        async for _ in llm.generate("x", SamplingParams(max_tokens=1)):
            pass
        await asyncio.sleep(0.3)
        assert llm.is_ready
        await llm.shutdown()

    asyncio.run(main())
    assert "Current thread" not in capfd.readouterr().err
