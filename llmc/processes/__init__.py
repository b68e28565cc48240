"""The engine in a separate process: supervisor, messages between processes, errors."""
