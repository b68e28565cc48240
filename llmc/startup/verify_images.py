"""Proves that llmc computes images as the model's own forward does, before any are accepted.

The forward is run once on an artificial prompt with two images, up to the call of its text model.
The arguments of that call must be what the step will compute: the tower's rows in place of the
placeholders' embeddings, positions, causal attention, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmc.compiler.heads import ADD_ROWS, LAYER_MASK, LAYER_ROWS, is_captured
from llmc.compiler.image_tower import ImageTower, call_recorded
from llmc.errors import CheckpointError
from llmc.passes.options import Where
from llmc.pooling import Head
from llmc.runner.images import tensors_of
from llmc.text.images import ImagePreparer, Prepared

# Allowed arguments of the text model: those that are compared, and those that the step knows.
_KNOWN = {
    *("inputs_embeds", "attention_mask", "position_ids", LAYER_MASK, LAYER_ROWS),
    *("input_ids", "cache", "past_key_values", "cache_position"),
}
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # these mark the tokens of images
_WINDOWED = "sliding_attention"  # transformers' name of the masks of layers with a window
_PROOF_TOLERANCE = {torch.float32: 1e-3}
_PROOF_TOLERANCE_LOW_PRECISION = 0.05
# Raised by transformers if a model or its processor does not have the expected form.
FAULTS = (
    ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, OSError, IndexError,
)  # fmt: skip


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
    except (CheckpointError, *FAULTS):
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
    if {kind for kind, is_whole in found.items() if is_whole} == {_WINDOWED}:
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
