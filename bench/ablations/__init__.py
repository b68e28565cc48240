"""Ablations: each technique of the engine is measured with it and without it, in one run.

`python -m bench.ablations`; a technique is a row of `table.ROWS`.
"""
