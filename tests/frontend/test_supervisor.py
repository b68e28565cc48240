"""Starting the engine process: what goes wrong is raised as if it had happened here."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest

pytest.importorskip("zmq", reason="the server's dependencies are not installed")
pytest.importorskip("msgspec", reason="the server's dependencies are not installed")

import scripted_process
from many_files import many_open_files
from scripted_process import has_ended, wait_for

from llmc.cli.errors import describe
from llmc.config import EngineConfig
from llmc.errors import LlmcError
from llmc.model_info import Phase, PhaseBegins
from llmc.processes import supervisor as supervisor_module
from llmc.processes.child import Child, how_it_ended
from llmc.processes.supervisor import Supervisor, private_folder
from llmc.processes.wire import EngineOrder, from_line, to_line

CONFIG = EngineConfig()


@pytest.mark.parametrize(
    ("failure", "message", "code"),
    [
        ("model", "'nothing' has no config.json", 2),
        ("memory", "out of memory", 1),
        ("bug", "the engine did not start: RuntimeError: out of cudas", 1),
        ("exit", "the engine process did not start: it ended with exit code 7", 1),
        ("version", "the other process uses version '0.0.1-other'", 2),
    ],
)
def test_a_start_that_fails_is_one_error(failure: str, message: str, code: int) -> None:
    command = scripted_process.command(failure=failure)
    with Supervisor(CONFIG, command=command) as supervisor:
        with pytest.raises((LlmcError, MemoryError)) as caught:
            supervisor.wait_ready()
        assert supervisor.processes.restarts == {"engine": 0}  # a first start is not tried again
    text, _, exit_code = describe(caught.value)
    assert text.startswith(message) and exit_code == code
    assert not os.path.exists(supervisor.folder)


def test_a_process_that_cannot_be_created_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the system has no memory for one. Nobody must wait for it forever."""
    no_memory = mock.Mock(side_effect=OSError(errno.ENOMEM, "no memory"))
    monkeypatch.setattr(supervisor_module, "Child", no_memory)
    caught: list[str] = []

    def start() -> None:
        with Supervisor(CONFIG) as supervisor:
            try:
                supervisor.wait_ready()
            except OSError as error:
                caught.append(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(20)
    assert caught == ["[Errno 12] no memory"]


def test_a_folder_that_cannot_be_created_on_waking_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with Supervisor(CONFIG, command=scripted_process.command()) as supervisor:
        supervisor.wait_ready()
        supervisor.suspend()
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space"))
        monkeypatch.setattr(supervisor_module, "private_folder", full)
        supervisor.resume()
        wait_for(lambda: supervisor.processes.is_over)
        with pytest.raises(OSError, match="no space"):
            supervisor.wait_ready()
    assert "no space" in supervisor.processes.why


def test_an_engine_is_started_beside_a_thousand_connections() -> None:
    """As a restart under load is."""
    with many_open_files(), Supervisor(CONFIG, command=scripted_process.command()) as supervisor:
        assert supervisor.wait_ready().info == scripted_process.model_info()


def test_phases_are_told_and_the_end_is_orderly() -> None:
    phases: list[PhaseBegins | Phase] = []
    command = scripted_process.command()
    with Supervisor(CONFIG, command=command, on_phase=phases.append) as supervisor:
        engine = supervisor.wait_ready()
        assert engine.info == scripted_process.model_info()
        pid = supervisor.processes.pids["engine"]
        assert not has_ended(pid)
    assert phases == [
        PhaseBegins(name="read config"),
        Phase(name="read config", seconds=0.25, detail="scripted"),
    ]
    assert has_ended(pid) and not os.path.exists(supervisor.folder)
    supervisor.stop()  # again: nothing to do


def test_an_engine_without_a_main_process_ends_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    folder = private_folder()
    order = EngineOrder(
        config=CONFIG,
        folder=folder,
        address=f"ipc://{folder}/engine",
        log_level="warning",
        log_format="text",
    )
    reports, theirs = os.pipe()
    with subprocess.Popen(
        [*scripted_process.command(), str(theirs)], stdin=subprocess.PIPE, pass_fds=[theirs]
    ) as process:
        os.close(theirs)
        os.close(reports)  # before the first report
        process.communicate(to_line(order), timeout=60)
    assert capfd.readouterr().err == ""
    assert not os.path.exists(folder)


def test_every_option_reaches_the_engine_process() -> None:
    """Also those that may hold objects in Python: by name, as the command line gives them."""
    config = EngineConfig(
        extra_passes=("file.py:tap", "module:steer"),
        logits_processors=("file.py:Boost",),
        passes={"merge_linears": False},
        cuda_graph_buckets=(1, 2),
        limit_mm_per_prompt={"image": 2},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    order = EngineOrder(
        config=config, folder="a", address="ipc://a", log_level="info", log_format="text"
    )
    [line] = to_line(order).splitlines()
    received: EngineOrder = from_line(line, EngineOrder)
    # lists of JSON are lists here
    sent = dataclasses.asdict(config)
    assert json.dumps(dataclasses.asdict(received.config)) == json.dumps(sent)


def test_leaving_skips_the_interpreters_own_end() -> None:
    """A thread that waits in standard input would make it abort, and torch makes it slow."""
    script = (
        "import atexit, sys, threading\n"
        "from llmc.parent_watch import leave\n"
        "threading.Thread(target=sys.stdin.buffer.readline, daemon=True).start()\n"
        "atexit.register(print, 'the end')\n"
        "print('done')\n"
        "leave(3)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert (process.stdout.read(), process.wait()) == (b"done\n", 3)


def test_stopping_while_it_starts_does_not_wait() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    done = threading.Event()

    def start_and_stop() -> None:
        with Supervisor(CONFIG, command=command) as supervisor:
            wait_for(lambda: "engine" in supervisor.processes.pids)
        done.set()

    thread = threading.Thread(target=start_and_stop, daemon=True)
    thread.start()
    assert done.wait(20)


def test_the_folder_is_private_and_its_path_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "x" * 200)
    folder = private_folder()
    try:
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert len(folder) <= supervisor_module.LONGEST_FOLDER + 20
    finally:
        os.rmdir(folder)


def test_a_child_that_does_not_read_is_killed() -> None:
    with Child([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        for _ in range(40):
            child.order(b"x" * 4096)
        assert child.wait() == how_it_ended(-9)
        child.order(b"after its death: no error\n")


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit code 0"), (3, "exit code 3"), (-15, "SIGTERM"), (-9, "memory")]
)
def test_how_a_process_ended_is_said_in_words(code: int, said: str) -> None:
    assert said in how_it_ended(code)
