"""How many calls each API process of a server has, so that `--max-queue` bounds all of them.

A file in the server's private folder has two numbers per process: the calls being prepared, and
the sequences in flight. Each process writes its own. Whoever admits a call holds the file's lock,
which the system releases if the process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_PAIR = struct.Struct("=QQ")


class SharedCounts:
    """The numbers of the processes 0 to `size - 1`, of which this is number `index`."""

    def __init__(self, folder: str, *, index: int, size: int) -> None:
        self._index = index
        self._file = os.open(Path(folder, "calls"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, size * _PAIR.size)  # keeps what others have written
        self._numbers = mmap.mmap(self._file, size * _PAIR.size)
        self.clear(index)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other process admits a call meanwhile."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def write(self, num_preparing: int, num_sequences: int) -> None:
        """Set the numbers of this process."""
        _PAIR.pack_into(self._numbers, self._index * _PAIR.size, num_preparing, num_sequences)

    def others(self) -> tuple[int, int]:
        """The sums of the other processes: calls being prepared, and sequences in flight."""
        pairs = [one for i, one in enumerate(_PAIR.iter_unpack(self._numbers)) if i != self._index]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    def clear(self, index: int) -> None:
        """Set the numbers of a process that has ended to 0."""
        _PAIR.pack_into(self._numbers, index * _PAIR.size, 0, 0)
