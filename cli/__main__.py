"""`python -P -m llmc.cli` is the `llmc` command."""

from llmc.cli.main import run

run()
