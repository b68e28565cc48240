"""Launch options that were measured: tuned.json, by chip, kernel and shape class.

`python -m bench.tune` writes it; what it does not list runs by the defaults of configs.py and
linear_configs.py. Nothing is tuned at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

TABLE = Path(__file__).with_name("tuned.json")
Config = TypeVar("Config")


@cache
def load_table() -> Mapping[tuple[str, str, str], Mapping[str, int]]:
    """(chip, kernel, shape class) -> the options that differ from the default."""
    lines = json.loads(TABLE.read_text(encoding="utf-8"))["lines"]
    return {(line["chip"], line["kernel"], line["shape"]): line["options"] for line in lines}


def tuned(default: Config, chip: str, kernel: str, shape: str) -> Config:
    """`default` (a dataclass), with what was measured as better on `chip` for this shape class."""
    options = load_table().get((chip, kernel, shape))
    if options is None:
        return default
    changed: Any = replace(default, **options)  # type: ignore[type-var]
    return changed  # type: ignore[no-any-return]
