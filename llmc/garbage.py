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
