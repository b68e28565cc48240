"""Starts the draft model or head of `speculative_config` along with its target model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmc.engine.options import EngineLimits
from llmc.engine.spec_decode.draft_model import DraftModel, DraftModelSpeculation
from llmc.errors import CheckpointError, ConfigError
from llmc.passes.inputs import WeightInput
from llmc.passes.layers import token_embedding
from llmc.passes.tap_states import tap_names
from llmc.speculative_config import SpeculativeConfig
from llmc.startup.compile import CompiledModel, LoadedModel, load_model, open_source
from llmc.startup.config_facts import FactsCache
from llmc.startup.eagle3 import EMBEDDING, layers_of, resolve_head
from llmc.startup.mtp import resolve_mtp
from llmc.startup.resolve import ModelSource, resolve
from llmc.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from llmc.compiler.program import Program
    from llmc.runner.model_runner import ModelRunner
    from llmc.startup.sizing import PoolSize

# Fraction of tokens that can differ: models with one vocabulary rename some special tokens.
_FOREIGN = 0.01


def resolve_draft(target: ModelSource, facts_cache: FactsCache | None = None) -> ModelSource | None:
    """The draft model or head named in the target's config, if any. ConfigError if their
    vocabularies differ."""
    drafting = target.config.speculative_config
    if drafting is None or drafting.method == "ngram":
        return None
    config = dataclasses.replace(
        target.config,
        model=drafting.model,
        revision=drafting.revision,
        quantization=drafting.quantization,
        tokenizer=None,
        hf_overrides=None,
        max_model_len=None,
        swap_space=0,
        speculative_config=None,
        tensor_parallel_size=1,  # rank 0 drafts alone; the others get its tokens with the steps
        enable_lora=False,  # it drafts with its own weights, without adapters
        # its rows are planned without groups of layers (engine/spec_decode/draft_model.py)
        passes={**target.config.passes, "group_caches": False},
    )
    if drafting.method in ("eagle3", "mtp"):
        config = dataclasses.replace(config, max_model_len=target.model_len, kv_cache_dtype="auto")
        if drafting.method == "mtp":
            names = ("model", "quantization", "hf_overrides")
            own = {name: getattr(target.config, name) for name in names}
            return resolve_mtp(target, dataclasses.replace(config, **own))
        return resolve_head(target, dataclasses.replace(config, load_format="auto"), facts_cache)
    source = resolve(config, target.device, facts_cache=facts_cache)
    model_len = min(source.model_len, target.model_len)
    config = dataclasses.replace(config, max_model_len=model_len)
    source = dataclasses.replace(source, config=config)
    check_vocabulary(source, target)
    return source


def tapped(target: ModelSource, draft: ModelSource | None) -> ModelSource:
    """The target with the hidden states kept that a draft head reads. They are kept for whole
    sequences, so no layer can free blocks that have left its window."""
    if draft is None or draft.draft_head is None:
        return target
    passes = {**target.config.passes, "group_caches": False}
    config = dataclasses.replace(target.config, passes=passes)
    taps = (-1,) if draft.draft_head.is_own_layer else layers_of(draft.files)
    return dataclasses.replace(target, config=config, taps=taps)


def check_width(draft: ModelSource | None, target: ModelSource, program: Program) -> None:
    """Raise ConfigError if a head expects hidden states of another width than the target's."""
    head = draft.draft_head if draft is not None else None
    if draft is None or head is None or head.is_own_layer:
        return
    nodes = {node.name: node for node in program.graph.graph.nodes}
    width = nodes[tap_names(program.graph.graph)[0]].meta["val"].shape[3]
    if width != head.width:
        raise ConfigError(
            f"the draft head {draft.files.name!r} reads hidden states of {head.width} values, but "
            f"those of {target.files.name!r} have {width}; use a head trained for this model"
        )


def load_draft(compiled: CompiledModel, target: CompiledModel, loaded: LoadedModel) -> LoadedModel:
    """`load_model` for a draft. ConfigError if a draft model's state can't be rolled back.

    Heads share weights with the target: its embedding, if they have none. A prediction layer of the
    target's own checkpoint shares all weights that both use.
    """
    head = compiled.source.draft_head
    if head is not None:
        held = {role: loaded.weights[node.name] for node, role in target.program.weight_inputs()}
        roles = {role for _, role in compiled.program.weight_inputs()}
        given = {role: weight for role, weight in held.items() if role in roles}
        if not head.is_own_layer:  # its names are unrelated to the target's
            given = embedding_of(compiled, target, held)
        return load_model(compiled, given=given)
    if compiled.program.states:
        raise ConfigError(
            f"the draft model {compiled.source.files.name!r} has recurrent layers, which keep one "
            "state per request and can't be rolled back after a rejected token; use one with "
            "attention only"
        )
    return load_model(compiled)


def check_vocabulary(draft: ModelSource, target: ModelSource) -> None:
    """Raise ConfigError if their token ids have different meanings."""
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
            f"{target.files.name!r}: {problem}; use one with the same tokenizer"
        )


def _tokens(source: ModelSource) -> dict[int, str] | None:
    """Tokens by id; None for a model without a tokenizer."""
    path = source.tokenizer_path
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.load(path, trust_remote_code=source.config.trust_remote_code)
    except CheckpointError:
        return None
    return {token_id: token for token, token_id in tokenizer.vocabulary().items()}


def draft_in_flight(drafting: SpeculativeConfig, device: torch.device) -> int:
    """Steps in flight: a GPU queues all steps of a draft; on CPU each runs when submitted."""
    return 1 if device.type == "cpu" else drafting.num_speculative_tokens + 1


def embedding_of(
    head: CompiledModel, target: CompiledModel, held: Mapping[WeightInput, torch.Tensor]
) -> dict[WeightInput, torch.Tensor]:
    """The target's embedding as the head's weight, taken from the target's loaded weights `held`;
    empty if the head has its own."""
    if EMBEDDING in head.source.open_tensors():
        return {}
    import torch

    node, role = next(
        (node, role) for node, role in head.program.weight_inputs() if role.parts == (EMBEDDING,)
    )
    like = node.meta["val"]
    found = token_embedding(target.program.graph.graph)
    name = found.parts[0] if found is not None else ""
    has = target.program.parameters.shapes.get(name)
    if found is None or has != tuple(like.shape):
        raise CheckpointError(
            f"the draft head {head.source.files.name!r} has no {EMBEDDING}, and that of "
            f"{target.source.files.name!r} has shape {has and list(has)} instead of "
            f"{list(like.shape)}"
        )
    plain = held.get(WeightInput(parts=(name,)))
    if plain is None or plain.dtype != like.dtype:  # it is quantized
        plain = torch.empty(like.shape, dtype=like.dtype, device=head.program.device)
        open_source(target).fill(name, plain)
    return {role: plain}


def speculate(
    drafting: SpeculativeConfig,
    draft: LoadedModel,
    runner: ModelRunner,
    target: LoadedModel,
    pool: PoolSize,
) -> DraftModelSpeculation:
    """The engine's speculation. `runner` is the draft model's, with a cache of the pool's size."""
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
        is_head=draft.source.draft_head is not None,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return DraftModelSpeculation(drafting, model)
