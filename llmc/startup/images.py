"""Image input: the vision tower, the step that reads its rows, and a check of both against
transformers' own forward.

    config, checkpoint -> ImageTower      processor -> ImagePreparer
    text model + head that reads images -> a second program, over the same weights and caches

This module knows nothing about how a particular model handles images. The model's own forward is
run once on an artificial prompt with two images, up to the call of its text model. The arguments of
that call must be what the step will compute: the tower's rows in place of the placeholders'
embeddings, positions, causal attention, and nothing else. Otherwise the model is served as a text
model, and images are refused with the reason.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.compiler.cache import ProgramCache
from llmc.compiler.heads import ADD_ROWS, LAYER_MASK, LAYER_ROWS, is_captured
from llmc.compiler.image_tower import ImageTower, build_tower, call_recorded, tower_buffers
from llmc.compiler.lower import lower
from llmc.compiler.program import Program, bind, lowered
from llmc.errors import CheckpointError, CompileError, LlmcError
from llmc.model_info import ImageInfo
from llmc.passes.inputs import AdapterInput
from llmc.passes.options import Where
from llmc.pooling import Head
from llmc.runner.images import CACHE_BYTES, RowImages, tensors_of
from llmc.startup.compile import CompiledModel, LoadedModel, compile_model, weights_of
from llmc.startup.resolve import ModelSource
from llmc.text.images import CantRead, ImagePreparer, Prepared
from llmc.text.processor import load_processor

log = logging.getLogger(__name__)

_SEES = ("vision", "image")  # parts of a config
# Allowed arguments of the text model: those that are compared, and those that the step knows.
_KNOWN = {
    *("inputs_embeds", "attention_mask", "position_ids", LAYER_MASK, LAYER_ROWS),
    *("input_ids", "cache", "past_key_values", "cache_position"),
}
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # these mark the tokens of images
WINDOWED = "sliding_attention"  # transformers' name of the masks of layers with a window
_PROOF_TOLERANCE = {torch.float32: 1e-3}
_PROOF_TOLERANCE_LOW_PRECISION = 0.05
# Raised by transformers if a model or its processor does not have the expected form.
_FAULTS = (
    ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, OSError, IndexError,
)  # fmt: skip


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
    except (LlmcError, CantRead, *_FAULTS) as error:
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


def verify_images(
    tower: ImageTower, processor: Any, preparer: ImagePreparer, hidden: int
) -> tuple[Head, Where]:
    """Compare with the model's own forward. -> what to capture of the model, and in which layers
    an image's tokens attend to all of the image.

    Raises CheckpointError with the difference, if there is one.
    """
    images = [_sample(0), _sample(1)]
    text = f"a {preparer.placeholder} b {preparer.placeholder} c"
    given = dict(processor(images=images, text=[text], return_tensors="pt"))
    encode = _encoder(processor)
    prepared = preparer.prepare(text, images, encode)
    wanted_ids = given["input_ids"][0].tolist()
    if prepared.token_ids == wanted_ids[-len(prepared.token_ids) :] != wanted_ids:
        raise CheckpointError("its processor puts tokens before the text, besides its tokenizer's")
    if prepared.token_ids != wanted_ids:
        raise CheckpointError("its processor treats several images differently from one")
    sent = {name: _moved(value, tower) for name, value in given.items()}
    called = call_recorded(tower, sent, hidden)
    wanted = [called["inputs_embeds"][0], *_layer_rows(tower, prepared, called)]
    try:
        _compare_rows(tower, prepared, wanted, hidden)
    except (CheckpointError, *_FAULTS):
        if len(wanted) > 1:
            raise
        tower.reads_forward = True
        _compare_rows(tower, prepared, wanted, hidden)
    whole = _whole_images(tower, sent, called.get("attention_mask"), prepared, hidden)
    _compare_captured(tower, sent["input_ids"], called, hidden)
    axes = _axes(tower, prepared, called.get("position_ids"))
    return Head(image_levels=len(wanted), position_axes=axes), whole


def _compare_captured(
    tower: ImageTower, token_ids: Tensor, called: Mapping[str, Any], hidden: int
) -> None:
    """Compare with the forward that is captured, which gets no images: the rows replace the output
    of its embedding.

    Raises CheckpointError if the embeddings of the two differ, or a tensor that they pass on.
    """
    captured: Mapping[str, Any] = {}
    config: Any = tower.module.config
    if is_captured(tower.module, config):
        rows = called["inputs_embeds"]
        captured = call_recorded(tower, {"input_ids": token_ids}, hidden, rows)
        embeddings = captured.get("inputs_embeds")
        if embeddings is not None and not torch.equal(embeddings, rows):
            raise CheckpointError("it changes embeddings before it puts image rows among them")
    extra = {name for name, value in called.items() if name not in _KNOWN and not _is_plain(value)}
    differ = {name for name in extra if not _is_equal(called[name], captured.get(name))}
    if differ:
        raise CheckpointError(
            f"it passes {', '.join(sorted(differ))} to its text model besides image embeddings, "
            "which is not supported yet"
        )


def _is_equal(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def _encoder(processor: Any) -> Any:
    return lambda text: list(processor.tokenizer(text)["input_ids"])


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _moved(value: Any, tower: ImageTower) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(tower.device, tower.dtype if value.is_floating_point() else None)


def _sample(seed: int) -> Any:
    """An image of noise, larger than a patch of any tower and smaller than most images."""
    from PIL import Image

    gen = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (112, 168, 3), generator=gen, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def _layer_rows(tower: ImageTower, prepared: Prepared, called: Mapping[str, Any]) -> list[Tensor]:
    """What the first layers of the text model add to the prompt's tokens: [T, hidden] each."""
    given = called.get(LAYER_ROWS)
    if given is None:
        return []
    mask = _image_tokens(prepared)
    shown = called[LAYER_MASK][0]
    if not torch.equal(shown.cpu(), mask):
        raise CheckpointError("its inner layers add to tokens other than those of images")
    add = getattr(tower.decoder, ADD_ROWS, None)
    if add is None:
        raise CheckpointError(f"its text model takes {LAYER_ROWS} but has no {ADD_ROWS}")
    found = []
    for rows in given:
        whole = torch.zeros(len(mask), rows.shape[-1], dtype=rows.dtype, device=rows.device)
        whole[shown] = rows
        state = torch.arange(whole.numel(), device=rows.device).view_as(whole).to(rows.dtype)
        if not torch.equal(add(state[None].clone(), shown[None], rows)[0], state + whole):
            raise CheckpointError("its inner layers do more with image rows than add them")
        found.append(whole)
    return found


def _image_tokens(prepared: Prepared) -> Tensor:
    """Which tokens stand for images: bool [T]."""
    mask = torch.zeros(len(prepared.token_ids), dtype=torch.bool)
    for image in prepared.images:
        for first, count in image.spans:
            mask[first : first + count] = True
    return mask


def _compare_rows(
    tower: ImageTower, prepared: Prepared, wanted: Sequence[Tensor], hidden: int
) -> None:
    """Compare the tower's rows with `wanted`: for each level, the image part of the prompt's tokens
    [T, hidden], zeros elsewhere."""
    want = torch.cat(list(wanted), -1).float()
    mask = _image_tokens(prepared)
    pieces = []
    for image in prepared.images:
        pieces.append(tower.encode(tensors_of(image), image.num_rows).float())
        if len(pieces[-1]) != image.num_rows:
            raise CheckpointError(
                f"its tower returns {len(pieces[-1])} rows for an image of {image.num_rows} tokens"
            )
    rows = torch.cat(pieces)
    if rows.shape[1] != want.shape[1]:
        raise CheckpointError(
            f"its tower returns rows of {rows.shape[1] // hidden} levels, but its forward uses "
            f"{len(wanted)}"
        )
    got = torch.zeros_like(want)
    got[mask.to(got.device)] = rows
    scale = want.norm()
    if not scale:
        raise CheckpointError("its own forward does not put image rows among the embeddings")
    error = float((got - want).norm() / scale)
    if not error <= _PROOF_TOLERANCE.get(tower.dtype, _PROOF_TOLERANCE_LOW_PRECISION):
        raise CheckpointError(
            f"its own forward embeds images differently (rows differ by {error:.0%})"
        )


def _whole_images(
    tower: ImageTower, given: Mapping[str, Any], mask: Any, prepared: Prepared, hidden: int
) -> Where:
    """In which layers the tokens of an image attend to later tokens of the image.

    Raises CheckpointError if attention is neither that nor the same as for text.
    """
    masks = mask if isinstance(mask, Mapping) else {"": mask}
    if not any(_looks_ahead(one) for one in masks.values()):
        return "none"
    text = {k: torch.zeros_like(v) if k in _TOKEN_TYPES else v for k, v in given.items()}
    plain = call_recorded(tower, text, hidden).get("attention_mask")
    same = torch.zeros(len(prepared.token_ids), dtype=torch.long)
    for number, image in enumerate(prepared.images):
        for first, count in image.spans:
            same[first : first + count] = number + 1
    together = (same[:, None] == same[None, :]) & (same > 0)
    found = {}
    for kind, one in masks.items():
        before = _shown(plain[kind] if isinstance(plain, Mapping) else plain, len(same))
        shown = _shown(one, len(same))
        whole = before | together
        if not torch.equal(shown, whole) and not torch.equal(shown, before):
            raise CheckpointError("its image tokens have an unsupported attention mask")
        found[kind] = torch.equal(shown, whole)
    if all(found.values()):
        return "all"
    if {kind for kind, is_whole in found.items() if is_whole} == {WINDOWED}:
        return "windowed"
    raise CheckpointError("its image tokens attend to later ones in some layers only")


def _looks_ahead(mask: Any) -> bool:
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return False
    return bool(_shown(mask, mask.shape[-1]).triu(1).any())


def _shown(mask: Any, tokens: int) -> Tensor:
    """Which keys each query attends to: bool [T, T]. No mask, or a padding mask, means causal."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return torch.ones(tokens, tokens, dtype=torch.bool).tril()
    one = mask[0, 0].cpu()
    return one if one.dtype == torch.bool else one == 0


def _axes(tower: ImageTower, prepared: Prepared, positions: Tensor | None) -> int:
    count = len(prepared.token_ids)
    if not tower.has_axes:
        plain = torch.arange(count)
        if positions is not None and not torch.equal(positions.cpu().view(-1), plain):
            raise CheckpointError("its tokens' positions are not their indices")
        return 0
    mask = _image_tokens(prepared)
    tensors = [tensors_of(image) for image in prepared.images]
    got = tower.positions(torch.tensor(prepared.token_ids), tensors, mask)
    if positions is None or not torch.equal(positions[:, 0].cpu(), got):
        raise CheckpointError("its positions can't be computed from the prompt alone")
    behind = int(mask.nonzero().max()) + 1
    if behind < count and bool((got[:, behind:] != got[0, behind:]).any()):
        raise CheckpointError("its text tokens have different positions on different axes")
    return len(got)
