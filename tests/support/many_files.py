"""A process with more open files than select() can watch, as a server has under load."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

_FD_SETSIZE = 1024


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """What is opened in the block has a descriptor that is too large for select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _FD_SETSIZE
    if 0 <= hard < wanted:
        pytest.skip(f"this system allows {hard} open files; {wanted} are needed")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    held: list[int] = []
    try:
        while not held or held[-1] <= _FD_SETSIZE:
            held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
