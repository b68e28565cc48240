"""`--uds PATH`: a Unix socket instead of a port, for a proxy on the same machine.

Anyone who can write to the file can connect: with the usual umask, only its owner.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from llmc.errors import ConfigError


@contextlib.contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """A socket bound to `path`, which is removed afterwards. ConfigError if `path` is in use."""
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError as exc:
            raise ConfigError(f"can't create the socket {path!r}: {exc}; check --uds") from None
        sock.setblocking(False)
        yield sock
    finally:
        sock.close()
        if _is_socket(path):
            os.unlink(path)


def _clear(path: str) -> None:
    """Remove the socket of a dead server; anything else is left in place."""
    if not os.path.lexists(path):
        return
    if not _is_socket(path):
        raise ConfigError(f"{path!r} exists and is not a socket; give --uds another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as exc:
            raise ConfigError(f"the socket {path!r} can't be used: {exc}; check --uds") from None
        else:
            raise ConfigError(
                f"another server is listening on {path!r}; stop it, or give --uds another path"
            )


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False
