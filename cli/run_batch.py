"""`llmc run-batch`: answer the requests in a file with the server's routes, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from llmc.cli.options import engine_options, option
from llmc.config import EngineConfig
from llmc.errors import ConfigError

BATCH_RUN_PANEL = "Batch"


@engine_options()
def command(
    config: EngineConfig,
    input_file: Annotated[
        str,
        option(
            "--input-file",
            "-i",
            metavar="FILE",
            help="JSON lines, each with custom_id, url (/v1/chat/completions ...) and body.",
            panel=BATCH_RUN_PANEL,
        ),
    ],
    output_file: Annotated[
        str,
        option(
            "--output-file",
            "-o",
            metavar="FILE",
            help="Output file, one line per answer; written when all are finished.",
            panel=BATCH_RUN_PANEL,
        ),
    ],
) -> None:
    """Answer the requests in a file in OpenAI's batch format.

    A failed request gets a line with its error; the others are still answered.
    """
    source, target = Path(input_file), Path(output_file)
    if not source.is_file():
        raise ConfigError(f"--input-file {input_file!r} is not a file")
    if not target.parent.is_dir():
        raise ConfigError(f"--output-file {output_file!r}: its folder does not exist")
    if target.is_dir():
        raise ConfigError(f"--output-file {output_file!r} is a folder")
    if target.exists() and target.samefile(source):
        raise ConfigError("--output-file must differ from --input-file")
    from llmc.cli.run_batch_run import run

    run(config, source, target)
