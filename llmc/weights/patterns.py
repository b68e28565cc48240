"""Regular expressions of checkpoints and adapters, which anyone may have written.

They are matched by Rust's engine, which pydantic contains, in time that is linear in the length of
a name: with Python's `re`, a pattern of a few stars never ends. Those that look around or refer
back, which that engine lacks, are only matched where checkpoints have them, in a limited time.
So are all without pydantic, which only the server needs.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable

NUM_CACHED = 4096
SLOW_S = 0.01  # thousands of times what a name takes
LIMIT_S = 2.0  # CPU time of all slow matches of a pattern
MAX_EXPANDED = 1_000_000  # characters: `regex` writes out what is repeated, nested or not
_COUNTS = re.compile(r"\{(\d*),?(\d*)\}")


@functools.lru_cache(maxsize=NUM_CACHED)
def linear(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern, which begins with `^`, is found in a name, in linear time. ValueError for
    one that can't be used, such as one that looks around."""
    try:
        from pydantic_core import SchemaError, SchemaValidator, core_schema
    except ImportError:
        return _Backtracking(pattern)
    try:
        schema = core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True)
        return SchemaValidator(schema).isinstance_python
    except (SchemaError, UnicodeError) as error:
        raise ValueError(str(error)) from error


@functools.lru_cache(maxsize=NUM_CACHED)
def at_start(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern matches the start of a name, as `re.match`. ValueError for one that is
    invalid; the function raises it for one that takes too long."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not a valid regular expression: {error}") from error
    try:
        return linear(f"^(?:{pattern})")
    except ValueError:
        return _Backtracking(pattern)


class _Backtracking:
    def __init__(self, pattern: str) -> None:
        import regex  # type: ignore[import-untyped]

        counts = (max(1, *(int(n[:9] or 1) for n in pair)) for pair in _COUNTS.findall(pattern))
        if len(pattern) * math.prod(counts) > MAX_EXPANDED:
            raise ValueError("it repeats too much")
        self._left_s = LIMIT_S
        try:
            self._match = regex.compile(pattern).match
        except (regex.error, RecursionError) as error:  # also for what `re` takes
            raise ValueError(f"it is not a valid regular expression: {error}") from error

    def __call__(self, name: str) -> bool:
        started = time.process_time()
        try:
            found = self._match(name, timeout=self._left_s)
        except TimeoutError as error:
            raise ValueError(f"matching it takes more than {LIMIT_S:g} s") from error
        took_s = time.process_time() - started
        if took_s > SLOW_S:
            self._left_s = max(SLOW_S, self._left_s - took_s)
        return found is not None
