"""EngineConfig -> a loaded engine, printing its phases. The first module that loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from llmc.cli.console import phases
from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.garbage import keep_forever, without_collections

if TYPE_CHECKING:
    from llmc.async_llm import AsyncLLM
    from llmc.startup.start import Started


def load_async_llm(config: EngineConfig, console: Console, *, quiet: bool = False) -> AsyncLLM:
    from llmc.startup.resolve import check_paths

    check_paths(config)
    # Until the objects of start-up are kept: the first collection after it would visit them all.
    with phases(console, quiet=quiet) as on_phase, without_collections():
        from llmc.async_llm import AsyncLLM
        from llmc.frontend.engine_options import load_tokenizer, refuse_several, start

        started = start(refuse_several(config), on_phase)
        llm = AsyncLLM.from_started(started, config, load_tokenizer(config, started.info))
        keep_forever()
        return llm


def load_engine(config: EngineConfig, console: Console) -> Started:
    """Load an engine without tokenizer and detokenizer, for generation benchmarks."""
    with phases(console) as on_phase:
        from llmc.frontend.engine_options import refuse_several
        from llmc.startup.start import start_engine

        started = start_engine(refuse_several(config), on_phase)
    if started.info.pooling is not None:
        raise ConfigError(
            f"{started.info.name} is served for its vectors, but this benchmark measures text "
            "generation; request that with --task generate"
        )
    return started
