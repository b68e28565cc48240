"""A child process that ends with its parent: orders on standard input, reports on a pipe.

The engine process and the additional API processes are such children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait  # unlike select(), for descriptors above 1023 too

POLL_S = 0.05


class Child:
    """A child process, started on construction. `command` gets the file descriptor of its report
    pipe as its last argument.

    `environment` is added to that of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        reports, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE,
                pass_fds=[theirs, *pass_fds],
                bufsize=0,
                env={**os.environ, **(environment or {})},
            )
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None, "opened as a pipe"
        os.set_blocking(self._process.stdin.fileno(), False)
        self._reports = reports
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, line: bytes) -> None:
        """Write one line to its standard input.

        Ignored if the child has exited; a child whose pipe is full is killed.
        """
        assert self._process.stdin is not None, "opened as a pipe"
        try:
            written = self._process.stdin.write(line)
        except (BrokenPipeError, ValueError):  # it has exited, or we have closed the pipe
            return
        if written != len(line):  # the pipe is full, as it has not read for a long time
            self._process.kill()

    def reports(self) -> Iterator[bytes]:
        """Lines of its report pipe as they arrive, until the pipe closes or the process exits."""
        while True:
            is_dead = self._process.poll() is not None
            if not wait([self._reports], 0 if is_dead else POLL_S):
                if is_dead:
                    return
                continue
            data = os.read(self._reports, 65536)
            if not data:
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            yield from lines

    def wait(self) -> str:
        """Wait for it to exit. Returns a sentence that says how it ended."""
        return how_it_ended(self._process.wait())

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, timeout_s: float) -> None:
        """Close its standard input, which makes it exit; kill it after `timeout_s`."""
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill the process if it is still running, and close the pipes."""
        self._process.kill()  # does nothing if it has been waited for
        self._process.wait()
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.close()
        if self._reports >= 0:
            os.close(self._reports)
            self._reports = -1

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def python_module(name: str) -> list[str]:
    """The command that runs one of our modules. -P keeps the working directory off its path."""
    return [sys.executable, "-P", "-m", name]


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = ", possibly because memory ran out" if code == -signal.SIGKILL else ""
    return f"it was killed by {name}{memory}"
