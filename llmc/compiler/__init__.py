"""Config -> step function: build on meta, capture, rewrite with passes, load weights, lower."""
