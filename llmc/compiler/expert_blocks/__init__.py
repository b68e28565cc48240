"""Blocks of routed experts that a model's own code computes in a loop over them, row by row."""
