"""Checks an architecture in a low-priority child process, alongside an engine that serves.

    start_check --config, key--> `python -P -m llmc.check.background` : check_architecture, save
                <-certificate--

It ends with its parent. A crash affects nothing else, and the check is retried at the next start.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from llmc.cache_dir import cache_dir
from llmc.config import EngineConfig
from llmc.model_info import ModelInfo
from llmc.parent_watch import die_with_parent, leave_signals_to_parent
from llmc.processes.child import how_it_ended, python_module
from llmc.startup.architecture_certificate import (
    ArchitectureCertificate,
    ArchitectureCertificates,
)

OnEnd = Callable[[ArchitectureCertificate], None]

_NICE = 19
_MODULE = "llmc.check.background"


class BackgroundCheck:
    """Runs a check, unless its result is known. A context manager, which kills the process on exit.

    `on_end` is called once: immediately with a known result, otherwise in another thread.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, on_end: OnEnd) -> None:
        self._config, self._key, self._on_end = config, info.certificate_key, on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # held to start the process, and to close

    def __enter__(self) -> BackgroundCheck:
        if not self._key:
            return self
        known = ArchitectureCertificates(cache_dir()).load(self._key)
        if known is not None:
            self._on_end(known)
            return self
        threading.Thread(target=self._run, name="llmc-certificate", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        """Start the process and wait for it in the same thread: on Linux it would die with the
        thread that started it."""
        try:
            with self._lock:
                if self._is_closed:
                    return
                process = self._process = subprocess.Popen(
                    python_module(_MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
        except OSError as error:
            failed = f"the checking process did not start: {error}"
            self._on_end(ArchitectureCertificate.not_checked(failed))
            return
        given = json.dumps({"config": _as_json(self._config), "key": self._key})
        answer, _ = process.communicate(given.encode())
        if self._is_closed:
            return
        if process.returncode:
            ended = how_it_ended(process.returncode)
            self._on_end(ArchitectureCertificate.not_checked(f"the checking process: {ended}"))
        else:
            self._on_end(ArchitectureCertificate.from_json(answer.decode()))


def _as_json(config: EngineConfig) -> dict[str, object]:
    return dataclasses.asdict(dataclasses.replace(config, speculative_config=None))


# ---- inside the process ----


def _main() -> None:
    leave_signals_to_parent()
    die_with_parent()
    os.nice(_NICE)
    given = json.loads(sys.stdin.buffer.read())
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep libraries' output out of the answer
    logging.getLogger("llmc").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its config is not the served one
    import torch

    torch.set_num_threads(1)
    from llmc.check.architecture import check_architecture

    found = check_architecture(EngineConfig(**given["config"]))
    ArchitectureCertificates(cache_dir()).save(given["key"], found)
    answers.write(found.to_json())
    answers.flush()


if __name__ == "__main__":
    _main()
