"""Ablations: what each technique of the engine gives, with it and without it, in one run.

`python -m bench.ablations`; a technique is a row of `table.ROWS`.
"""
