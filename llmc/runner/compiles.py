"""Counts compilations that happen while a step is launched. A running engine should have none, as
every reachable kernel is built at startup or in the background.

Triton and torch.compile report compilations to hooks; those that happen on the
thread that launches, while it launches, are counted.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_launching = threading.local()  # `.watch`: the CompileWatch whose step this thread launches
_installed: set[str] = set()


class CompileWatch:
    """Counts the compilations that steps have waited for (`num_compiles`)."""

    def __init__(self) -> None:
        self.num_compiles = 0

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Count what this thread compiles inside this context."""
        _install_hooks()
        _launching.watch = self
        try:
            yield
        finally:
            _launching.watch = None


def _count(what: str) -> None:
    watch: CompileWatch | None = getattr(_launching, "watch", None)
    if watch is not None:
        watch.num_compiles += 1
        logger.warning("a step waited for a compilation: %s", what)


def _install_hooks() -> None:
    """Hook into the compilers that this process has loaded; others cannot compile anything."""
    if "triton.knobs" in sys.modules and "triton.knobs" not in _installed:
        _installed.add("triton.knobs")
        _watch_triton()
    if "torch._dynamo" in sys.modules:
        _watch_dynamo()


def _watch_triton() -> None:
    knobs = importlib.import_module("triton.knobs")
    before: Callable[..., Any] | None = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        _count(str(kwargs.get("repr", "a Triton kernel")))
        return before(*args, **kwargs) if before is not None else None

    knobs.runtime.jit_post_compile_hook = hook


def _watch_dynamo() -> None:
    handler = importlib.import_module("torch._dynamo.callback").callback_handler
    if _on_dynamo not in handler.start_callbacks:  # torch._dynamo.reset() drops them
        handler.register_start_callback(_on_dynamo)


def _on_dynamo(*args: Any) -> None:
    _count("a graph of torch.compile")
