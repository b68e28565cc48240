"""pytest in a process of its own, for tests of what a process chooses once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def passed_alone(
    *arguments: str | Path, variables: Mapping[str, str] | None = None, without: Sequence[str] = ()
) -> int:
    """How many tests passed; none may fail.

    The process has this one's environment without the variables `without` and xdist's own, and
    with `variables`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if "XDIST" not in name and name not in without
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=_ROOT,
        env={**kept, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    output = done.stdout[-15000:]
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed, output
    return int(passed[1])
