"""The ops of a step: one file per op, with its schema and reference. Fast ones: `cpu/`, `triton/`.

Depends on torch and triton, and on nothing else in this project except `llmc.errors`.
"""

if __name__ != "llmc.kernels":
    raise ImportError(
        f"this folder was imported as `{__name__}`; it is installed as `llmc.kernels` "
        "(run `pip install -e .`, use the `llmc` command, or run Python with `-P`)"
    )
