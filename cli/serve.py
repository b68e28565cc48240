"""`llmc serve`: flags only; `serve_run` binds the port, loads the model and runs the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from llmc.cli.options import changed, engine_options, option, parse_size
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.logs import FORMATS
from llmc.lora_request import HIGHEST_RAISED_RANK

SERVER_PANEL = "Server"
LOG_LEVELS = ("debug", "info", "warning", "error")


@engine_options(several_models=True)
def command(
    config: EngineConfig,
    more_models: list[str],
    models: Annotated[
        str | None,
        option(
            "--models",
            help='Models by the names to serve them under, each with its options: {"small": '
            '{"model": "DIR", "max-model-len": 4096}}. Other flags apply to all of them.',
            metavar="JSON",
            panel=SERVER_PANEL,
        ),
    ] = None,
    model_idle_timeout: Annotated[
        float | None,
        option(
            "--model-idle-timeout",
            help="With several models: unload a model after this many seconds without a request.",
            metavar="SECONDS",
            panel=SERVER_PANEL,
        ),
    ] = None,
    model_memory: Annotated[
        str | None,
        option(
            "--model-memory",
            help="With several models: maximum total memory, such as 16G. To load another model, "
            "the longest idle ones are unloaded. Default: no limit.",
            metavar="BYTES",
            panel=SERVER_PANEL,
        ),
    ] = None,
    host: Annotated[
        str,
        option(
            "--host",
            help="Address to listen on; 0.0.0.0 accepts other machines (then set an API key).",
            panel=SERVER_PANEL,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        option(
            "--port",
            help="Port to listen on; 0 picks a free one.",
            metavar="PORT",
            panel=SERVER_PANEL,
        ),
    ] = 8000,
    uds: Annotated[
        str | None,
        option(
            "--uds",
            help="Listen on a Unix socket at this path instead of a port.",
            metavar="PATH",
            panel=SERVER_PANEL,
        ),
    ] = None,
    ssl_certfile: Annotated[
        str | None,
        option(
            "--ssl-certfile",
            help="Serve HTTPS with this certificate, a PEM file with its chain.",
            metavar="FILE",
            panel=SERVER_PANEL,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        str | None,
        option(
            "--ssl-keyfile",
            help="The certificate's key, a PEM file. Default: in the certificate file.",
            metavar="FILE",
            panel=SERVER_PANEL,
        ),
    ] = None,
    ssl_ca_certs: Annotated[
        str | None,
        option(
            "--ssl-ca-certs",
            help="Accept only clients with a certificate signed by one of these CAs, a PEM file.",
            metavar="FILE",
            panel=SERVER_PANEL,
        ),
    ] = None,
    root_path: Annotated[
        str,
        option(
            "--root-path",
            help="Path prefix under which a proxy exposes the server, such as /llm.",
            metavar="PATH",
            panel=SERVER_PANEL,
        ),
    ] = "",
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            help="Name of the model in the API; can be repeated. Default: the model's own.",
            metavar="NAME",
            panel=SERVER_PANEL,
        ),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        option(
            "--lora-modules",
            help="LoRA adapter to serve as the model NAME: a directory in PEFT format, a GGUF file "
            "or a hub id; can be repeated. Sets --enable-lora, and raises --max-lora-rank to "
            f"its rank (up to {HIGHEST_RAISED_RANK}).",
            metavar="NAME=DIR",
            panel=SERVER_PANEL,
        ),
    ] = None,
    runtime_lora_dir: Annotated[
        str | None,
        option(
            "--runtime-lora-dir",
            help="Allow clients to load adapters from directories inside this one, and to "
            "unload them (/v1/load_lora_adapter); sets --enable-lora. Default: not allowed.",
            metavar="DIR",
            panel=SERVER_PANEL,
        ),
    ] = None,
    batch_dir: Annotated[
        str | None,
        option(
            "--batch-dir",
            help="Folder for clients' files and batches (/v1/files, /v1/batches). Without it, "
            "these routes are disabled.",
            metavar="DIR",
            panel=SERVER_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            help="Key that clients must send; can be repeated. Prefer LLMC_API_KEY, since other "
            "users can see command lines.",
            envvar=["LLMC_API_KEY", "VLLM_API_KEY"],
            metavar="KEY",
            panel=SERVER_PANEL,
        ),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        option(
            "--admin-api-key",
            help="Key of the operator, for /load, /server_info, profiles, /reset_prefix_cache, "
            "/abort_requests, /sleep and /wake_up. Without it, these routes are disabled.",
            metavar="KEY",
            panel=SERVER_PANEL,
        ),
    ] = None,
    profile_dir: Annotated[
        str,
        option(
            "--profile-dir",
            help="Where /stop_profile writes the profile.",
            metavar="DIR",
            panel=SERVER_PANEL,
        ),
    ] = "profiles",
    salt_by_api_key: Annotated[
        bool,
        option(
            "--salt-by-api-key/--no-salt-by-api-key",
            help="Keep cached prefixes separate for each API key, so that callers can't infer "
            "from response times what others have sent.",
            panel=SERVER_PANEL,
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        option(
            "--allowed-host",
            help="Additional host name under which clients can reach a server without keys; "
            "can be repeated.",
            metavar="NAME",
            panel=SERVER_PANEL,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        option(
            "--allowed-origin",
            help="Origin of web pages that are allowed to call the server from a browser, such as "
            "http://localhost:3000, or * for any; can be repeated.",
            metavar="ORIGIN",
            panel=SERVER_PANEL,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        option(
            "--shutdown-timeout",
            metavar="SECONDS",
            help="Time that running requests have to finish after Ctrl-C.",
            panel=SERVER_PANEL,
        ),
    ] = 30.0,
    stream_interval: Annotated[
        int,
        option(
            "--stream-interval",
            metavar="TOKENS",
            help="Tokens per event of a stream; the first token is always sent at once.",
            panel=SERVER_PANEL,
        ),
    ] = 1,
    api_workers: Annotated[
        int,
        option(
            "--api-workers",
            metavar="PROCESSES",
            help="Number of HTTP processes, all on one engine; use more for many short requests.",
            panel=SERVER_PANEL,
        ),
    ] = 1,
    engine_process: Annotated[
        bool,
        option(
            "--engine-process/--no-engine-process",
            help="Run the engine in a separate process, and restart it if it dies.",
            panel=SERVER_PANEL,
        ),
    ] = True,
    ui: Annotated[
        bool,
        option(
            "--ui/--no-ui",
            help="Serve a web page at / for chatting and for monitoring the engine.",
            panel=SERVER_PANEL,
        ),
    ] = True,
    verify: Annotated[
        bool,
        option(
            "--verify",
            help="Serve the model only if its rewritten graph is certified; see llmc check.",
            panel=SERVER_PANEL,
        ),
    ] = False,
    certificate: Annotated[
        bool,
        option(
            "--certificate/--no-certificate",
            help="Compare a small model of this architecture with transformers in the background, "
            "once per version.",
            panel=SERVER_PANEL,
        ),
    ] = True,
    log_level: Annotated[
        str,
        option(
            "--log-level",
            help="Lowest level to log on stderr.",
            metavar="[" + "|".join(LOG_LEVELS) + "]",
            panel=SERVER_PANEL,
        ),
    ] = "info",
    log_format: Annotated[
        str,
        option(
            "--log-format",
            help="Format of log lines.",
            metavar="[" + "|".join(FORMATS) + "]",
            panel=SERVER_PANEL,
        ),
    ] = "text",
    vllm_metrics: Annotated[
        bool,
        option(
            "--vllm-metrics/--no-vllm-metrics",
            help="Also export metrics under vLLM's names, for its dashboards.",
            panel=SERVER_PANEL,
        ),
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "--otlp-traces-endpoint",
            help="Send a trace of each request to this URL, with OTLP over HTTP. Needs the extra "
            "`otel`.",
            metavar="URL",
            panel=SERVER_PANEL,
        ),
    ] = None,
    access_log: Annotated[
        bool,
        option(
            "--access-log/--no-access-log",
            help="Log one line per request.",
            panel=SERVER_PANEL,
        ),
    ] = True,
) -> None:
    """Serve one or several models over HTTP with the OpenAI API.

    Without MODEL, serves the default model.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, got {port}")
    if log_level not in LOG_LEVELS:
        raise ConfigError(f"unknown log level {log_level!r}; choose one of {', '.join(LOG_LEVELS)}")
    if log_format not in FORMATS:
        raise ConfigError(f"unknown log format {log_format!r}; choose one of {', '.join(FORMATS)}")
    if not shutdown_timeout >= 0:
        raise ConfigError(f"--shutdown-timeout must be at least 0, got {shutdown_timeout}")
    for flag, number in (("--stream-interval", stream_interval), ("--api-workers", api_workers)):
        if number < 1:
            raise ConfigError(f"{flag} must be at least 1, got {number}")
    if salt_by_api_key and not api_key:
        raise ConfigError("--salt-by-api-key needs at least one --api-key")
    if lora_modules or runtime_lora_dir:
        config = replace(config, enable_lora=True)
    if api_workers > 1 and not engine_process:
        raise ConfigError("--api-workers needs the engine in a separate process")
    if config.data_parallel_size > 1 and not engine_process:
        raise ConfigError("--data-parallel-size needs the engines in separate processes")
    several = _several(config, more_models, models)
    if several:
        _check_several(
            {
                "--served-model-name": bool(served_model_name),
                "--lora-modules": bool(lora_modules),
                "--runtime-lora-dir": runtime_lora_dir is not None,
                "--batch-dir": batch_dir is not None,
                "--api-workers": api_workers > 1,
                "--no-engine-process": not engine_process,
                "--verify": verify,
            }
        )
    elif model_idle_timeout is not None or model_memory is not None:
        raise ConfigError("--model-idle-timeout and --model-memory are for several models")
    else:
        from llmc.startup.resolve import check_paths

        check_paths(config)  # before the imports below, which take a second or more
    from llmc.server.settings import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        uds=uds,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_ca_certs=ssl_ca_certs,
        root_path=root_path.rstrip("/"),
        stream_interval=stream_interval,
        api_workers=api_workers,
        served_model_names=tuple(served_model_name or ()),
        lora_modules=_lora_modules(lora_modules or ()),
        runtime_lora_dir=runtime_lora_dir,
        batch_dir=batch_dir,
        model_idle_timeout_s=model_idle_timeout,
        model_memory=None if model_memory is None else parse_size(model_memory, "--model-memory"),
        api_keys=tuple(api_key or ()),
        admin_api_key=admin_api_key,
        profile_dir=profile_dir,
        salt_by_api_key=salt_by_api_key,
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        shutdown_timeout_s=shutdown_timeout,
        access_log=access_log,
        vllm_metrics=vllm_metrics,
        otlp_traces_endpoint=otlp_traces_endpoint,
        ui=ui,
        certificate=certificate,
    )
    if verify:
        from llmc.cli.verify import require_certificate

        require_certificate(config)
    if several:
        from llmc.cli.serve_several import run_several

        run_several(several, settings, log_level=log_level, log_format=log_format)
        return
    from llmc.cli.serve_run import run_server

    run_server(
        config,
        settings,
        log_level=log_level,
        log_format=log_format,
        engine_process=engine_process,
    )


def _several(
    config: EngineConfig, more_models: Sequence[str], models: str | None
) -> dict[str, EngineConfig]:
    """Configs by model name; empty if a single model is served."""
    if models is None and not more_models:
        return {}
    found: dict[str, EngineConfig] = {}
    if models is not None:
        if config.model is not None:
            raise ConfigError("give models with --models or as MODEL ..., not both")
        try:
            given = json.loads(models)
        except ValueError as error:
            raise ConfigError(f"--models must be JSON: {error}") from None
        if not isinstance(given, dict) or not given:
            raise ConfigError('--models must look like {"NAME": {"model": "DIR"}}')
        for name, options in given.items():
            if not name or not isinstance(options, dict) or not options.get("model"):
                raise ConfigError(f"--models: {name!r:.80} must be an object with a model")
            found[name] = changed(config, options)
        return found
    from llmc.startup.model_files import served_name

    for model in (config.model, *more_models):
        one = replace(config, model=model)
        name = served_name(one)
        if name in found:
            raise ConfigError(f"two models would be served as {name!r}; name them with --models")
        found[name] = one
    return found


def _check_several(asked: dict[str, bool]) -> None:
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: not supported with several models; remove it")


def _lora_modules(words: Sequence[str]) -> dict[str, str]:
    """Directories by name, from `name=dir`, {"name": ..., "path": ...} or a list of these."""
    found: dict[str, str] = {}
    for name, path in (pair for word in words for pair in _named_paths(word)):
        if name in found:
            raise ConfigError(
                f"--lora-modules has two adapters called {name!r:.80}; give each another name"
            )
        found[name] = path
    return found


def _named_paths(word: str) -> list[tuple[str, str]]:
    pairs: list[Any] = [word.partition("=")[::2]]
    if word.startswith(("{", "[")):
        try:
            given = json.loads(word)
            items = given if isinstance(given, list) else [given]
            pairs = [(item["name"], item["path"]) for item in items]
        except (ValueError, KeyError, TypeError, RecursionError):
            pairs = [()]
    if not all(pair and all(isinstance(part, str) and part for part in pair) for pair in pairs):
        raise ConfigError(
            '--lora-modules needs NAME=DIR or {"name": "NAME", "path": "DIR"} for each adapter, '
            f"got {word!r:.200}"
        )
    return pairs
