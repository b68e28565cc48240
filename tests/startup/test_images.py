"""The proof that llmc does with images what a model's own forward does, and what it refuses."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_images import tiny_image_model
from transformers import LlavaProcessor, processing_utils
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llava import modeling_llava
from transformers.models.qwen3_vl import modeling_qwen3_vl

from llmc.compiler.image_tower import build_tower
from llmc.config import EngineConfig
from llmc.errors import CheckpointError, ConfigError
from llmc.startup import verify_images as verification
from llmc.startup.images import _fill, _unwanted
from llmc.startup.resolve import resolve
from llmc.startup.verify_images import verify_images
from llmc.text.images import ImagePreparer, _packed
from llmc.text.processor import load_processor, without_video

CPU = torch.device("cpu")

# transformers 5.17 has NumPy sum tensors of torch 2.11, which do not follow NumPy 2's protocol.
# Its code of some models uses NumPy functions of tensors, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def proved(family: str, processor_patch: Any = None) -> Any:
    path = tiny_image_model(family)
    source = resolve(EngineConfig(model=str(path), dtype="float32"), CPU)
    config = source.load_hf_config()
    tower = build_tower(config, torch.float32, CPU)
    _fill(tower, source)
    processor = load_processor(path)
    if processor_patch is not None:
        processor.replace_image_token = processor_patch
    preparer = ImagePreparer(processor, config.image_token_id)
    return verify_images(tower, processor, preparer, config.get_text_config().hidden_size)


@pytest.mark.parametrize(
    ("family", "levels", "axes", "whole"),
    [
        ("llava", 1, 0, "none"),
        ("internvl", 1, 0, "none"),
        ("qwen2_vl", 1, 3, "none"),
        ("qwen2_5_vl", 1, 3, "none"),
        ("qwen3_vl", 2, 3, "none"),
        ("gemma3", 1, 0, "all"),
        ("gemma4", 1, 0, "windowed"),
        ("gemma4_small", 1, 0, "none"),
        ("glm4v", 1, 3, "none"),
    ],
)
def test_what_is_found_of_a_model(family: str, levels: int, axes: int, whole: str) -> None:
    head, where = proved(family)
    assert (head.image_levels, head.position_axes, where) == (levels, axes, whole)


def test_rows_in_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    find = modeling_llava.LlavaModel.get_placeholder_mask

    def shifted(self: Any, ids: Any, **kwargs: Any) -> Any:
        return find(self, ids, **kwargs).roll(1, 1)

    monkeypatch.setattr(modeling_llava.LlavaModel, "get_placeholder_mask", shifted)
    with pytest.raises(CheckpointError, match="embeds images differently"):
        proved("llava")


def test_no_rows_in_the_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    run = modeling_llava.LlavaModel.forward

    def forward(self: Any, *args: Any, pixel_values: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llava.LlavaModel, "forward", forward)
    with pytest.raises(CheckpointError, match="does not put image rows among the embeddings"):
        proved("llava")


def test_inner_layers_that_do_more_than_add(monkeypatch: pytest.MonkeyPatch) -> None:
    model = modeling_qwen3_vl.Qwen3VLTextModel
    add = model._deepstack_process
    monkeypatch.setattr(
        model, "_deepstack_process", lambda self, state, *rest: 2 * add(self, state, *rest)
    )
    with pytest.raises(CheckpointError, match="do more with image rows than add them"):
        proved("qwen3_vl")


def test_attention_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that attends to later text is neither causal nor that of an image."""

    def one_block(token_type_ids: Any, device: Any = None) -> Any:
        return token_type_ids.amax(-1, keepdim=True).expand_as(token_type_ids) - 1

    monkeypatch.setattr(modeling_gemma3, "get_block_sequence_ids_for_mask", one_block)
    with pytest.raises(CheckpointError, match="have an unsupported attention mask"):
        proved("gemma3")


def test_another_tensor_for_the_text_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run = modeling_llava.LlavaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = kwargs.get("pixel_values")
        bias = torch.zeros(1) if seen is None else seen.mean(dim=(1, 2, 3))
        return run(self, *args, **kwargs, image_bias=bias)

    monkeypatch.setattr(modeling_llava.LlavaModel, "forward", forward)
    with pytest.raises(CheckpointError, match="passes image_bias to its text model"):
        proved("llava")


def test_a_tensor_that_does_not_depend_on_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in the captured forward too, unless another class is captured."""
    run = modeling_llava.LlavaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs, text_bias=torch.ones(1))

    monkeypatch.setattr(modeling_llava.LlavaModel, "forward", forward)
    proved("llava")
    monkeypatch.setattr(verification, "is_captured", lambda *_: False)
    with pytest.raises(CheckpointError, match="passes text_bias to its text model"):
        proved("llava")


def test_embeddings_that_are_changed_before_images_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The captured forward would change the images' rows too."""
    run = modeling_llava.LlavaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = self.get_input_embeddings().register_forward_hook(lambda *given: 2 * given[-1])
        try:
            return run(self, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(modeling_llava.LlavaModel, "forward", forward)
    with pytest.raises(CheckpointError, match="changes embeddings before it puts image rows"):
        proved("llava")


def test_features_that_are_projected_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = modeling_llava.LlavaModel
    find, run = model.get_image_features, model.forward
    projects = False

    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = find(self, *args, **kwargs)
        if not projects:
            found.pooler_output = [piece[..., :2] for piece in found.pooler_output]
        return found

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal projects
        projects = True
        try:
            return run(self, *args, **kwargs)
        finally:
            projects = False

    monkeypatch.setattr(model, "get_image_features", features)
    monkeypatch.setattr(model, "forward", forward)
    head, _ = proved("llava")
    assert head.image_levels == 1


def test_a_processor_that_writes_several_images_otherwise() -> None:
    def replaced(inputs: Any, image_idx: int, **_: Any) -> str:
        return "<image>" * (4 if len(inputs["num_patches"]) == 1 else 8)

    with pytest.raises(CheckpointError, match="several images differently from one"):
        proved("internvl", replaced)


def test_a_processor_that_puts_tokens_before_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    call = LlavaProcessor.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = call(self, *args, **kwargs)
        if torch.is_tensor(made["input_ids"]):
            made["input_ids"] = torch.nn.functional.pad(made["input_ids"], (1, 0), value=1)
        return made

    monkeypatch.setattr(LlavaProcessor, "__call__", called)
    with pytest.raises(CheckpointError, match="puts tokens before the text"):
        proved("llava")


def test_no_video_part_is_loaded_with_torchvision_either(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleType("torchvision")
    installed.__spec__ = ModuleSpec("torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision", installed)
    with without_video():
        part = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING["video_processor"]
        assert part.from_pretrained("nowhere") is None


def test_pixels_in_bfloat16() -> None:
    packed = _packed(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert packed.dtype == "float32"
    assert torch.frombuffer(bytearray(packed.data), dtype=torch.float32).tolist() == [1.5, -2.0]


def test_what_needs_no_proof() -> None:
    path = str(tiny_image_model("llava"))
    none = resolve(EngineConfig(model=path, limit_mm_per_prompt={"image": 0}), CPU)
    assert "allows none" in str(_unwanted(none))
    ranks = resolve(EngineConfig(model=path, tensor_parallel_size=2), CPU)
    assert "tensor_parallel_size" in str(_unwanted(ranks))
    with pytest.raises(ConfigError, match="audio and video are not supported"):
        EngineConfig(limit_mm_per_prompt={"audio": 1})
    assert EngineConfig(limit_mm_per_prompt={"image": 2, "video": 0}).max_images == 2
