"""`--help` in plain text, with the options in their panels.

typer's panels need rich and truncate flag names on an 80-column terminal, and its plain help has
no panels. This is the plain help with one section per panel.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

EPILOG = "Options can be set in the environment: --max-model-len is LLMC_MAX_MODEL_LEN."


class HelpCommand(TyperCommand):
    """A command whose options are listed panel by panel, those without one last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                names = str(param.metavar) if is_argument else record[0]  # without its type
                panels.setdefault(_panel(param), []).append((names, record[1]))
        general = panels.pop("Options", [])
        for title, records in [*panels.items(), ("Options", general)]:
            with formatter.section(title):
                formatter.write_dl(records)


def _panel(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or "Options"
