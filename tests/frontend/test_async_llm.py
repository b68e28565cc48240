"""AsyncLLM: streaming, cancellation, the queue's limit, a dead engine, draining."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import REPLY, SCRIPTS, Scripted, make_scripted

from llmc import async_llm
from llmc.async_llm import AsyncLLM
from llmc.engine.messages import AddRequest
from llmc.errors import (
    EngineDeadError,
    EngineShutDownError,
    InvalidRequestError,
    QueueFullError,
)
from llmc.frontend import preparation
from llmc.outputs import RequestOutput
from llmc.processes.shared_counts import SharedCounts
from llmc.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=200)
Body = Callable[[AsyncLLM, Scripted], Awaitable[None]]


def run(body: Body, **options: Any) -> Scripted:
    """Runs `body` on a fresh AsyncLLM; afterwards nothing may be left in the engine."""
    scripted = make_scripted(**options)

    async def main() -> None:
        llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(body(llm, scripted), 30)
        finally:
            await llm.shutdown()

    asyncio.run(main())
    return scripted


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams = LONG) -> RequestOutput:
    last = None
    async for output in llm.generate(prompt, params):
        last = output
    assert last is not None
    return last


async def idle(llm: AsyncLLM, scripted: Scripted) -> None:
    """Waits for the engine to have given everything back."""
    for _ in range(500):
        stats = llm.stats()
        if not scripted.engine.has_work and stats.num_free_blocks == stats.num_blocks:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"blocks leaked: {llm.stats()}")


def test_outputs_grow_to_the_whole_text() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.002
        texts = []
        async for output in llm.generate("x", LONG):
            texts.append(output.outputs[0].text)
        assert texts[-1] == REPLY and len(texts) > 5
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
        await idle(llm, scripted)

    run(body)


def test_deltas_add_up_for_each_completion() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        source = await llm.prepare.prompt("count", SamplingParams(n=2, max_tokens=200, logprobs=1))
        texts, tokens, logprobs, ends = ["", ""], [0, 0], [0, 0], []
        async with llm.submit(source) as stream:
            while deltas := await stream.deltas():
                for _, delta in deltas:
                    texts[delta.index] += delta.text
                    tokens[delta.index] += len(delta.token_ids)
                    logprobs[delta.index] += len(delta.logprobs)
                    ends += [delta.finish_reason] if delta.finish_reason else []
        assert texts == ["one two three four five six seven eight nine ten"] * 2
        assert tokens == logprobs and ends == ["stop", "stop"]

    run(body)


def test_concurrent_requests_answer_as_alone() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        alone = [await collect(llm, p) for p in ("count", "emoji", "x")]
        prompts = ["count", "emoji", "x"] * 5
        together = await asyncio.gather(*(collect(llm, p) for p in prompts))
        for prompt_index, output in enumerate(together):
            assert output.outputs[0].text == alone[prompt_index % 3].outputs[0].text

    run(body)


@pytest.mark.parametrize("how", ["cancel", "break", "abort"])
def test_leaving_frees_the_blocks(how: str) -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.01
        endless = SamplingParams(max_tokens=240, ignore_eos=True)
        started = asyncio.Event()
        reasons = []

        async def consume() -> None:
            outputs = llm.generate("x", endless, "mine")
            async for output in outputs:
                reasons.append(output.outputs[0].finish_reason)
                started.set()
                if how == "break":
                    break
            await outputs.aclose()

        task = asyncio.create_task(consume())
        await started.wait()
        before = scripted.runner.num_steps
        if how == "cancel":
            task.cancel()
        elif how == "abort":
            llm.abort("mine")
        await asyncio.wait([task])
        await idle(llm, scripted)
        assert scripted.runner.num_steps - before <= 3
        assert how != "abort" or reasons[-1] == "abort"

    run(body)


def test_full_queue_refuses_and_recovers() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.005
        tasks = [asyncio.create_task(collect(llm, "x")) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 requests are waiting and the limit is 3"):
            await collect(llm, "x")
        assert all(output.finished for output in await asyncio.gather(*tasks))
        assert (await collect(llm, "x")).outputs[0].text == REPLY

    run(body, max_num_seqs=2, max_num_queued=3)


def test_a_full_queue_refuses_before_it_tokenizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An overload would cost CPU and delay the requests that were accepted."""
    encoded: list[str] = []

    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.005
        encode = scripted.tokenizer.encode

        def spy(text: str, **options: Any) -> list[int]:
            encoded.append(text)
            return encode(text, **options)

        monkeypatch.setattr(scripted.tokenizer, "encode", spy)
        accepted = [asyncio.create_task(collect(llm, "x")) for _ in range(3)]
        while llm.num_active < 3:
            await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests are waiting and the limit is 2"):
            await collect(llm, "refused")
        assert all(output.finished for output in await asyncio.gather(*accepted))

    run(body, max_num_seqs=1, max_num_queued=2)
    assert "x" in encoded and "refused" not in encoded


def test_calls_that_are_being_prepared_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing bounds the workers' own queue."""
    may_end = threading.Event()

    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        def slow(text: str, **options: Any) -> list[int]:
            assert may_end.wait(30)
            return [5]

        monkeypatch.setattr(scripted.tokenizer, "encode", slow)
        long = "x" * (preparation.LONG_TEXT + 1)
        tasks = [asyncio.create_task(collect(llm, long)) for _ in range(8)]
        refused, accepted = await asyncio.wait(tasks, timeout=1)
        assert len(accepted) == 3, "one row, and two that wait"
        assert all(isinstance(one.exception(), QueueFullError) for one in refused)
        full = pytest.raises(QueueFullError, match="3 calls are being prepared and the limit is 3")
        with full, llm.preparing(submits=False):
            raise AssertionError("not reached")
        may_end.set()
        assert all(output.finished for output in await asyncio.gather(*accepted))
        assert (await collect(llm, "x")).finished

    run(body, max_num_seqs=1, max_num_queued=2)


def test_calls_of_other_processes_count_as_waiting(tmp_path: Path) -> None:
    """The process next to this one is one that has died, once it is cleared."""

    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        llm.shared = SharedCounts(str(tmp_path), index=0, size=2)
        other = SharedCounts(str(tmp_path), index=1, size=2)
        other.write(num_preparing=1, num_sequences=2)
        with pytest.raises(QueueFullError, match="2 requests are waiting and the limit is 2"):
            await collect(llm, "x")
        other.write(num_preparing=0, num_sequences=2)
        assert (await collect(llm, "x")).finished
        assert other.others() == (0, 0), "it has ended"
        other.write(num_preparing=3, num_sequences=0)
        full = pytest.raises(QueueFullError, match="3 calls are being prepared and the limit is 3")
        with full, llm.preparing(submits=False):
            raise AssertionError("not reached")
        llm.shared.clear(1)
        with llm.preparing():
            assert other.others() == (1, 0)
        async with llm.submit(await llm.prepare.prompt("x", LONG)):
            assert other.others() == (0, 1)
        assert other.others() == (0, 0), "it was aborted"

    run(body, max_num_seqs=1, max_num_queued=2)


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "unused"])
def test_shutdown_ends_the_ranks(is_used: bool) -> None:
    scripted, ends = make_scripted(), threading.Event()
    scripted.end_ranks = ends.set  # type: ignore[method-assign]

    async def main() -> None:
        llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
        if is_used:
            await collect(llm, "x")
        await llm.shutdown()

    asyncio.run(main())
    assert ends.is_set()


def test_duplicate_request_id() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        source = await llm.prepare.prompt("x", LONG)
        async with llm.submit(source, request_id="same") as stream:
            with pytest.raises(InvalidRequestError, match="'same' is in use"):
                async with llm.submit(source, request_id="same"):
                    raise AssertionError("not reached")
            while await stream.deltas():
                pass
            assert stream.requests[0].output().outputs[0].text == REPLY

    run(body)


def test_what_is_still_under_way_for_an_id_does_not_reach_its_next_request() -> None:
    """The engine computes more tokens of a request that a stop string or its caller has ended."""

    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.001
        stopped = SamplingParams(max_tokens=200, stop="two")
        for _ in range(5):
            texts = []
            async for output in llm.generate("count", stopped, "again"):
                texts.append(output.outputs[0].text)
                time.sleep(0.01)  # the event loop is several steps behind
            assert texts[-1] == "one "
            left = llm.generate("x", LONG, "again")
            assert REPLY.startswith((await anext(left)).outputs[0].text)
            await left.aclose()

    run(body)


def test_an_id_that_looks_like_a_part_of_another_request_is_not_mistaken_for_it() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.002
        two = await llm.prepare.prompt("count", SamplingParams(n=2, max_tokens=200))
        one = await llm.prepare.prompt("x", LONG)
        async with (
            llm.submit(two, request_id="same") as first,
            llm.submit(one, request_id="same/0") as second,
        ):
            for stream in (first, second):
                while await stream.deltas():
                    pass
            assert [c.text for c in first.requests[0].output().outputs] == [SCRIPTS["count"]] * 2
            assert second.requests[0].output().outputs[0].text == REPLY

    run(body)


def test_a_request_that_the_engine_cannot_add_ends_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        add = scripted.engine.add

        def without_threads(message: AddRequest) -> None:
            if message.sampling.max_tokens == 7:
                raise RuntimeError("can't start new thread")
            add(message)

        monkeypatch.setattr(scripted.engine, "add", without_threads)
        failed, whole = await asyncio.gather(
            collect(llm, "x", SamplingParams(max_tokens=7)), collect(llm, "x")
        )
        assert failed.error == "RuntimeError: can't start new thread"
        assert whole.outputs[0].text == REPLY
        assert "could not be added" in caplog.text

    run(body)


def test_failed_step_ends_its_requests_and_no_others() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.fail_next = RuntimeError("boom")
        failed = await collect(llm, "x")
        assert failed.error is not None and "boom" in failed.error
        assert failed.outputs[0].finish_reason == "error"
        assert llm.is_ready
        assert (await collect(llm, "x")).outputs[0].text == REPLY
        await idle(llm, scripted)

    run(body)


def test_dead_engine_fails_everyone_and_turns_red() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.005
        tasks = [asyncio.create_task(collect(llm, "x")) for _ in range(6)]
        await asyncio.sleep(0.03)
        scripted.runner.fail_next = EngineDeadError("the device is lost")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) and "device is lost" in str(r) for r in results)
        assert not llm.is_ready
        with pytest.raises(EngineDeadError):
            llm.check_health()
        with pytest.raises(EngineDeadError):
            await collect(llm, "x")

    run(body)


def test_stalled_engine_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        monkeypatch.setattr(async_llm, "WATCHDOG_S", 0.05)
        scripted.runner.delay_s = 0.3
        task = asyncio.create_task(collect(llm, "x", SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.2)
        assert llm.is_stalled and not llm.is_ready
        await task
        assert llm.is_ready

    run(body)


def test_shutdown_waits_for_running_requests() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.002
        task = asyncio.create_task(collect(llm, "x"))
        await asyncio.sleep(0.02)
        stopping = asyncio.create_task(llm.shutdown(drain_timeout=20))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineShutDownError, match="shutting down"):
            await collect(llm, "x")
        await stopping
        assert (await task).outputs[0].text == REPLY

    run(body)


def test_shutdown_gives_up_after_its_timeout() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.delay_s = 0.02
        task = asyncio.create_task(
            collect(llm, "x", SamplingParams(max_tokens=240, ignore_eos=True))
        )
        await asyncio.sleep(0.05)
        await llm.shutdown(drain_timeout=0.05)
        with pytest.raises(EngineShutDownError, match="was shut down; send"):
            await task
        with pytest.raises(EngineShutDownError, match="was shut down"):
            llm.check_health()

    run(body)


def test_a_shutdown_does_not_hide_that_the_engine_was_dead() -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        scripted.runner.fail_next = EngineDeadError("the device is lost")
        with pytest.raises(EngineDeadError, match="device is lost"):
            await collect(llm, "x")
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="device is lost") as caught:
            llm.check_health()
        assert not isinstance(caught.value, EngineShutDownError)

    run(body)


def test_long_text_leaves_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        import threading

        threads = []
        encode = scripted.tokenizer.encode

        def spy(text: str, **options: Any) -> list[int]:
            threads.append(threading.current_thread() is threading.main_thread())
            return encode(text, **options)

        monkeypatch.setattr(scripted.tokenizer, "encode", spy)
        await llm.prepare.prompt("short", LONG)
        with pytest.raises(InvalidRequestError, match="context"):
            await llm.prepare.prompt("long " * 5000, LONG)
        assert threads == [True, False]

    run(body)


def test_the_wait_for_a_worker_does_not_count_as_the_templates_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long texts of others would make short conversations fail."""
    monkeypatch.setattr(preparation, "RENDER_TIMEOUT_S", 1.0)
    may_end = threading.Event()

    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        encode = scripted.tokenizer.encode

        def slow(text: str, *args: Any, **options: Any) -> list[int]:
            if len(text) > preparation.LONG_TEXT:
                may_end.wait(30)
            return encode(text[:10], *args, **options)

        monkeypatch.setattr(scripted.tokenizer, "encode", slow)
        ask = functools.partial(llm.prepare.chat, [{"role": "user", "content": "x"}], LONG)
        want = await ask()
        long = "x" * (preparation.LONG_TEXT + 1)
        others = [asyncio.create_task(llm.prepare.encode(long)) for _ in range(2)]
        await asyncio.sleep(0)
        asked = asyncio.create_task(ask())
        await asyncio.sleep(1.5)
        assert not asked.done()
        may_end.set()
        assert (await asked).prompt_token_ids == want.prompt_token_ids
        await asyncio.gather(*others)

    run(body)


def test_a_template_without_an_end_keeps_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts are worked on at once, so the second of three would be the last."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(preparation, "RENDER_TIMEOUT_S", 0.2)

    async def body(llm: AsyncLLM, scripted: Scripted) -> None:
        good, scripted.tokenizer.chat_template = scripted.tokenizer.chat_template, endless
        ask = functools.partial(llm.prepare.chat, [{"role": "user", "content": "x"}], LONG)
        try:
            for _ in range(3):
                with pytest.raises(InvalidRequestError, match="chat template took more than"):
                    await ask()
        finally:
            scripted.tokenizer.chat_template = good
        monkeypatch.setattr(preparation, "RENDER_TIMEOUT_S", 30.0)
        assert (await ask()).prompt_token_ids

    run(body)
