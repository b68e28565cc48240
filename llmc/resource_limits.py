"""Limits on memory, time and disk of a process that works on untrusted input."""

from __future__ import annotations


def limit_resources(**most: int) -> None:
    """Limit this process: `limit_resources(AS=2**30)` is RLIMIT_AS. A stricter limit that the
    system has set already stays. Does nothing where the system has no such limits."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    for name, value in most.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        low = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (low, low))
