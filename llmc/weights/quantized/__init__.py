"""Quantized checkpoints: which tensors make up a weight, and how they are read."""
