"""All that a GPU has to show, in one command: `python -m bench.gpu` (README.md beside this).

__main__ -> command (arguments, order, time) -> one process a part -> report (JSON, table)
"""
