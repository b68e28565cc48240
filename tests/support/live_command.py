"""`llmc serve` as a user runs it, in a separate process, with scripted engines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from live_processes import PROMPT
from scripted_process import wait_for

SERVE = """
import sys
sys.path.insert(0, {support!r})
import scripted_process
from unittest import mock
from llmc.cli.main import main
from llmc.processes import supervisor
command = lambda module: scripted_process.command({delay})
with mock.patch.object(supervisor, "python_module", command):
    sys.exit(main(["serve", "--port", "0", *{words!r}]))
"""


# Each call has its own connection, so that any process can get it. No call needs certificates,
# which take longer to read than a response.
ALONE: Any = {"timeout": 30, "verify": False}


class Served:
    def __init__(self, process: subprocess.Popen[bytes], log: Path, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.log = log
        wait_for(lambda: "URL" in log.read_text() or process.poll() is not None, seconds=60)
        found = re.search(r"URL +(\S+)", log.read_text())
        assert found, log.read_text()
        self.url = found[1]

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, **fields}
        return httpx.post(self.url + "/v1/completions", json=body, **ALONE)

    def metric(self, name: str) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics", **ALONE).text
        found = re.findall(rf"^llmc:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def event(self) -> dict[str, Any]:
        """The first engine state event, from whichever process accepts the connection."""
        with httpx.stream("GET", self.url + "/v1/engine/events", **ALONE) as response:
            line = next(line for line in response.iter_lines() if line)
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return event

    def children(self) -> dict[str, psutil.Process]:
        """The processes under the main one, by the module that they run."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return {("api" if "worker" in " ".join(p.cmdline()) else "engine"): p for p in below}


@contextlib.contextmanager
def served(tmp_path: Path, *words: str, delay: float = 0.01) -> Iterator[Served]:
    support = str(Path(__file__).parent)
    log = tmp_path / "log"
    code = SERVE.format(support=support, delay=delay, words=list(words))
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for a socket's
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], stderr=stderr, env=environment
            )
        try:
            yield Served(process, log, Path(folder))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(30)
