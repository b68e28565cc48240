"""The `llmc` command: thin typer commands over the library. Imports torch only after parsing."""

if __name__ != "llmc.cli":
    raise ImportError(
        f"this folder was imported as `{__name__}`; it is installed as `llmc.cli` "
        "(run `pip install -e .`, use the `llmc` command, or run Python with `-P`)"
    )
