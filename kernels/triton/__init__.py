"""Ops in Triton: the only place that imports triton."""
