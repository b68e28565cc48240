"""`--help` as grouped, aligned, plain text: quick to print, and no flag is ever cut short.

typer's own panels need rich and truncate long flag names on a terminal of 80 columns.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

MAX_WIDTH = 100
TEXT_COLUMN = 34  # where explanations begin
ENVIRONMENT = "Options can be set in the environment: --max-model-len is LLMC_MAX_MODEL_LEN."


class HelpCommand(TyperCommand):
    """A command whose help is written by this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(_command_lines(self, ctx)) + "\n")


class HelpGroup(TyperGroup):
    """A group of commands whose help is written by this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        lines = list(_head(self, ctx))
        lines += _heading("Commands")
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None, "listed commands exist"
            first = (command.help or "").strip().split("\n\n")[0]
            lines += _entry(name, first)
        lines += _heading("Options")
        for param in self.get_params(ctx):
            lines += _option_entry(param, ctx)
        formatter.write("\n".join([*lines, "", ENVIRONMENT]) + "\n")


def _command_lines(command: Any, ctx: Any) -> Iterator[str]:
    yield from _head(command, ctx)
    panels: dict[str, list[Any]] = {}
    for param in command.get_params(ctx):
        if not getattr(param, "hidden", False):
            panels.setdefault(_panel(param), []).append(param)
    general = panels.pop("Options", [])
    for title, params in [*panels.items(), ("Options", general)]:
        if params:
            yield from _heading(title)
            for param in params:
                yield from _option_entry(param, ctx)
    yield ""
    yield ENVIRONMENT


def _panel(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or "Options"


def _head(command: Any, ctx: Any) -> Iterator[str]:
    pieces = command.collect_usage_pieces(ctx)
    yield f"Usage: {ctx.command_path} {' '.join(pieces)}"
    for paragraph in (command.help or "").strip().split("\n\n"):
        yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), _width())


def _heading(title: str) -> list[str]:
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return ["", f"\x1b[1m{title}:\x1b[0m" if bold else f"{title}:"]


def _option_entry(param: Any, ctx: Any) -> list[str]:
    if param.param_type_name == "argument":
        return _entry(param.metavar or param.name, param.help or "")
    shorts = [flag for flag in param.opts if not flag.startswith("--")]
    longs = [flag for flag in param.opts if flag.startswith("--")]
    default = param.default
    names = [*shorts, *longs[:1]]  # other spellings are accepted but not shown
    if param.is_flag and param.secondary_opts:
        if default is True:
            names = [*param.secondary_opts]  # the flag that changes something
        elif default is None:
            names += param.secondary_opts  # both do
    usage = ", ".join(names)
    if not param.is_flag:
        usage += " " + (param.metavar or _kind(param))
    text = " ".join((param.help or "").split())
    is_shown = getattr(param, "show_default", True) and not param.is_flag
    if is_shown and default is not None and not callable(default) and default != []:
        text += f" [{default}]"
    if param.is_flag and param.secondary_opts and default is True:
        text += " (on unless this is given)"
    return _entry(usage, text)


def _kind(param: Any) -> str:
    """What stands for the value: N, TEXT, FILE."""
    name = str(getattr(getattr(param, "type", None), "name", "")) or _annotated(param)
    known = {"int": "N", "integer": "N", "float": "X", "path": "FILE"}
    return known.get(name.lower().strip("<>"), "TEXT")


def _annotated(param: Any) -> str:
    """The type's name in versions of typer whose options do not carry a click type."""
    bare = getattr(param, "bare_type", None)
    return str(bare()) if callable(bare) else ""


def _entry(usage: str, text: str) -> list[str]:
    room = max(20, _width() - TEXT_COLUMN)
    lines = textwrap.wrap(text, room) or [""]
    head = "  " + usage
    if len(head) + 2 > TEXT_COLUMN:
        return [head, *(" " * TEXT_COLUMN + line for line in lines)]
    first = f"{head:<{TEXT_COLUMN}}{lines[0]}"
    return [first.rstrip(), *(" " * TEXT_COLUMN + line for line in lines[1:])]


def _width() -> int:
    return min(MAX_WIDTH, shutil.get_terminal_size().columns)
