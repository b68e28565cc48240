"""Text that arrives in pieces may end in the middle of a mark."""

from __future__ import annotations


def partial_length(mark: str, text: str) -> int:
    """Length of the longest suffix of `text` that could become `mark`."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
