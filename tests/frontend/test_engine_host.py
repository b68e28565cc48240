"""One engine, several frontends: who gets what, and what happens to those that misbehave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="the server's dependencies are not installed")
pytest.importorskip("msgspec", reason="the server's dependencies are not installed")

import zmq
from scripted_engine import Scripted, make_scripted

from llmc.engine.messages import AbortRequest, AddRequest, EngineOutputs
from llmc.processes import engine_host, wire
from llmc.processes.engine_host import EngineHost, bind
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams

ADDRESS = "inproc://engine"
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


class Front:
    """A front by hand."""

    def __init__(self, context: Any, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(ADDRESS)
        self._read: wire.Unpacker[Any] = wire.Unpacker(wire.TO_FRONTEND)

    def say(self, message: Any) -> None:
        self.socket.send_multipart(wire.pack(message))

    def ask(self, request_id: str, sampling: SamplingParams = LONG) -> None:
        request = AddRequest(request_id=request_id, prompt_token_ids=[5, 6], sampling=sampling)
        self.say(request)

    def hear(self) -> list[Any]:
        found = []
        while self.socket.poll(0):
            found.append(self._read(self.socket.recv_multipart()))
        return found

    def updates(self) -> list[Any]:
        return [u for m in self.hear() if isinstance(m, EngineOutputs) for u in m.updates]


class Hosted:
    def __init__(self, context: Any) -> None:
        self.context = context
        self.scripted: Scripted = make_scripted(max_num_seqs=8)
        self.socket = bind(context, ADDRESS)
        self.host = EngineHost(self.scripted.engine, self.socket, lambda: False)
        self.fronts: list[Front] = []

    def front(self, name: str, *, hello: bool = True) -> Front:
        front = Front(self.context, name)
        self.fronts.append(front)
        if hello:
            front.say(wire.Hello())
        return front

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.host.turn()

    def check_empty(self) -> None:
        self.turns(3)
        stats = self.scripted.engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks
        self.scripted.engine.check()


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
    monkeypatch.setattr(engine_host, "IDLE_POLL_MS", 1)
    monkeypatch.setattr(engine_host, "MAX_UNREAD", 10)
    context = zmq.Context()
    hosted = Hosted(context)
    yield hosted
    for front in hosted.fronts:
        front.socket.close()
    hosted.socket.close()
    context.term()


def test_each_front_hears_of_its_own_requests(hosted: Hosted) -> None:
    first, second = hosted.front("api-0"), hosted.front("api-1")
    first.ask("a", SamplingParams(max_tokens=3))
    second.ask("b", SamplingParams(max_tokens=5))
    heard: dict[str, list[Any]] = {"a": [], "b": []}
    for _ in range(12):
        hosted.turns()
        heard["a"] += first.updates()
        heard["b"] += second.updates()
    for name, updates, count in (("a", heard["a"], 3), ("b", heard["b"], 5)):
        assert {u.request_id for u in updates} == {name}
        assert sum(len(u.new_token_ids) for u in updates) == count
        assert updates[-1].finish_reason == "length"
    hosted.check_empty()


def test_an_idle_front_hears_the_numbers(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_host, "IDLE_STATS_S", 0.0)
    busy, idle = hosted.front("api-0"), hosted.front("api-1")
    busy.ask("a", SamplingParams(max_tokens=3))
    for _ in range(8):
        hosted.turns()
        busy.hear()
    news = idle.hear()
    assert news[-1].stats.num_finished == 1 and news[-1].stats.num_running == 0
    assert all(not message.updates for message in news)
    hosted.turns(3)
    assert idle.hear() == []  # nothing is new


def test_a_refused_request_fails_alone(hosted: Hosted) -> None:
    front = hosted.front("api-0")
    front.ask("good", SamplingParams(max_tokens=2))
    front.ask("bad", SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
    updates = []
    for _ in range(6):
        hosted.turns()
        updates += front.updates()
    [bad] = [u for u in updates if u.request_id == "bad"]
    assert bad.finish_reason == "error" and "structured outputs are not available" in bad.error
    assert [u for u in updates if u.request_id == "good"][-1].finish_reason == "length"
    hosted.check_empty()


def test_a_frontend_aborts_only_its_own_requests(hosted: Hosted) -> None:
    first, second = hosted.front("api-0"), hosted.front("api-1")
    first.ask("a")
    hosted.turns(2)
    second.say(AbortRequest(request_id="a"))
    hosted.turns(2)
    assert hosted.scripted.engine.stats().num_running == 1
    first.say(AbortRequest(request_id="a"))
    first.say(AbortRequest(request_id="a"))  # too late is no error
    hosted.check_empty()


def test_a_dead_fronts_requests_are_freed(hosted: Hosted) -> None:
    main, dead = hosted.front("api-0"), hosted.front("api-1")
    dead.ask("a")
    dead.ask("b")
    main.ask("mine")
    hosted.turns(2)
    main.say(wire.FrontendGone(frontend="api-1"))
    hosted.turns(2)
    assert hosted.scripted.engine.stats().num_running == 1
    main.say(AbortRequest(request_id="mine"))
    hosted.check_empty()


def test_saying_hello_again_starts_afresh(hosted: Hosted) -> None:
    front = hosted.front("api-0")
    front.ask("a")
    hosted.turns(2)
    front.say(wire.Hello())
    hosted.check_empty()


def test_an_unknown_frontend_is_disconnected(hosted: Hosted) -> None:
    front = hosted.front("api-7", hello=False)
    front.ask("a")
    hosted.turns(2)
    assert front.hear() == [wire.Disconnected(reason="the engine does not know this frontend")]
    hosted.check_empty()


def test_another_version_gets_a_clear_answer(hosted: Hosted) -> None:
    good, other = hosted.front("api-0"), hosted.front("api-1", hello=False)
    other.socket.send_multipart([b"0.0.1-other", b"Hello", b"whatever"])
    hosted.turns(2)
    [refused] = other.hear()
    assert "0.0.1-other" in refused.reason and wire.VERSION in refused.reason
    good.ask("a", SamplingParams(max_tokens=1))
    hosted.turns(3)
    assert good.updates()[-1].finish_reason == "length"


def test_a_front_that_reads_nothing_loses_its_requests(hosted: Hosted) -> None:
    silent, good = hosted.front("api-0"), hosted.front("api-1")
    silent.ask("a")
    good.ask("b", SamplingParams(max_tokens=60, ignore_eos=True))
    tokens = 0
    for _ in range(70):
        hosted.turns()
        tokens += sum(len(u.new_token_ids) for u in good.updates())
    assert tokens == 60
    assert hosted.scripted.engine.stats().num_running == 0
    silent.hear()  # what it had not read
    hosted.turns(2)
    assert silent.hear()[-1] == wire.Disconnected(
        reason="this frontend has read nothing for a long time"
    )
    hosted.check_empty()


def test_a_front_that_is_gone_before_it_is_disconnected_harms_nobody(hosted: Hosted) -> None:
    silent, good = hosted.front("api-0"), hosted.front("api-1")
    silent.ask("a")
    good.ask("b", SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(40):
        hosted.turns()
        good.hear()
    assert hosted.scripted.engine.stats().num_running == 1  # the silent one's was dropped
    silent.socket.close()
    last: list[Any] = []
    for _ in range(40):
        hosted.turns()
        last = good.updates() or last
    assert last[-1].finish_reason == "length"
    hosted.check_empty()
