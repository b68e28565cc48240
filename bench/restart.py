"""Measures the time from a rank's death to the next answer (`llmc serve --tensor-parallel-size 2`).

    python -m bench.restart [MODEL] [flags of `llmc serve`]

The first start fills the cache; then rank 1 is killed twice, because the supervisor restarts an
engine after 0.5 s and after 2 s.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO

import httpx
import psutil

from llmc.startup.tensor_parallel import MODULE

START = "import sys; from llmc.cli.main import main; sys.exit(main(sys.argv[1:]))"
KILLS = 2
LONGEST_S = 600.0  # for a start


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = ["--tensor-parallel-size", "2", "--port", port]
    command = [sys.executable, "-P", "-c", START, "serve", *sys.argv[1:], *ranks]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            print(f"first start: {_until_it_answers(server, client, log):.1f} s")
            for _ in range(KILLS):
                processes = psutil.Process(server.pid).children(recursive=True)
                rank = next(p for p in processes if MODULE in p.cmdline())
                rank.send_signal(signal.SIGKILL)
                start = time.perf_counter()
                while _answers(client):
                    time.sleep(0.02)
                noticed = time.perf_counter() - start
                again = noticed + _until_it_answers(server, client, log)
                print(f"noticed after {noticed:.1f} s, answers again after {again:.1f} s")
        finally:
            server.terminate()


def _until_it_answers(server: subprocess.Popen[bytes], client: httpx.Client, log: IO[str]) -> float:
    start = time.perf_counter()
    while not _answers(client):
        if server.poll() is not None:
            log.seek(0)
            _, error, reason = log.read().rpartition("error: ")
            raise SystemExit(f"{error}{reason}".strip() or f"the server ended: {server.returncode}")
        if time.perf_counter() - start > LONGEST_S:
            raise SystemExit("the server does not respond; check `llmc serve` with these flags")
        time.sleep(0.05)
    return time.perf_counter() - start


def _answers(client: httpx.Client) -> bool:
    try:
        body = {"prompt": "Hello", "max_tokens": 2}
        return client.post("/v1/completions", json=body).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
