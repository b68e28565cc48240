"""Tool calls: the format in which a model writes them, learned from its own chat template."""
