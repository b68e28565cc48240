"""Image input: the vision tower, and the step that reads its rows.

    config, checkpoint -> ImageTower      processor -> ImagePreparer
    text model + head that reads images -> a second program, over the same weights and caches

This module knows nothing about how a particular model handles images: `verify_images` proves what
it assumes. Where that fails, the model is served as a text model, and images are refused with the
reason.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.compiler.cache import ProgramCache
from llmc.compiler.image_tower import ImageTower, build_tower, tower_buffers
from llmc.compiler.lower import lower
from llmc.compiler.program import Program, bind, lowered
from llmc.errors import CheckpointError, CompileError, LlmcError
from llmc.model_info import ImageInfo
from llmc.passes.inputs import AdapterInput
from llmc.runner.images import CACHE_BYTES, RowImages
from llmc.startup.compile import CompiledModel, LoadedModel, compile_model, weights_of
from llmc.startup.resolve import ModelSource
from llmc.startup.verify_images import FAULTS, verify_images
from llmc.text.images import CantRead, ImagePreparer
from llmc.text.processor import load_processor

log = logging.getLogger(__name__)

_SEES = ("vision", "image")  # parts of a config


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """The image part of a model. `compiled` is the step that reads the images' rows."""

    info: ImageInfo
    tower: ImageTower
    compiled: CompiledModel
    weights: Mapping[str, Tensor]  # of that step, shared with the text model
    axes: int

    @property
    def overhead_bytes(self) -> int:
        """Device memory besides the tower's weights: cached rows, and as much for activations."""
        return 2 * CACHE_BYTES

    def bind(
        self,
        caches: Sequence[tuple[Tensor, Tensor]],
        states: Sequence[Tensor],
        text: Program,
        bound: Mapping[str, Tensor],
    ) -> RowImages:
        """Bind to the text step's caches and adapter slots. `bound`: the text step's tensors."""
        program = self.compiled.program
        slots = {
            mine.name: bound[theirs.name]
            for (mine, _), (theirs, _) in zip(_adapters(program), _adapters(text), strict=True)
        }
        step = lower(lowered(program), bind(program, {**self.weights, **slots}, caches, states))
        no_rows = torch.zeros(1, _hidden(program), dtype=program.dtype, device=program.device)
        return RowImages(step, self.tower, axes=self.axes, no_rows=no_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoImages:
    """Why images are refused."""

    reason: str


def load_images(model: LoadedModel, cache: ProgramCache) -> ImageModel | NoImages:
    """Load the image part of a model. Never raises: without it, the model is served for text."""
    source = model.source
    if (reason := _unwanted(source)) is not None:
        return NoImages(reason=reason)
    try:
        return _load(model, cache)
    except (LlmcError, CantRead, *FAULTS) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        log.warning("serving %s as a text model; images are refused: %s", source.files.name, first)
        return NoImages(reason=first)


def _unwanted(source: ModelSource) -> str | None:
    if not any(part in _SEES for part in source.facts.unused_parts):
        return "it reads text only"
    if source.config.max_images == 0:
        return "limit_mm_per_prompt (--limit-mm-per-prompt) allows none"
    if source.pooling is not None:
        return "pooling tasks support text only"
    if source.config.tensor_parallel_size > 1:
        return "they are not supported with a tensor_parallel_size above 1 yet"
    return None


def _load(model: LoadedModel, cache: ProgramCache) -> ImageModel:
    source = model.source
    config = copy.deepcopy(source.load_hf_config())
    row_token = getattr(config, "image_token_id", None)
    if not isinstance(row_token, int) or not 0 <= row_token < model.program.vocab_size:
        raise CheckpointError(f"its image_token_id, {row_token!r}, is not an id of its text model")
    processor = load_processor(source.files.path)
    preparer = ImagePreparer(processor, row_token)
    tower = build_tower(config, source.dtype, source.device)
    _fill(tower, source)
    hidden = int(config.get_text_config().hidden_size)
    head, whole = verify_images(tower, processor, preparer, hidden)
    if head.position_axes and source.long_context_from is not None:
        raise CheckpointError(
            "its tokens have positions on several axes, and its rotary frequencies depend on the "
            "sequence length; images are not supported with both"
        )
    compiled = compile_model(source, cache, head, whole)
    return ImageModel(
        info=ImageInfo(
            row_token=row_token,
            max_per_prompt=source.config.max_images,
            most_rows=0 if whole == "none" else _most_rows(source, compiled.program),
        ),
        tower=tower,
        compiled=compiled,
        weights=_shared_weights(compiled.program, model),
        axes=head.position_axes,
    )


def _fill(tower: ImageTower, source: ModelSource) -> None:
    """Read the tower's weights. Raises CheckpointError if the checkpoint lacks any."""
    names = list(tower.parameters())
    opened = weights_of(source, tower.module)
    opened.check(names)
    weights: dict[str, Tensor] = {}
    for name in names:
        like = tower.module.get_parameter(name)
        weights[name] = torch.empty(like.shape, dtype=tower.dtype, device=tower.device)
        opened.fill(name, weights[name])
    tower.fill(weights, tower_buffers(tower))


def _hidden(program: Program) -> int:
    """Width of the image rows."""
    nodes = program.graph.graph.nodes
    found = next(n for n in nodes if n.op == "placeholder" and n.target == "image_rows")
    return int(found.meta["val"].shape[1])


def _shared_weights(program: Program, model: LoadedModel) -> dict[str, Tensor]:
    """The text program's weights by this program's names. CompileError if they do not match."""
    mine, theirs = program.caches, model.program.caches
    if mine != theirs or program.groups != model.program.groups:
        raise CompileError("its image step would cache different keys and values")
    if program.states != model.program.states:
        raise CompileError("its image step would keep a different state")
    if [r for _, r in _adapters(program)] != [r for _, r in _adapters(model.program)]:
        raise CompileError("its image step would have different LoRA adapters")
    held = {role: model.weights[node.name] for node, role in model.program.weight_inputs()}
    found = {}
    for node, role in program.weight_inputs():
        if role not in held:
            raise CompileError(f"its image step needs {', '.join(role.parts)} in another form")
        found[node.name] = held[role]
    return found


def _adapters(program: Program) -> list[tuple[fx.Node, AdapterInput]]:
    """Adapter inputs in an order that does not depend on the graph, except within one weight."""
    return sorted(program.adapter_inputs(), key=lambda pair: repr(pair[1]))


def _most_rows(source: ModelSource, program: Program) -> int:
    """The most rows of an image that is computed in one step: what all decodes leave of the step's
    budget, and at most an attention window, since models differ beyond that."""
    config = source.config
    windows = [group.window for group in program.groups if group.window]
    if any(group.chunk for group in program.groups) or program.states:
        raise CheckpointError(
            "its tokens attend to later ones, which is not supported with chunked attention or "
            "recurrent state"
        )
    most = min(config.max_num_batched_tokens - config.max_num_seqs, *windows, source.model_len)
    if most < 1:
        raise CheckpointError(
            f"its images are computed in one step, but max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) leaves no room for them besides max_num_seqs "
            f"({config.max_num_seqs}) decodes"
        )
    return most
