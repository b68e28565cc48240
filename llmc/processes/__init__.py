"""Runs the engine in a separate process: supervisor, inter-process messages, errors."""
