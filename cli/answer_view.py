"""Show an answer on a terminal while it streams: Markdown, block by block, without breaking words.

Complete blocks (up to a blank line outside a code fence) are printed permanently. The block that
is still growing is redrawn below them with each piece of text.
"""

from __future__ import annotations

from types import TracebackType

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

FENCES = ("```", "~~~")


class AnswerView:
    """A context manager. With `markdown` False, text is shown unrendered, but wrapped."""

    def __init__(self, console: Console, *, markdown: bool = True) -> None:
        self._console = console
        self._markdown = markdown
        self._growing = ""
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> AnswerView:
        return self

    def write(self, text: str) -> None:
        self._growing += text
        done, self._growing = split_blocks(self._growing)
        if not self._live.is_started:
            self._live.start()
        if done:
            self._live.update("", refresh=True)
            self._console.print(self._render(done))
            if self._growing.strip("\n") or not self._markdown:
                self._console.print()
        self._live.update(self._tail(), refresh=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live.is_started:
            self._live.update("", refresh=True)
            self._live.stop()
        if self._growing.strip("\n"):
            self._console.print(self._render(self._growing))
        self._growing = ""

    def _render(self, text: str) -> RenderableType:
        return as_markdown(text) if self._markdown else Text(text.strip("\n"))

    def _tail(self) -> RenderableType:
        """The last lines of the growing block: only what fits on the screen can be redrawn."""
        lines = self._console.render_lines(self._render(self._growing), pad=False)
        shown = lines[-max(1, self._console.height - 2) :]
        text = Text()
        for number, line in enumerate(shown):
            for segment in line:
                text.append(segment.text, segment.style)
            if number < len(shown) - 1:
                text.append("\n")
        text.no_wrap = True
        return text


def split_blocks(text: str) -> tuple[str, str]:
    """Split after the last blank line outside a code fence: (complete blocks, the rest)."""
    fence: str | None = None
    end = position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = line.lstrip()[:3]
        if mark in FENCES and fence in (None, mark):
            fence = mark if fence is None else None
        elif fence is None and line.strip() == "" and line.endswith("\n"):
            end = position
    return text[:end], text[end:]


def as_markdown(text: str) -> Markdown:
    """Render Markdown, keeping line breaks and showing HTML as text, so nothing is hidden."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    shown = Markdown("")
    shown.parsed = [_with_breaks(token) for token in parser.parse(text)]
    return shown


def _with_breaks(token: Token) -> Token:
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"
    return token
