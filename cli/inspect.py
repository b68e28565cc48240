"""`llmc inspect`: flags only; `inspect_show` prints the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from llmc.cli.options import engine_options, option, parse_size
from llmc.config import EngineConfig
from llmc.errors import ConfigError

INSPECT_PANEL = "Inspect"


@engine_options()
def command(
    config: EngineConfig,
    memory: Annotated[
        str | None,
        option(
            "--memory",
            help="Memory to fit into, such as 24GiB. Default: this machine's.",
            metavar="BYTES",
            panel=INSPECT_PANEL,
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        option(
            "--bandwidth",
            help="Memory bandwidth to assume. Default: measured on this machine.",
            metavar="GB/s",
            panel=INSPECT_PANEL,
        ),
    ] = None,
    graph: Annotated[
        Path | None,
        option(
            "--graph",
            help="Write an HTML page that shows the graph before and after each pass.",
            metavar="FILE.html",
            panel=INSPECT_PANEL,
        ),
    ] = None,
    all_layers: Annotated[
        bool,
        option(
            "--all-layers",
            help="Capture every layer, not one of each kind; takes longer.",
            panel=INSPECT_PANEL,
        ),
    ] = False,
    json: Annotated[
        bool, option("--json", help="Print everything as JSON.", panel=INSPECT_PANEL, envvar=None)
    ] = False,
) -> None:
    """Show how llmc would run a model, from its config.json alone.

    Prints layers, parameters, cache sizes, what fits in memory, how fast it can decode, what each
    pass matches, and which kernels run. Loads no weights and needs no GPU, even with --device cuda.
    """
    if bandwidth is not None and not bandwidth > 0:
        raise ConfigError(f"--bandwidth must be above 0 GB/s, got {bandwidth}")
    memory_bytes = None if memory is None else parse_size(memory, "--memory")
    if graph is not None and not graph.absolute().parent.is_dir():
        raise ConfigError(f"--graph: the folder {str(graph.parent)!r} does not exist")
    from llmc.startup.resolve import check_paths

    check_paths(config)  # before torch is imported
    from llmc.cli import inspect_show
    from llmc.cli.console import note, spinner, stderr_console

    console = stderr_console()
    with spinner(console, "reading the model"):
        from llmc.inspect.inspect import inspect_model
        from llmc.inspect.machine import find_machine

        inspection = inspect_model(config, all_layers=all_layers)
        machine = find_machine(
            inspection.device, memory_bytes, None if bandwidth is None else bandwidth * 1e9
        )
    if json:
        inspect_show.print_json(inspection, machine)
    else:
        inspect_show.show(inspection, machine)
    if graph is not None:
        from llmc.inspect.page import write_page

        graph.write_text(write_page(inspection), encoding="utf-8")
        note(console, f"page written to {graph}")
