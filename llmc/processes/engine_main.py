"""The engine process (`python -P -m llmc.processes.engine_main`), started by supervisor.py.

    order (first line of standard input) -> start_engine -> Ready (report pipe) -> EngineHost

It does not handle text or HTTP. It exits when its standard input ends: when the main process closes
it or dies. Signals are left to the main process, which decides how to drain.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmc.garbage import keep_forever
from llmc.logs import set_up_logging
from llmc.parent_watch import die_with_parent, leave, leave_signals_to_parent

if TYPE_CHECKING:
    from llmc.config import EngineConfig
    from llmc.model_info import OnPhase
    from llmc.processes.wire import EngineOrder
    from llmc.startup.start import Started

Start = Callable[["EngineConfig", "OnPhase"], "Started"]

GRACE_S = 1.0  # for the running step when the main process is gone


def main(start: Start | None = None) -> int:
    """-> exit code; 0 if standard input was closed. `start` replaces start_engine in tests."""
    leave_signals_to_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent()
    from llmc.processes.remote_errors import describe_failure
    from llmc.processes.wire import EngineOrder, WireError, from_line, to_line

    with os.fdopen(int(sys.argv[-1]), "wb", buffering=0) as pipe:

        def report(message: object) -> None:
            with contextlib.suppress(BrokenPipeError):  # then _watch_parent ends this process
                pipe.write(to_line(message))

        line = sys.stdin.buffer.readline()
        if not line:
            return 0
        try:
            order: EngineOrder = from_line(line, EngineOrder)
        except WireError as exc:
            report(describe_failure(exc))
            return 1
        set_up_logging(order.log_level, order.log_format)
        stopped = threading.Event()
        ends: list[Callable[[], object]] = []
        watcher = threading.Thread(
            target=_watch_parent, args=(order.folder, stopped, ends), daemon=True
        )
        watcher.start()
        try:
            _serve(order, start, report, stopped.is_set, ends)
        except Exception as exc:
            report(describe_failure(exc))
            return 1
    return 0


def _serve(
    order: EngineOrder,
    start: Start | None,
    report: Callable[[object], None],
    is_stopped: Callable[[], bool],
    ends: list[Callable[[], object]],
) -> None:
    import zmq

    from llmc.frontend import engine_options as engine
    from llmc.processes.engine_host import EngineHost, bind
    from llmc.processes.wire import Ready

    load = start or engine.start
    with zmq.Context() as context, bind(context, order.address) as socket:
        started = load(order.config, report)
        ends.append(started.end_ranks)
        keep_forever()
        report(Ready(info=started.info, stats=started.engine.stats()))
        try:
            EngineHost(started.engine, socket, is_stopped).run()
        finally:
            started.end_ranks()  # kills ranks that hang


def _watch_parent(
    folder: str, stopped: threading.Event, ends: Sequence[Callable[[], object]]
) -> None:
    """Wait for the end of standard input, then end the process after GRACE_S, and its ranks."""
    while sys.stdin.buffer.readline():
        pass
    shutil.rmtree(folder, ignore_errors=True)  # in case the main process was killed
    stopped.set()
    threading.Event().wait(GRACE_S)
    for end in ends:  # the step that is running waits for a rank that hangs
        end()
    os._exit(0)


if __name__ == "__main__":
    leave(main())
