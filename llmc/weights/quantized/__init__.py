"""Checkpoints stored quantized: which tensors make up a weight, and how they are read."""
