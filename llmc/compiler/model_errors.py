"""What models' code raises on inputs that it does not expect."""

from __future__ import annotations

MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
)
