"""The built-in model, started as live_server takes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.model_info import ModelInfo
from llmc.startup.start import start_engine
from llmc.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Builtin:
    engine: EngineCore
    info: ModelInfo
    tokenizer: Tokenizer
    config: EngineConfig


def start_builtin(**options: Any) -> Builtin:
    """At -O0 in float32; `options` are EngineConfig's."""
    config = EngineConfig(opt_level=0, dtype="float32", **options)
    started = start_engine(config)
    path = started.info.tokenizer_path
    assert path is not None
    tokenizer = Tokenizer.load(path)
    return Builtin(engine=started.engine, info=started.info, tokenizer=tokenizer, config=config)
