"""Config -> step function: build on meta, capture, rewrite by passes, load weights, lower."""
