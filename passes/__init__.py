"""Graph rewrites: each file is one pass, graph in, graph out; `pipeline.py` lists them in order.

Knows ops and FX graphs; never the engine, the runner or transformers.
"""

if __name__ != "llmc.passes":
    raise ImportError(
        f"this folder was imported as `{__name__}`; it is installed as `llmc.passes` "
        "(run `pip install -e .`, use the `llmc` command, or run Python with `-P`)"
    )
