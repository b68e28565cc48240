"""`llmc check`: flags only; `check_show` prints the certificate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from llmc.check.tokens import MAX_ADAPTERS
from llmc.cli.flag_names import name_flags
from llmc.cli.options import engine_options, option
from llmc.config import EngineConfig
from llmc.errors import CompileError, ConfigError
from llmc.lora_request import LoRARequest

CHECK_PANEL = "Check"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


@engine_options()
def command(
    config: EngineConfig,
    longest_prompt: Annotated[
        int | None,
        option(
            "--longest-prompt",
            metavar="TOKENS",
            help="Length of the longest prompt; exceed a model's window to test the window.",
            panel=CHECK_PANEL,
        ),
    ] = None,
    disable_culprit: Annotated[
        bool,
        option(
            "--disable-culprit",
            help="Certify the model without the pass that causes a difference; print the flag.",
            panel=CHECK_PANEL,
        ),
    ] = False,
    lora: Annotated[
        list[str] | None,
        option(
            "--lora",
            metavar="DIR",
            help="LoRA adapter to check the model with: a directory in PEFT format, a GGUF file or "
            "a hub id; can be repeated. Some requests then use an adapter, and the others the base "
            "model.",
            panel=CHECK_PANEL,
        ),
    ] = None,
    json: Annotated[
        bool,
        option("--json", help="Print the certificate as JSON.", panel=CHECK_PANEL, envvar=None),
    ] = False,
) -> int:
    """Compare the compiled model with its own code, token by token.

    Runs transformers' unmodified module and llmc's step on the same tokens, in packed batches,
    chunked prompts and decode steps, and compares hidden states and logits. A difference is
    traced to the pass that causes it. The certificate is saved for `llmc serve --verify`. Exit
    code 0: certified, 1: not certified.
    """
    if longest_prompt is not None and longest_prompt < 1:
        raise ConfigError(f"--longest-prompt must be a positive integer, got {longest_prompt}")
    from llmc.startup.resolve import check_paths

    config, adapters = with_lora(config, lora or ())
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
                adapters=adapters,
                on_phase=on_phase,
            )
    except CompileError as error:
        note(console, f"not certified: {name_flags(str(error))}", style="red")
        return 1
    if json:
        print(certificate.to_json(), end="")
    else:
        show(certificate)
    return 0 if certificate.certified else 1


def with_lora(
    config: EngineConfig, folders: Sequence[str]
) -> tuple[EngineConfig, list[LoRARequest]]:
    """Return the config with a slot for each adapter, and the adapters' requests."""
    if not folders:
        return config, []
    if len(folders) > MAX_ADAPTERS:
        raise ConfigError(
            f"--lora takes at most {MAX_ADAPTERS} adapters at a time, got {len(folders)}"
        )
    slots = max(config.max_loras, len(folders))
    in_memory = None if config.max_cpu_loras is None else max(config.max_cpu_loras, slots)
    made = replace(config, enable_lora=True, max_loras=slots, max_cpu_loras=in_memory)
    return made, [
        LoRARequest(f"{number}-{_NOT_IN_NAMES.sub('-', Path(folder).name)}"[:200], number, folder)
        for number, folder in enumerate(folders, start=1)
    ]
