"""The draft model of `speculative_config`, started beside the model that it drafts for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from llmc.engine.options import EngineLimits
from llmc.engine.spec_decode.draft_model import DraftModel, DraftModelSpeculation
from llmc.errors import CheckpointError, ConfigError
from llmc.speculative_config import SpeculativeConfig
from llmc.startup.compile import CompiledModel, LoadedModel, load_model
from llmc.startup.config_facts import FactsCache
from llmc.startup.resolve import ModelSource, resolve
from llmc.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from llmc.runner.model_runner import ModelRunner
    from llmc.startup.sizing import PoolSize

# Of the tokens may differ: models of one vocabulary name some special ones anew.
_FOREIGN = 0.01


def resolve_draft(target: ModelSource, facts_cache: FactsCache | None = None) -> ModelSource | None:
    """The draft model that the target's config names, if any. ConfigError where their vocabularies
    differ."""
    drafting = target.config.speculative_config
    if drafting is None or drafting.method != "draft_model":
        return None
    config = dataclasses.replace(
        target.config,
        model=drafting.model,
        revision=drafting.revision,
        quantization=drafting.quantization,
        tokenizer=None,
        max_model_len=None,
        swap_space=0,
        speculative_config=None,
        enable_lora=False,  # it drafts as well as its own weights can
        # its rows are planned without groups of layers (engine/spec_decode/draft_model.py)
        passes={**target.config.passes, "group_caches": False},
    )
    source = resolve(config, target.device, facts_cache=facts_cache)
    model_len = min(source.model_len, target.model_len)
    config = dataclasses.replace(config, max_model_len=model_len)
    source = dataclasses.replace(source, config=config)
    check_vocabulary(source, target)
    return source


def load_draft(compiled: CompiledModel) -> LoadedModel:
    """As load_model; ConfigError where the draft model can't be rolled back."""
    if compiled.program.states:
        raise ConfigError(
            f"the draft model {compiled.source.files.name!r} has recurrent layers, which keep one "
            "state per request and can't be rolled back after a rejected token; take one with "
            "attention only"
        )
    return load_model(compiled)


def check_vocabulary(draft: ModelSource, target: ModelSource) -> None:
    """ConfigError where their token ids have different meanings."""
    ours, theirs = _tokens(target), _tokens(draft)
    problem = ""
    if ours is None or theirs is None:
        if draft.facts.vocab_size != target.facts.vocab_size:
            problem = f"{draft.facts.vocab_size} token ids instead of {target.facts.vocab_size}"
    else:
        differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        if len(differing) > _FOREIGN * len(ours):
            first = differing[0]
            problem = (
                f"{len(differing)} tokens that differ, the first being {first}: "
                f"{theirs.get(first)!r} instead of {ours.get(first)!r}"
            )
    if problem:
        raise ConfigError(
            f"the draft model {draft.files.name!r} has a different vocabulary from "
            f"{target.files.name!r}: {problem}; take one with the same tokenizer"
        )


def _tokens(source: ModelSource) -> dict[int, str] | None:
    """By id; None for a model without a tokenizer."""
    path = source.tokenizer_path
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.load(path, trust_remote_code=source.config.trust_remote_code)
    except CheckpointError:
        return None
    return {token_id: token for token, token_id in tokenizer.hf.get_vocab().items()}


def draft_in_flight(drafting: SpeculativeConfig, device: torch.device) -> int:
    """All steps of a draft can be queued on a GPU; on CPU each runs when it is submitted."""
    return 1 if device.type == "cpu" else drafting.num_speculative_tokens + 1


def speculate(
    drafting: SpeculativeConfig,
    draft: LoadedModel,
    runner: ModelRunner,
    target: LoadedModel,
    pool: PoolSize,
) -> DraftModelSpeculation:
    """What the engine is given. `runner` is the draft model's, over a cache of the pool's size."""
    config = draft.source.config
    limits = EngineLimits(
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(pool.max_model_len, draft.source.model_len),
        vocab_size=draft.program.vocab_size,
    )
    model = DraftModel(
        runner,
        limits,
        target_vocab_size=target.program.vocab_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return DraftModelSpeculation(drafting, model)
