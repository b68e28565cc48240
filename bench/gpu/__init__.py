"""All GPU measurements in one command: `python -m bench.gpu` (see README.md in this folder).

__main__ -> command (arguments, order, time) -> one process per part -> report (JSON, table)
"""
