"""A chat on a terminal whose backend gives the answer selected by the question's first word.

Run as a program, this is the chat; `Screen` is the terminal that a test reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = "The quick brown fox jumps over the lazy dog and runs through extraordinarily long grass. "
ANSWERS = {
    "words": WORDS * 2,
    "slow": WORDS,
}
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>]|\][^\x07]*\x07|[()][AB0])")


class Screen:
    """A terminal with a program: its output, and a way to type keys."""

    def __init__(self, command: Sequence[str], *, columns: int, home: Path) -> None:
        self.text = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", COLUMNS="", XDG_STATE_HOME=str(home))
            del os.environ["COLUMNS"]
            os.execv(command[0], list(command))
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait(self, wanted: str, seconds: float = 20.0) -> str:
        """All text since the last wait, once it contains `wanted`; without escape sequences."""
        deadline, seen = time.monotonic() + seconds, ""
        while True:
            ready, _, _ = select.select([self._fd], [], [], 0.1)
            if ready:
                with contextlib.suppress(OSError):  # the program has ended
                    seen += os.read(self._fd, 65536).decode("utf-8", "replace")
            plain = _ESCAPES.sub("", seen)
            if wanted in plain:
                return plain
            if os.waitpid(self.pid, os.WNOHANG)[0] or time.monotonic() > deadline:
                raise AssertionError(f"no {wanted!r} in {plain!r}")
            if "\x1b[6n" in seen:  # prompt_toolkit asks for the cursor position
                seen = seen.replace("\x1b[6n", "")
                self.type("\x1b[1;1R")


class WordBackend:
    """Gives an answer word by word."""

    def __init__(self) -> None:
        self.model = "words"
        self.context_limit: int | None = 100
        self.defaults: Mapping[str, Any] = {"temperature": 0.25}
        self.models = ("words", "other")

    async def answer(
        self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        from llmc.cli.chat_backends import Chunk

        last = messages[-1]["content"]
        text = ANSWERS.get(last.split()[0], f"You said: {last}")
        for piece in re.findall(r"\S+\s*|\s+", text):
            await asyncio.sleep(0.05 if last.startswith("slow") else 0)
            yield Chunk(text=piece)
        yield Chunk(prompt_tokens=3, completion_tokens=len(text.split()), finish_reason="stop")

    async def close(self) -> None:
        pass


@contextlib.contextmanager
def chat_screen(columns: int, home: Path) -> Iterator[Screen]:
    screen = Screen([sys.executable, "-P", __file__], columns=columns, home=home)
    try:
        yield screen
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(screen.pid, 9)
            os.waitpid(screen.pid, 0)
        os.close(screen._fd)


async def main() -> None:
    from rich.console import Console

    from llmc.cli.chat_terminal import Terminal
    from llmc.cli.conversation import Conversation

    backend = WordBackend()
    chat = Conversation(
        model=backend.model, defaults=backend.defaults, models=backend.models, context_limit=100
    )
    await Terminal(backend, chat, Console(highlight=False)).run()


if __name__ == "__main__":
    asyncio.run(main())
