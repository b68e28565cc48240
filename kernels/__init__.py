"""The ops of a step: one file an op with its schema and reference; fast ones in `cpu/`, `triton/`.

Knows torch and triton and nothing else of this project (but `llmc.errors`).
"""

if __name__ != "llmc.kernels":
    raise ImportError(
        f"this folder was imported as `{__name__}`; it is installed as `llmc.kernels` "
        "(run `pip install -e .`, use the `llmc` command, or run Python with `-P`)"
    )
