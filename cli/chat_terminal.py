"""The chat on a terminal: reads input with prompt_toolkit and streams answers.

Everything runs on one event loop. While an answer streams, Ctrl-C cancels only that task; at the
prompt it clears the line, and pressed twice on an empty line it exits. prompt_toolkit restores the
terminal on every exit path, including SIGTERM, which is turned into a task cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from llmc.cli.answer_view import AnswerView
from llmc.cli.chat_backends import Backend
from llmc.cli.chat_commands import COMMAND_NAMES, Action, is_command, run_command
from llmc.cli.console import note
from llmc.cli.conversation import (
    Conversation,
    ShownToken,
    TurnStats,
    context_full,
    is_open_block,
    message_text,
    stats_line,
    why_it_ended,
)
from llmc.cli.typed_ahead import unechoed
from llmc.errors import EngineDeadError, InvalidRequestError, LlmcError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = ">>> "
Write = Callable[[str], None]


def history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "llmc" / "chat_history"


def visible(text: str) -> str:
    """Remove control characters, with which a model could control the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


def write_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def stream_answer(
    backend: Backend, chat: Conversation, write: Write
) -> tuple[str, TurnStats]:
    """Stream the answer to the open question and add it to the conversation.

    When cancelled, the text so far is kept as the answer (if there is none, the question is
    dropped) and CancelledError propagates. If the request is rejected, the question is dropped.
    """
    started_s = time.perf_counter()
    first_s: float | None = None
    said: list[str] = []
    tokens: list[ShownToken] = []
    prompt_tokens = cached_tokens = completion_tokens = finish_reason = None

    def stats(reason: str | None) -> TurnStats:
        now_s = time.perf_counter()
        return TurnStats(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens or 0,
            ttft_s=(first_s or now_s) - started_s,
            total_s=now_s - started_s,
            finish_reason=reason,
        )

    try:
        async with aclosing(backend.answer(chat.messages, chat.asked_settings)) as chunks:
            async for chunk in chunks:
                if chunk.error is not None:
                    raise LlmcError(f"the answer failed: {chunk.error}")
                if first_s is None and (chunk.text or chunk.completion_tokens):
                    first_s = time.perf_counter()
                if chunk.text:
                    said.append(chunk.text)
                    write(visible(chunk.text))
                tokens += chunk.tokens
                prompt_tokens = chunk.prompt_tokens or prompt_tokens
                if chunk.cached_tokens is not None:
                    cached_tokens = chunk.cached_tokens
                completion_tokens = chunk.completion_tokens or completion_tokens
                finish_reason = chunk.finish_reason or finish_reason
    except BaseException:
        if said:
            chat.answered("".join(said), stats("abort"))
        else:
            chat.drop_question()
        raise
    text, result = "".join(said), stats(finish_reason)
    chat.tokens = tokens
    chat.answered(text, result)
    return text, result


class Terminal:
    """The read-answer loop on a real terminal."""

    def __init__(
        self, backend: Backend, chat: Conversation, console: Console, *, markdown: bool = True
    ) -> None:
        self._markdown = markdown
        self._prefill = ""  # of the next prompt
        self._backend = backend
        self._chat = chat
        self._console = console

    async def run(self) -> None:
        """Run until the user exits. On a signal, exit with the code that a shell would report."""
        try:
            await self._loop()
        except asyncio.CancelledError:
            raise SystemExit(128 + signal.SIGTERM) from None

    async def _loop(self) -> None:
        session = _make_session(self._chat)
        interrupts = 0
        with _terminate_by_cancelling():
            while True:
                try:
                    prefill, self._prefill = self._prefill, ""
                    entered = await session.prompt_async(default=prefill)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    interrupts += 1
                    if interrupts == 2:
                        return
                    self._note("Press Ctrl-C again, Ctrl-D or enter /exit to exit.")
                    continue
                interrupts = 0
                if not await self._handle(entered):
                    return

    async def _handle(self, entered: str) -> bool:
        """Handle one entered line; returns False to end the chat."""
        if not entered.strip():
            return True
        if is_command(entered.strip()):
            reply = run_command(self._chat, entered)
            if reply.action is Action.EDIT:
                self._prefill = reply.text
                return True
            if reply.action is Action.MODEL:
                self._backend.model = self._chat.model
            if reply.text:
                self._note(reply.text)
            if reply.action is Action.EXIT:
                return False
            if reply.action is not Action.ANSWER:
                return True
        else:
            self._chat.ask(message_text(entered))
        await self._answer()
        return True

    async def _answer(self) -> None:
        waiting = self._console.status("", spinner="dots")
        waiting.start()
        view = AnswerView(self._console, markdown=self._markdown)

        def write(text: str) -> None:
            waiting.stop()  # stopping twice is fine
            view.write(text)

        task = asyncio.create_task(stream_answer(self._backend, self._chat, write))
        try:
            with unechoed(), view, _interrupt_cancels(task):
                _, stats = await task
        except asyncio.CancelledError:
            if not task.cancelled():  # the whole chat was cancelled, not only the answer
                task.cancel()
                raise
            waiting.stop()
            self._note("(stopped; /regen answers again, /undo removes it)")
        except InvalidRequestError as error:
            waiting.stop()
            reason = f"Not sent (press Up to edit it): {error}."
            full = error.code == "context_length_exceeded"
            self._warn(context_full(reason) if full else reason)
        except EngineDeadError:
            raise  # no further answers are possible
        except LlmcError as error:
            waiting.stop()
            self._warn(str(error))
        else:
            if self._chat.show_stats:
                self._note(stats_line(stats, self._chat.context_limit))
            ended = why_it_ended(stats, self._chat)
            if ended is not None:
                self._warn(ended)
        finally:
            waiting.stop()

    def _note(self, text: str) -> None:
        note(self._console, text)

    def _warn(self, text: str) -> None:
        note(self._console, text, style="yellow")


def _make_session(chat: Conversation) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import WordCompleter

    return PromptSession(
        PROMPT,
        history=_open_history(),
        multiline=True,  # Enter still sends: see the key bindings
        prompt_continuation=_continuation,
        key_bindings=_key_bindings(),
        bottom_toolbar=chat.status,
        auto_suggest=AutoSuggestFromHistory(),
        completer=WordCompleter(COMMAND_NAMES, sentence=True),
        complete_while_typing=False,
        enable_open_in_editor=True,
    )


def _continuation(width: int, line: int, is_wrapped: int) -> str:
    """Prefix of a message's further lines; lines that are only wrapped get none."""
    return " " * width if is_wrapped else "... "


def _open_history() -> History:
    """Keep history in a private file, or in memory if the home directory is not writable."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_open_block(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.app.exit(result="")  # like a shell: the line stays visible, a new one starts
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return bindings


@contextlib.contextmanager
def _interrupt_cancels(task: asyncio.Task[object]) -> Iterator[None]:
    """While active, Ctrl-C cancels the task and nothing else."""
    previous = signal.getsignal(signal.SIGINT)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _terminate_by_cancelling() -> Iterator[None]:
    """While active, SIGTERM and SIGHUP unwind the chat, so that the terminal is restored."""
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGTERM, signal.SIGHUP)
    for kind in kinds:
        loop.add_signal_handler(kind, task.cancel)
    try:
        yield
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)
