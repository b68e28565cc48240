"""How a start is shown: a line for each finished phase, and on a terminal what runs now."""

from __future__ import annotations

import io
import time

from rich.console import Console

from llmc.cli.console import phases
from llmc.model_info import Phase, PhaseBegins

ENDED = Phase(name="read config", seconds=0.25, detail="tiny")


def test_a_terminal_shows_what_runs_and_for_how_long() -> None:
    out = io.StringIO()
    with phases(Console(file=out, force_terminal=True, width=80)) as on_phase:
        on_phase(PhaseBegins(name="read config"))
        on_phase(ENDED)
        on_phase(PhaseBegins(name="build C++ ops"))
        deadline = time.monotonic() + 20
        while "build C++ ops, 1 s so far" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "build C++ ops, 0 s so far" in out.getvalue()
    assert "build C++ ops, 1 s so far" in out.getvalue()  # it advances within a phase
    assert "read config             0.25 s  tiny" in out.getvalue()


def test_a_log_has_a_line_for_each_finished_phase() -> None:
    out = io.StringIO()
    with phases(Console(file=out, soft_wrap=True)) as on_phase:
        on_phase(PhaseBegins(name="read config"))
        on_phase(ENDED)
        on_phase(PhaseBegins(name="build C++ ops"))
    assert out.getvalue() == "read config             0.25 s  tiny\n"
