"""The table of bad inputs and faults, rows 1 to 61 of the project's reliability notes.

A row is probed here with bytes on a socket, or tested elsewhere by name, or left out with the
reason; often it is two of these. After each probe the canary rule holds: a good request is
answered as ever, and no block, request, task or file descriptor is kept, nor is anything in the
log but lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from live_server import Live, live_server, read_answer
from reliability_probes import COMPLETIONS, PROBES, Probe, head, post, sent
from reliability_rows import ELSEWHERE, LEFT_OUT, ROWS
from scripted_engine import SCRIPTS, make_hf_tokenizer

import llmc
from llmc.server.settings import ServerSettings

TESTS = Path(__file__).parents[1]


@dataclass(kw_only=True)
class Canary:
    """Knows what an undisturbed server answers and holds."""

    live: Live
    loop: asyncio.AbstractEventLoop
    golden: bytes
    log: list[logging.LogRecord]
    fds: int = 0
    tasks: int = 0
    most_lines: int = 1  # of warning that a probe may cause

    def count_fds(self) -> int:
        return psutil.Process().num_fds()

    def count_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(10)

    def ask(self) -> bytes:
        """The choices of a greedy answer, on a connection of its own."""
        answer = self.live.raw(post({"prompt": "count", "max_tokens": 20, "temperature": 0}))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), answer
        return json.dumps(json.loads(body)["choices"]).encode()

    def check(self) -> None:
        self.live.wait_idle()
        assert self.ask() == self.golden
        assert self.live.client.get("/health").status_code == 200
        self.live.wait_idle()
        assert self.live.llm.num_active == 0
        wait_until(lambda: self.count_fds() <= self.fds, "file descriptors are kept")
        wait_until(lambda: self.count_tasks() <= self.tasks, "tasks are kept")
        said, self.log[:] = self.log[:], []
        alarms = [one.getMessage() for one in said if one.exc_info or one.levelno >= logging.ERROR]
        assert alarms == [] and len(said) <= self.most_lines


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    settings = ServerSettings(body_timeout_s=0.5)
    with live_server(settings, max_num_queued=400) as live:
        log: list[logging.LogRecord] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = log.append  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        live.complete()
        # the process that tries grammars stays
        live.post(COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "a"}})
        loop = live.llm._loop
        assert loop is not None
        canary = Canary(live=live, loop=loop, golden=b"", log=log)
        canary.golden = canary.ask()
        live.client.get("/health")
        live.wait_idle()
        time.sleep(0.1)  # the connection of the last question is being closed
        canary.fds, canary.tasks = canary.count_fds(), canary.count_tasks()
        yield canary
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("probe", PROBES, ids=[f"{p.row} {p.name}" for p in PROBES])
def test_probe(canary: Canary, probe: Probe) -> None:
    answer = canary.live.raw(*probe.parts)
    status = int(answer.split(b" ", 2)[1]) if answer else 0
    assert status in probe.expected, answer[:500]
    if status >= 400:
        assert len(answer) < 6000
        body = answer.rpartition(b"\r\n\r\n")[2]
        if body.startswith(b"{"):  # what is no HTTP at all is answered without a body of ours
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert b".py" not in body and b"Traceback" not in body
    canary.check()


# ---- row 26: many grammars ----


def test_only_so_many_grammars_are_kept() -> None:
    from llmc.structured import grammars
    from llmc.structured.vocabulary import Vocabulary
    from llmc.structured_outputs import StructuredOutputsParams
    from llmc.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(make_hf_tokenizer())
    kept = grammars.Grammars.load(Vocabulary.of(tokenizer, vocab_size=400, eos_token_ids=[1]))
    specs = [StructuredOutputsParams(regex=f"a{{{i}}}") for i in range(1, 2 * grammars._MAX_KEPT)]
    for spec in specs:
        kept.start(spec)
    assert len(kept._kept) == grammars._MAX_KEPT
    assert kept.copy_kept(specs[0]) is None and kept.copy_kept(specs[-1]) is not None


# ---- row 30: a template that comes with the model ----


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ nothing.at.all }}",
        "{{ messages.append(1) }}",
        "{% for %}",
        "{{ 'x' * 300000 }}",
    ],
)
def test_template_that_misbehaves(canary: Canary, template: str) -> None:
    tokenizer = canary.live.scripted.tokenizer
    good, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        answer = canary.live.chat(max_tokens=3)
    finally:
        tokenizer.chat_template = good
    assert answer.status_code == 400, answer.text
    assert canary.live.chat(max_tokens=3).status_code == 200
    canary.check()


# ---- row 33: one id for two ----


def test_two_requests_of_one_id_are_both_served(canary: Canary) -> None:
    message = sent(
        json.dumps({"prompt": "count", "max_tokens": 20}).encode(), COMPLETIONS, "X-Request-Id: a"
    )
    with canary.live.connect() as one, canary.live.connect() as two:
        for sock in (one, two):
            sock.sendall(message)
        answers = [read_answer(sock) for sock in (one, two)]
    assert all(b"HTTP/1.1 200" in answer and b"x-request-id: a" in answer for answer in answers)
    canary.check()


# ---- rows 41, 42, 44, 46: many connections ----


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /health HT", head(COMPLETIONS, "Content-Length: 20") + b'{"pr'],
    ids=["idle", "inside the head", "inside the body"],
)
def test_a_crowd_of_silent_connections(canary: Canary, said: bytes) -> None:
    crowd = [canary.live.connect() for _ in range(150)]
    try:
        for sock in crowd:
            sock.sendall(said)
        assert canary.ask() == canary.golden
    finally:
        for sock in crowd:
            sock.close()
    canary.check()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_crowd_that_leaves_at_once(canary: Canary, stream: bool) -> None:
    asked = post({"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 2})
    crowd = [canary.live.connect() for _ in range(100)]
    for sock in crowd:
        sock.sendall(asked)
    for sock in crowd:
        sock.close()
    canary.check()


def test_half_closed_connection_is_answered_or_closed(canary: Canary) -> None:
    with canary.live.connect() as sock:
        sock.sendall(post({"prompt": "count", "max_tokens": 3}))
        sock.shutdown(socket.SHUT_WR)
        answer = read_answer(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
    canary.check()


# ---- row 48: noise ----


def test_noise_on_the_wire(canary: Canary) -> None:
    """Good requests with bytes changed, cut, doubled and put in: never a 5xx, never a hang."""
    rng = random.Random(48)
    good = [
        post({"prompt": "count", "max_tokens": 3, "stop": ["x"], "logit_bias": {"3": 1.5}}),
        post({"messages": [{"role": "user", "content": "count"}]}, "/v1/chat/completions"),
        head("/v1/models", "Connection: close", method="GET"),
    ]
    statuses: Counter[int] = Counter()
    for _ in range(250):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del data[at : at + rng.randrange(20)]
                case 2:
                    data[at:at] = data[at : at + 30]
                case 3:
                    data[at:at] = rng.choice([b"\x00", b"\r\n", b"\xff", b"[", b'"', b"1e999"])
        with canary.live.connect() as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = read_answer(sock)
        statuses[int(answer.split(b" ", 2)[1]) if answer else 0] += 1
    assert all(status < 500 for status in statuses), statuses
    assert statuses[200] > 5 and statuses[400] > 50, statuses
    canary.most_lines = 250
    canary.check()
    canary.most_lines = 1


# ---- row 59: no memory, and row 60: a loop that stands still ----


def test_memory_that_runs_out_in_a_step_ends_its_request_alone(canary: Canary) -> None:
    live = canary.live
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.scripted.runner, "fail_next", MemoryError("no more"))
        failed = live.complete()
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "engine_error"
    assert [one for one in canary.log if one.levelno >= logging.ERROR]
    canary.log.clear()
    canary.check()


def test_a_loop_that_stands_still_loses_nothing(canary: Canary) -> None:
    live = canary.live
    live.scripted.runner.delay_s = 0.01
    try:
        canary.loop.call_later(0.05, time.sleep, 0.5)
        events = live.events(COMPLETIONS, {"prompt": "count", "max_tokens": 100})
    finally:
        live.scripted.runner.delay_s = 0.0
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == SCRIPTS["count"]
    canary.check()


def test_durations_are_taken_from_a_clock_that_never_jumps() -> None:
    """Wall time is for `created` and `expires`, which clients read as dates and which outlast a
    restart, and for ages of files, whose times are wall times."""
    package = Path(llmc.__file__).parent
    wall = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for line in path.read_text().splitlines()
        if "time.time(" in line
        and not any(date in line for date in ("created", "expires", "st_mtime", "last_accessed"))
    ]
    assert wall == []


# ---- the table itself ----


def test_every_row_is_probed_tested_elsewhere_or_left_out() -> None:
    probed = {probe.row for probe in PROBES}
    assert {*probed, *ELSEWHERE, *LEFT_OUT} == set(ROWS)
    assert all(len(reason) > 20 for reason in LEFT_OUT.values())


@pytest.mark.parametrize("row", sorted(ELSEWHERE))
def test_the_tests_that_the_table_names_exist(row: int) -> None:
    for named in ELSEWHERE[row]:
        path, _, test = named.partition("::")
        source = (TESTS / path).read_text()
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{named} is gone"
