"""Formats numbers for people to read."""

from __future__ import annotations

_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((10**9, "billion"), (10**6, "million"))


def format_bytes(count: float) -> str:
    for factor, unit in _BYTES:
        if count >= factor:
            value = count / factor
            return f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{count:,.0f} B"


def format_count(number: int) -> str:
    for factor, unit in _COUNTS:
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:,}"
