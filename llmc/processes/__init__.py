"""The engine in a process of its own: supervisor, messages between processes, errors."""
