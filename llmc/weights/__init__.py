"""Checkpoint files to tensors: names, layouts, dtypes."""
