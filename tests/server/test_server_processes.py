"""The engine in a separate process: what clients see when it dies, hangs, or does its work."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from live_processes import PROMPT, LiveProcesses, live_processes
from live_server import live_server
from scripted_process import DIE, HANG, has_ended, model_info, wait_for

from llmc import async_llm
from llmc.config import EngineConfig
from llmc.errors import EngineDeadError
from llmc.frontend.data_parallel import sum_stats
from llmc.processes import supervisor
from llmc.processes.server_processes import EngineUp, RestartBudget, ServerProcesses
from llmc.processes.wire import from_line
from llmc.server import workers
from llmc.server.settings import ServerSettings
from llmc.server.worker import EngineWatch

pytestmark = pytest.mark.e2e
COMPLETIONS = "/v1/completions"
ENDLESS = {"max_tokens": 1900, "ignore_eos": True}
PLENTY = RestartBudget((0.05,) * 50)
READ = "import sys; sys.stdin.read()"  # a process that ends with its standard input


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveProcesses]:
    settings = ServerSettings(admin_api_key="operator")
    with live_processes(settings, delay_s=0.01, budget=PLENTY) as live:
        yield live


@pytest.fixture
def live(shared: LiveProcesses) -> Iterator[LiveProcesses]:
    yield shared
    wait_for(lambda: shared.status("/ready") == 200)
    shared.wait_idle()
    shared.check_served()


def read_events(live: LiveProcesses, started: threading.Event, **fields: Any) -> list[Any]:
    body = live.body(stream=True, **fields)
    events: list[Any] = []
    with live.client.stream("POST", COMPLETIONS, json=body, timeout=30) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                started.set()
    return events


def test_requests_are_answered_over_the_border(live: LiveProcesses) -> None:
    whole = live.complete(n=2, logprobs=None, max_tokens=7).json()
    assert [c["token_ids"] for c in whole["choices"]] == [(PROMPT * 2)[:7]] * 2
    events = read_events(live, threading.Event(), max_tokens=7)
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert sum((c["token_ids"] for c in choices), []) == (PROMPT * 2)[:7]
    assert choices[-1]["finish_reason"] == "length"


def test_an_operators_orders_cross_the_border(live: LiveProcesses) -> None:
    def operate(path: str) -> tuple[int, str]:
        response = live.client.post(path, headers={"authorization": "Bearer operator"})
        return response.status_code, response.text

    assert operate("/reset_prefix_cache")[0] == 200
    assert operate("/start_profile")[0] == 200
    assert operate("/start_profile")[0] == 409
    assert operate("/stop_profile") == (200, '{"message":"profiles/profile"}')


def test_the_folder_of_the_sockets_is_private(live: LiveProcesses) -> None:
    folder = live.supervisor.folder
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert [stat.S_ISSOCK(os.stat(f"{folder}/{n}").st_mode) for n in os.listdir(folder)] == [True]


def test_a_killed_engine_is_an_error_at_once_and_then_another_engine(live: LiveProcesses) -> None:
    events: list[Any] = []
    answers: list[Any] = []
    started = threading.Event()
    threads = [
        threading.Thread(target=lambda: events.extend(read_events(live, started, **ENDLESS))),
        threading.Thread(target=lambda: answers.append(live.complete(**ENDLESS))),
    ]
    for thread in threads:
        thread.start()
    assert started.wait(20)
    wait_for(lambda: live.llm.stats().num_running == 2)
    before = live.supervisor.processes.restarts["engine"]
    live.supervisor._budget = RestartBudget((1.0,) * 50)  # time to look at the server without one
    os.kill(live.engine_pid, signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - killed < 2

    assert events.pop() == "[DONE]"
    error = json.loads(events[-1])["error"]
    assert error["code"] == "engine_dead" and "SIGKILL" in error["message"]
    [answer] = answers
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
    assert "retry-after" in answer.headers

    refused = live.complete()  # the listener stays
    assert refused.status_code == 503 and "being restarted" in refused.json()["error"]["message"]
    assert live.status("/ready") == live.status("/health") == 503
    metrics = live.client.get("/metrics").text
    for gauge in ("engine_up", "num_requests_running", "kv_cache_usage_perc"):
        assert f'llmc:{gauge}{{model_name="scripted"}} 0.0' in metrics
    live.supervisor._budget = PLENTY

    wait_for(lambda: live.status("/ready") == 200)
    assert live.status("/health") == 200
    live.check_served()
    metrics = live.client.get("/metrics").text
    labels = 'model_name="scripted",process="engine"'
    assert f"llmc:process_restarts_total{{{labels}}} {before + 1:.1f}" in metrics
    assert f"llmc:process_up{{{labels}}} 1.0" in metrics
    assert len(os.listdir(live.supervisor.folder)) == 1  # nothing is left of the first one


def test_an_engine_is_restarted_although_no_process_could_be_created_at_first(
    live: LiveProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory has run out, which is why the engine was killed."""
    create, faults = supervisor.Child, [OSError(errno.ENOMEM, "no memory")]

    def child(*args: Any, **options: Any) -> Any:
        if faults:
            raise faults.pop()
        return create(*args, **options)

    monkeypatch.setattr(supervisor, "Child", child)
    first = live.engine_pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: live.supervisor.processes.pids.get("engine", first) != first)
    wait_for(lambda: live.status("/ready") == 200)
    assert not faults
    live.check_served()


def test_an_engine_that_fails_says_why(live: LiveProcesses) -> None:
    answer = live.complete(prompt=[DIE])
    assert answer.status_code == 503
    # The last message is lost with the process; the reason reaches the log and later answers.
    assert "EngineDeadError: the device is lost" in answer.json()["error"]["message"]


def test_a_hanging_engine_is_not_ready_and_its_stacks_are_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # long enough to reach the hanging line on a busy machine: stacks are written once
    monkeypatch.setattr(async_llm, "WATCHDOG_S", 1.5)
    answers: list[Any] = []
    written = ""

    def is_written() -> bool:
        nonlocal written
        written += capfd.readouterr().err
        return "in _draw" in written

    with live_processes() as live:  # its engine writes where this test reads
        thread = threading.Thread(target=lambda: answers.append(live.complete(prompt=[HANG])))
        thread.start()
        try:
            wait_for(is_written)
            assert live.status("/ready") == 503 and live.status("/health") == 200
        finally:
            os.kill(live.engine_pid, signal.SIGKILL)
            thread.join(20)
        assert answers[0].status_code == 503
        wait_for(lambda: live.status("/ready") == 200)
        live.check_served()


def test_a_stopped_engine_recovers(live: LiveProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = live.engine_pid
    started = threading.Event()
    thread = threading.Thread(target=lambda: read_events(live, started, max_tokens=40))
    thread.start()
    assert started.wait(20)
    os.kill(pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(async_llm, "WATCHDOG_S", 0.2)
        wait_for(lambda: live.status("/ready") == 503)
    finally:
        monkeypatch.setattr(async_llm, "WATCHDOG_S", 60.0)
        os.kill(pid, signal.SIGCONT)
    thread.join(20)
    assert live.status("/ready") == 200 and live.engine_pid == pid


def test_the_engine_leaves_signals_to_the_main_process(live: LiveProcesses) -> None:
    pid = live.engine_pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    live.check_served()
    assert live.engine_pid == pid and not has_ended(pid)


def test_a_storm_of_aborts_leaves_nothing(live: LiveProcesses) -> None:
    process = psutil.Process()
    live.check_served()
    live.wait_idle()
    engine = psutil.Process(live.engine_pid)
    before = process.num_fds(), engine.num_fds()

    def storm(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            body = json.dumps(live.body(stream=rng.random() < 0.5, **ENDLESS)).encode()
            with socket.create_connection(("127.0.0.1", live.port)) as sock:
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                sock.sendall(head.encode() + body)
                time.sleep(rng.random() * 0.05)

    threads = [threading.Thread(target=storm, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.wait_idle()
    wait_for(lambda: (process.num_fds(), engine.num_fds()) <= before)


def test_a_reader_that_stalls_is_cut_and_holds_up_nobody() -> None:
    settings = ServerSettings(stalled_reader_s=0.5)
    with live_processes(settings) as live, socket.socket() as sock:
        # Events of some size, so that the socket's buffers are soon full.
        body = json.dumps(live.body(stream=True, n=4, logprobs=20, **ENDLESS)).encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", live.port))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        wait_for(lambda: live.llm.num_active == 1)
        live.check_served()
        wait_for(lambda: live.llm.num_active == 0)
        live.wait_idle()


def test_an_engine_that_dies_too_often_ends_the_server() -> None:
    with live_processes(budget=RestartBudget((0.2, 0.2, 0.2))) as live:
        for number in range(4):
            wait_for(lambda: live.status("/ready") == 200)
            live.check_served()
            assert live.supervisor.processes.restarts["engine"] == number
            os.kill(live.engine_pid, signal.SIGKILL)
            if number < 3:
                wait_for(lambda: live.status("/ready") == 503)
        wait_for(lambda: live.failures)
        assert live.supervisor.processes.is_over
        [failure] = live.failures
        assert "died too often" in str(failure)


def test_stream_interval_sets_the_size_of_events() -> None:
    with live_processes(ServerSettings(stream_interval=5)) as live:
        events = read_events(live, threading.Event(), max_tokens=13)
        sizes = [len(json.loads(e)["choices"][0]["token_ids"]) for e in events[:-1]]
        assert sum(sizes) == 13
        assert sizes[0] >= 1 and all(size >= 5 for size in sizes[1:-1]) and len(sizes) <= 4
        live.check_served()


def test_a_dead_engine_in_this_process_ends_the_server() -> None:
    with live_server() as live:
        live.scripted.runner.fail_next = EngineDeadError("the device is lost")
        assert live.complete().status_code == 503
        live.thread.join(20)
        assert not live.thread.is_alive()
        with pytest.raises(EngineDeadError, match="the device is lost"):
            live.server.check()


def worker_order(sock: socket.socket) -> workers.WorkerOrder:
    return workers.WorkerOrder(
        socket_fd=sock.fileno(),
        settings=ServerSettings(api_workers=2),
        config=EngineConfig(),
        folder="",
        log_level="info",
        log_format="text",
    )


def test_an_api_process_is_started_although_that_failed_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create, faults = workers.Child, [OSError(errno.ENOMEM, "no memory")]

    def child(*args: Any, **options: Any) -> Any:
        if faults:
            raise faults.pop()
        return create(*args, **options)

    monkeypatch.setattr(workers, "Child", child)
    monkeypatch.setattr(workers, "RestartBudget", lambda: RestartBudget((0.01,)))
    monkeypatch.setattr(workers, "python_module", lambda _: [sys.executable, "-c", READ])
    engines, counts = mock.Mock(supervisors=[]), mock.Mock()
    with (
        socket.socket() as sock,
        workers.Workers(engines, worker_order(sock), counts),
    ):
        wait_for(lambda: engines.report_process.called)
    counts.clear.assert_called_once_with(1)
    engines.report_gone.assert_called_once_with("api-1")
    assert engines.report_process.call_args_list[0].kwargs == {"restarted": True}


def test_an_api_process_hears_of_what_changed_while_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"import sys; open({str(tmp_path / 'read')!r}, 'w').write(sys.stdin.read())"
    monkeypatch.setattr(workers, "python_module", lambda _: [sys.executable, "-c", script])
    monkeypatch.setattr(workers, "END_S", 60.0)
    engine = mock.Mock()
    states = [ServerProcesses(), ServerProcesses(why="it died meanwhile")]
    type(engine).processes = mock.PropertyMock(side_effect=states)
    engines = mock.Mock(supervisors=[engine])
    with socket.socket() as sock, workers.Workers(engines, worker_order(sock), mock.Mock()):
        wait_for(lambda: engines.report_process.called)
    first, *lines = (tmp_path / "read").read_bytes().splitlines()
    order = from_line(first, workers.WorkerOrder)
    assert (order.name, order.index) == ("api-1", 1)
    assert [one.why for one in order.processes] == [states[0].why]
    assert [from_line(line, ServerProcesses).why for line in lines] == ["it died meanwhile"]


def test_the_stacks_of_an_engine_that_has_just_died_are_not_asked_for() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    up = EngineUp(address="", info=model_info(), stats=sum_stats(()))
    EngineWatch(ServerProcesses(engine=up, pids={"engine": process.pid})).dump_stacks()
