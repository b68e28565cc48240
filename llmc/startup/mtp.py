"""A multi-token prediction layer in the served model's own checkpoint -> ModelSource."""

from __future__ import annotations

import re
from dataclasses import replace

from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.passes.base import OUTLINE
from llmc.pooling import DraftHead
from llmc.startup.resolve import ModelSource

_MARK = re.compile(r".*\blayers\.\d+\.eh_proj\.weight")


def resolve_mtp(target: ModelSource, config: EngineConfig) -> ModelSource:
    """The first such layer. ConfigError if the checkpoint has none."""
    if not any(_MARK.fullmatch(name) for name in target.open_tensors()):
        raise ConfigError(
            f"the checkpoint of {target.files.name!r} has no multi-token prediction layer "
            "(layers.N.eh_proj after the model's layers), which the speculative method mtp "
            "requires; leave speculative_config out, or use another method"
        )
    config = replace(config, passes={**config.passes, OUTLINE: False})
    head = DraftHead(vocab_size=target.facts.vocab_size, is_own_layer=True)
    return replace(target, config=config, draft_head=head)
