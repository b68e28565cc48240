"""Python's garbage collections, which take 0.1 to 0.3 s for the objects of a model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """No thread starts a collection meanwhile, unless it calls `gc.collect`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_forever() -> None:
    """Leave everything that exists out of garbage collections, for a process that serves one engine
    to its end. Modules and the graph are a million objects: going through them takes 0.1 to 0.3 s,
    in which no request advances."""
    gc.freeze()
