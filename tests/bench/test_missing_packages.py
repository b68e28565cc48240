"""A benchmark that lacks a package says so in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "package"),
    [(["bench.soak", "--help"], "starlette"), (["bench.restart"], "uvicorn")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_missing_package_is_named(command: list[str], package: str, tmp_path: Path) -> None:
    """`bench.restart` repeats what the server says that it starts."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert first == f"error: this needs the Python package {package}, which is not installed"
    assert "Traceback" not in done.stderr
