"""Which engine a request goes to, and what becomes of the numbers of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the server's dependencies are not installed")

import scripted_process

from llmc.config import EngineConfig
from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    EngineStats,
    Operate,
    OperationResult,
    RequestUpdate,
)
from llmc.frontend import routing
from llmc.frontend.data_parallel import DataParallelLink
from llmc.frontend.engine_link import (
    EngineEvent,
    EngineLost,
    EngineStarted,
    Message,
    Processes,
    Publish,
    RequestsLost,
)
from llmc.sampling_params import SamplingParams

BLOCK = 16
INFO = scripted_process.model_info()
COUNTS = {f.name: 0 for f in dataclasses.fields(EngineStats) if f.name != "step_sizes"}


def stats(**values: int) -> EngineStats:
    return EngineStats(**{**COUNTS, "num_blocks": 256, "num_free_blocks": 256, **values})


def add(name: str, tokens: Sequence[int], **fields: Any) -> AddRequest:
    sampling = SamplingParams(max_tokens=4)
    return AddRequest(request_id=name, prompt_token_ids=tokens, sampling=sampling, **fields)


class Link:
    has_idle_engine = False

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.num_dumps = 0

    def open(self, publish: Publish) -> None:
        self.publish = publish
        publish(EngineStarted(info=INFO, stats=stats()))

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def dump_stacks(self) -> None:
        self.num_dumps += 1

    def processes(self) -> Processes:
        return Processes(pids={}, restarts={})

    async def close(self) -> None: ...

    def end(self, *names: str) -> None:
        updates = [RequestUpdate(request_id=n, finish_reason="stop") for n in names]
        self.publish(EngineOutputs(updates=updates, stats=stats()))

    @property
    def added(self) -> list[str]:
        return [m.request_id for m in self.sent if isinstance(m, AddRequest)]


class Engines:
    def __init__(self, number: int = 2, **config: Any) -> None:
        self.links = [Link() for _ in range(number)]
        named = {f"engine-{i}": link for i, link in enumerate(self.links)}
        self.link = DataParallelLink(named, EngineConfig(max_num_seqs=8, **config))
        self.events: list[EngineEvent] = []
        self.link.open(self.events.append)

    def add(self, name: str, tokens: Sequence[int], **fields: Any) -> int:
        """-> the number of the engine that got it."""
        self.link.send(add(name, tokens, **fields))
        return next(i for i, link in enumerate(self.links) if name in link.added)


def prompt(first: int, num_blocks: int) -> list[int]:
    return [first + i % 7 for i in range(num_blocks * BLOCK)]


def test_requests_without_a_common_prefix_are_dealt_out() -> None:
    engines = Engines(3)
    assert [engines.add(f"r{i}", prompt(10 * i, 4)) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_idle_engines_fill_their_caches_evenly() -> None:
    engines = Engines()
    chosen = []
    for i in range(4):
        chosen.append(engines.add(f"r{i}", prompt(10 * i, 4)))
        engines.links[chosen[-1]].end(f"r{i}")
    assert chosen == [0, 1, 0, 1]


def test_a_request_follows_its_prefix_until_that_costs_more_than_it_saves() -> None:
    engines = Engines()
    turns = [prompt(10, 6), prompt(10, 6) + prompt(50, 1)]
    assert engines.add("first", turns[0]) == 0
    engines.links[0].end("first")
    assert engines.add("other", prompt(90, 4)) == 1
    engines.links[1].end("other")
    assert engines.add("second", turns[1]) == 0  # whose cache is the fuller one
    engines.links[0].end("second")
    # Work of 5 blocks waits there, and the prefix saves 7.
    assert engines.add("busy", prompt(10, 6) + prompt(100, 4)) == 0
    assert engines.add("third", turns[1]) == 0
    assert engines.add("fourth", turns[1]) == 0
    # Each of these added one, and that is where it breaks even.
    assert engines.add("fifth", turns[1]) == 1


@pytest.mark.parametrize("apart", [{"cache_salt": "mine"}, {"tokens": prompt(11, 6)}])
def test_what_shares_no_cache_shares_no_prefix(apart: Any) -> None:
    engines = Engines()
    assert engines.add("first", prompt(10, 6)) == 0
    engines.links[0].end("first")
    fields = {"tokens": prompt(10, 6), **apart}
    assert engines.add("second", fields.pop("tokens"), **fields) == 1


def test_without_prefix_caching_there_is_no_affinity() -> None:
    engines = Engines(enable_prefix_caching=False)
    assert [engines.add(f"r{i}", prompt(10, 6)) for i in range(4)] == [0, 1, 0, 1]


def test_an_engine_without_free_blocks_is_avoided() -> None:
    engines = Engines()
    engines.links[0].publish(EngineOutputs(updates=(), stats=stats(num_free_blocks=2)))
    assert [engines.add(f"r{i}", prompt(10 * i, 4)) for i in range(3)] == [1, 1, 1]
    engines.links[1].publish(EngineOutputs(updates=(), stats=stats(num_waiting=1)))
    assert engines.add("any", prompt(90, 4)) == 0  # neither has room: the one with less to do


def test_an_engine_that_cannot_hold_a_request_is_avoided() -> None:
    engines = Engines(2)
    small = dataclasses.replace(INFO, pool_tokens=40)
    engines.links[0].publish(EngineStarted(info=small, stats=stats()))
    for i in range(3):
        engines.link.send(add(f"r{i}", range(40)))
    assert engines.links[1].added == ["r0", "r1", "r2"]


def test_the_completions_of_a_prompt_stay_together() -> None:
    engines = Engines()
    assert engines.add("r/0", prompt(10, 4)) == 0
    assert [engines.add(f"r/{i}", prompt(10, 4), fork_of="r/0") for i in (1, 2, 3)] == [0, 0, 0]


def test_a_quiet_engine_gets_no_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    assert engines.add("hangs", [1]) == 0
    monkeypatch.setattr(routing, "QUIET_S", -1.0)
    assert engines.link.has_idle_engine
    assert engines.add("other", prompt(20, 20)) == 1
    engines.links[1].end("other")
    assert engines.add("next", prompt(30, 20)) == 1
    assert engines.links[0].num_dumps == 1


def test_a_lost_engine_takes_its_own_requests_along() -> None:
    engines = Engines()
    for i in range(4):
        engines.add(f"r{i}", prompt(10 * i, 4))
    engines.links[0].publish(EngineOutputs(updates=(), stats=stats(num_finished=5, num_running=2)))
    engines.events.clear()
    engines.links[0].publish(EngineLost(reason="it was killed", is_final=False))
    lost, outputs = engines.events
    assert lost == RequestsLost(request_ids=["r0", "r2"], reason="engine-0: it was killed")
    assert isinstance(outputs, EngineOutputs)
    assert outputs.stats.num_finished == 5 and outputs.stats.num_running == 0
    assert outputs.stats.num_blocks == 256
    assert [engines.add(f"s{i}", prompt(100 + 10 * i, 4)) for i in range(3)] == [1, 1, 1]
    assert engines.link.processes().engines["engine-0"] is None

    engines.links[0].publish(EngineStarted(info=INFO, stats=stats(num_finished=1)))
    back = engines.events[-1]
    assert isinstance(back, EngineOutputs) and back.stats.num_finished == 6
    assert engines.add("t", prompt(10, 4)) == 0


def test_no_engine_left_is_the_end_of_all_requests() -> None:
    engines = Engines()
    engines.links[0].publish(EngineLost(reason="killed", is_final=True))
    engines.links[1].publish(EngineLost(reason="killed too", is_final=False))
    assert engines.events[-1] == EngineLost(reason="killed too", is_final=False)
    engines.links[1].publish(EngineStarted(info=INFO, stats=stats()))
    assert isinstance(engines.events[-1], EngineStarted)
    engines.links[1].publish(EngineLost(reason="too often", is_final=True))
    assert engines.events[-1] == EngineLost(reason="too often", is_final=True)


def test_an_operators_order_is_done_when_all_have_done_it() -> None:
    engines = Engines()
    engines.link.send(Operate(number=3, operation="reset_prefix_cache"))
    engines.links[0].publish(OperationResult(number=3, result="done"))
    assert not any(isinstance(event, OperationResult) for event in engines.events)
    engines.links[1].publish(OperationResult(number=3, result="done"))
    assert engines.events[-1] == OperationResult(number=3, result="done")

    engines.link.send(Operate(number=4, operation="start_profile"))
    engines.links[1].publish(OperationResult(number=4, result="recording"))
    engines.links[0].publish(EngineLost(reason="killed", is_final=False))
    failed = engines.events[-1]
    assert isinstance(failed, OperationResult) and "engine-0" in (failed.error or "")


def test_an_abort_reaches_the_engine_of_its_request() -> None:
    engines = Engines()
    engines.add("r0", prompt(10, 4))
    engines.add("r1", prompt(20, 4))
    engines.link.send(AbortRequest(request_id="r1"))
    engines.link.send(AbortRequest(request_id="unknown"))
    assert engines.links[1].sent[-1] == AbortRequest(request_id="r1")
    assert not any(isinstance(m, AbortRequest) for m in engines.links[0].sent)
    assert engines.link.has_idle_engine
