"""`llmc serve` with several models: bind the port, check the paths, serve; loads no model yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from llmc.cli.console import banner, note, stderr_console
from llmc.cli.flag_names import name_flags
from llmc.cli.serve_run import listening, warn_if_open, where
from llmc.config import EngineConfig
from llmc.errors import ConfigError, LlmcError
from llmc.logs import set_up_logging
from llmc.server.run import check_certificates, serve
from llmc.server.settings import ServerSettings
from llmc.startup.resolve import check_paths


def run_several(
    configs: Mapping[str, EngineConfig],
    settings: ServerSettings,
    *,
    log_level: str,
    log_format: str,
) -> None:
    """Serve `configs`, keyed by model name. ConfigError if none of them can be served."""
    settings = replace(settings, certificate=False)  # no checks of models that come and go
    set_up_logging(log_level, log_format)
    console = stderr_console()
    check_certificates(settings)
    errors = {name: _error(config) for name, config in configs.items()}
    if all(errors.values()):
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in errors.items()))
    for name, why in errors.items():
        if why:
            note(console, f"{name} can't be served: {why}", style="yellow")
    with listening(settings) as sock:
        from llmc.processes.engine_processes import EngineProcesses
        from llmc.server.model_manager import ModelManager, ServedModel
        from llmc.server.several_models_app import create_several_models_app

        models = [ServedModel(name, config, errors[name]) for name, config in configs.items()]
        start = partial(EngineProcesses, log_level=log_level, log_format=log_format)
        app = create_several_models_app(ModelManager(models, settings, start), settings)
        warn_if_open(console, settings)
        rows = [
            where(settings, sock),
            ("models", ", ".join(configs)),
            ("API key", "required" if settings.api_keys else "none"),
        ]
        serve(app, settings, sock, on_ready=lambda: banner(console, "llmc is ready", rows))


def _error(config: EngineConfig) -> str:
    """The error in a model's paths, or ""; loads nothing."""
    try:
        check_paths(config)
    except LlmcError as error:
        return name_flags(str(error))
    return ""
