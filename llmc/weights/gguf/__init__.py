"""GGUF files: what their header says, and their tensors as a model's parameters."""
