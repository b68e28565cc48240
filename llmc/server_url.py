"""The URL of a server that a command is to talk to."""

from __future__ import annotations

from urllib.parse import urlsplit

from llmc.errors import ConfigError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def uses_proxies(url: str) -> bool:
    """Whether a client of this URL uses the proxies that the environment names: not between two
    processes of one machine, where a proxy would look for the server on its own."""
    return urlsplit(url).hostname not in _LOOPBACK


def check_port(option: str, url: str) -> None:
    """Raise ConfigError if the URL can't be split into a host and a port, which HTTP clients report
    in several ways, if at all."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{option} must be a URL, got {url!r}: {error}") from None
