"""`llmc check`: flags only; `check_show` prints the certificate."""

from __future__ import annotations

from typing import Annotated

from llmc.cli.options import engine_options, option
from llmc.config import EngineConfig
from llmc.errors import CompileError, ConfigError

CHECK_PANEL = "Check"


@engine_options()
def command(
    config: EngineConfig,
    longest_prompt: Annotated[
        int | None,
        option(
            "--longest-prompt",
            metavar="TOKENS",
            help="Length of the longest prompt; more than a model's window to test the window.",
            panel=CHECK_PANEL,
        ),
    ] = None,
    disable_culprit: Annotated[
        bool,
        option(
            "--disable-culprit",
            help="Certify the model without the pass that makes a difference; print the switch.",
            panel=CHECK_PANEL,
        ),
    ] = False,
    json: Annotated[
        bool,
        option("--json", help="Print the certificate as JSON.", panel=CHECK_PANEL, envvar=None),
    ] = False,
) -> int:
    """Compare the compiled model with its own code, token by token.

    Runs transformers' unmodified module and llmc's step on the same tokens, in packed batches,
    chunked prompts and decode steps, and compares hidden states and logits. A difference is
    traced to the pass that makes it. The certificate is kept for `llmc serve --verify`. Exit
    code 0: certified, 1: not.
    """
    if longest_prompt is not None and longest_prompt < 1:
        raise ConfigError(f"--longest-prompt must be a positive integer, got {longest_prompt}")
    from llmc.startup.resolve import check_paths

    check_paths(config)  # before torch is imported
    from llmc.cli.check_show import show
    from llmc.cli.console import note, phases, stderr_console

    console = stderr_console()
    try:
        with phases(console) as on_phase:
            from llmc.check.check import check_model

            certificate = check_model(
                config,
                longest_prompt=longest_prompt,
                disable_culprits=disable_culprit,
                on_phase=on_phase,
            )
    except CompileError as error:
        note(console, f"not certified: {error}", style="red")
        return 1
    if json:
        print(certificate.to_json(), end="")
    else:
        show(certificate)
    return 0 if certificate.certified else 1
