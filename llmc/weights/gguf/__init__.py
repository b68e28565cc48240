"""GGUF files: their headers, and their tensors as a model's parameters."""
