"""ImageTower: the part of a model that encodes an image as rows, in the model's own code.

It runs transformers' code as it is (eager, not captured), once per image, before the first step
that reads the image. The module is the whole model on meta; only the parts that
`get_image_features` needs have weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CheckpointError, reason_of

FEATURES, POSITIONS = "get_image_features", "get_rope_index"
LAYER_FEATURES = "deepstack_features"  # a tower's output for first layers of the text model


class ImageTower:
    """`module` is transformers' model for images and text, on meta.

    If `reads_forward` is set, rows come from its forward instead of `get_image_features`. Some
    models project the features in their forward.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.module = module
        self.reads_forward = False
        self.dtype = dtype
        self.device = device
        self.base: Any = _inner(module)
        self._takes = set(inspect.signature(getattr(self.base, FEATURES)).parameters)

    @property
    def decoder(self) -> nn.Module:
        """The text model inside it, which has no weights here."""
        found: nn.Module = self.base.get_decoder()
        return found

    @property
    def has_axes(self) -> bool:
        """Whether its tokens have positions on several axes."""
        return hasattr(self.base, POSITIONS)

    def parameters(self) -> Iterator[str]:
        """Names of the parameters that encode images."""
        text = {id(p) for p in self.decoder.parameters()}
        head: Any = self.module
        output = head.get_output_embeddings()
        if output is not None:
            text |= {id(p) for p in output.parameters()}
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in text:
                yield name

    def fill(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set its parameters and buffers, which are on the device."""
        for name, tensor in {**weights, **buffers}.items():
            owner, _, leaf = name.rpartition(".")
            child = self.module.get_submodule(owner)
            if name in weights:
                child._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            else:
                child._buffers[leaf] = tensor

    def encode(self, tensors: Mapping[str, Tensor], num_rows: int, /) -> Tensor:
        """An image's tensors on the host -> its rows [num_rows, levels * hidden] on the device."""
        if self.reads_forward:
            return self._encode_in_forward(tensors, num_rows)
        given = {k: self._sent(v) for k, v in tensors.items() if k in self._takes}
        with torch.no_grad():
            made = getattr(self.base, FEATURES)(**given, return_dict=True)
        levels = [made.pooler_output, *(getattr(made, LAYER_FEATURES, None) or ())]
        return torch.cat([_rows(level) for level in levels], -1).to(self.dtype)

    def _encode_in_forward(self, tensors: Mapping[str, Tensor], num_rows: int) -> Tensor:
        config: Any = self.module.config
        given = {k: self._sent(v) for k, v in tensors.items()}
        given["input_ids"] = torch.full((1, num_rows), config.image_token_id, device=self.device)
        called = call_recorded(self, given, config.get_text_config().hidden_size)
        rows: Tensor = called["inputs_embeds"][0]
        return rows.to(self.dtype)

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def positions(
        self, token_ids: Tensor, images: Sequence[Mapping[str, Tensor]], mask: Tensor, /
    ) -> Tensor:
        """A prompt's tokens [T], with image tokens marked in `mask` [T] -> positions [axes, T]."""
        find = getattr(self.base, POSITIONS)
        names = inspect.signature(find).parameters
        given = {
            name: torch.cat([image[name] for image in images])
            for name in (images[0] if images else ())
            if name in names
        }
        if "mm_token_type_ids" in names:
            given["mm_token_type_ids"] = mask.int()[None]
        positions, _ = find(input_ids=token_ids[None], **given)
        found: Tensor = positions[:, 0]
        return found


def _rows(features: Tensor | Sequence[Tensor]) -> Tensor:
    """[n, hidden] from a tower's output for one image: a tensor, or one for each of its parts."""
    pieces = [features] if isinstance(features, Tensor) else features
    return torch.cat([piece.flatten(0, -2) for piece in pieces])


def build_tower(config: Any, dtype: torch.dtype, device: torch.device) -> ImageTower:
    """Build the tower without weights. Raises CheckpointError if transformers has no such model, or
    one of another form."""
    from transformers import AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            module: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as e:
        raise CheckpointError(f"transformers can't build it: {reason_of(e)}") from e
    if not hasattr(_inner(module), FEATURES):
        raise CheckpointError(f"{type(module).__name__} has no {FEATURES}")
    return ImageTower(module.eval(), dtype, device)


def tower_buffers(tower: ImageTower) -> dict[str, Tensor]:
    """The values of buffers that are not in checkpoints, on the device."""
    from llmc.compiler.build import materialize_buffers  # a warm start builds no model

    found = materialize_buffers(tower.module)
    return {name: value.to(tower.device) for name, value in found.items()}


def _inner(module: nn.Module) -> Any:
    """The model without its head, whose forward replaces embeddings with image rows."""
    base: Any = module.base_model
    return base


@contextmanager
def recorded_decoder(
    tower: ImageTower, hidden: int, embeddings: Tensor | None = None
) -> Iterator[list[Mapping[str, Any]]]:
    """Inside this context, the text model does not run: its arguments are appended to the list.
    Embeddings of tokens are `embeddings` or zeros [..., hidden]; other weights of the text model
    have made-up values."""
    calls: list[Mapping[str, Any]] = []
    decoder, embedding = tower.decoder, tower.base.get_input_embeddings()
    names = list(inspect.signature(decoder.forward).parameters)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append({**dict(zip(names, args, strict=False)), **kwargs})
        raise _Recorded

    def embed(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        if embeddings is not None:
            return embeddings.view(*ids.shape, hidden).clone()
        return torch.zeros(*ids.shape, hidden, dtype=tower.dtype, device=tower.device)

    weights = [
        (owner._parameters, name, weight)
        for owner in decoder.modules()
        for name, weight in owner._parameters.items()
        if weight is not None and weight.is_meta
    ]
    decoder.forward, embedding.forward = record, embed
    for owned, name, weight in weights:
        owned[name] = nn.Parameter(_made_up(weight, tower.device), requires_grad=False)
    try:
        yield calls
    finally:
        del decoder.forward, embedding.forward
        for owned, name, weight in weights:
            owned[name] = weight


def _made_up(weight: Tensor, device: torch.device) -> Tensor:
    """A tensor of this shape whose rows differ. It takes memory for one value per row only."""
    if not weight.dim():
        return torch.ones((), dtype=weight.dtype, device=device)
    rows = torch.arange(len(weight), device=device).sin().to(weight.dtype)
    return rows.view(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)


class _Recorded(Exception):
    """Raised to end a call of the text model."""


def call_recorded(
    tower: ImageTower, inputs: Mapping[str, Any], hidden: int, embeddings: Tensor | None = None
) -> Mapping[str, Any]:
    """The arguments that the model's own forward passes to its text model for these inputs, if its
    tokens have these embeddings, or zeros."""
    with recorded_decoder(tower, hidden, embeddings) as calls, torch.no_grad():
        try:
            tower.base(**inputs, use_cache=False)
        except _Recorded:
            return calls[0]
    raise CheckpointError("it does not call its text model for a prompt with an image")
