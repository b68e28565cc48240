"""The results of one part: failures are caught per measurement, and results are saved at once."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmc.load_test.report import write_json


class Record:
    """`data` by measurement; a failed one becomes {"error": ...}, and the others still run."""

    def __init__(self, path: Path | None = None) -> None:
        self.data: dict[str, Any] = {}
        self.path = path
        self.num_failed = 0

    def beside(self, name: str) -> Path | None:
        """Where to keep another file of this part; None if nothing is kept."""
        return None if self.path is None else self.path.with_name(name)

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        """Run a measurement; returns its result, or None if it failed."""
        start = time.perf_counter()
        print(f"- {name} ...", flush=True)
        try:
            result = work()
        except Exception as error:  # recorded, whatever it is; the next measurement still runs
            traceback.print_exc()
            self.num_failed += 1
            result = None
            self.data[name] = failure(error)
        else:
            self.data[name] = result
        self.data.setdefault("seconds", {})[name] = round(time.perf_counter() - start, 2)
        self.save()
        return result

    def save(self) -> None:
        if self.path is not None:
            write_json(self.path, finite(self.data))


def failure(error: BaseException) -> dict[str, str]:
    last = traceback.format_exception(error)[-4:]
    return {"error": f"{type(error).__name__}: {error}"[:2000], "where": "".join(last)[-3000:]}


def finite(value: Any) -> Any:
    """A JSON-compatible value: non-finite numbers become null, other objects strings."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [finite(v) for v in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
