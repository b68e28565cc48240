"""Each model is captured once for all tests of this folder."""

from shared_captures import sharing  # noqa: F401 - is used by all
