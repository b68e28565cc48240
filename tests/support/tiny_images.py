"""Tiny random checkpoints of image models, with tokenizer, processor and chat template.

Families are named here and nowhere in the package: the engine must not know them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from llmc.text.processor import without_video

LICENSE = Path(__file__).parents[2] / "LICENSE"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_IMAGE = ["<image>", "<begin>", "<end>", "<video>"]
_MORE = {  # of some families only
    "gemma4": ["<audio>", "<|video|>"],
    "gemma4_small": ["<audio>", "<|video|>"],
    "idefics3": ["<fake_token_around_image>", "<end_of_utterance>"],
    "aya_vision": ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"],
    "glm4v": ["<video begin>", "<video end>"],
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_SIZE = {"height": 16, "width": 16}
_Make = Callable[[Any, int], tuple[Any, Any]]  # a tokenizer, its size -> config, processor


def _backend(special: list[str]) -> Any:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(LICENSE)], trainer)
    return backend


def _tokenizer(roles: dict[str, str], image: str, more: list[str]) -> Any:
    """`roles`: names under which a processor looks up tokens; `image`: what a template writes;
    `more`: further special tokens."""
    hf = tf.PreTrainedTokenizerFast(
        tokenizer_object=_backend([*_SPECIAL, *_IMAGE, *more]),
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0] if more else None,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=roles,
    )
    hf.chat_template = TEMPLATE.replace("IMAGE", image)
    return hf


def _llava(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**_VISION),
        text_config=tf.LlamaConfig(**_TEXT, vocab_size=vocab),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
    )
    processor = tf.LlavaProcessor(
        image_processor=tf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=_SIZE),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _internvl(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.InternVLConfig(
        vision_config={**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        text_config=tf.Qwen2Config(**_TEXT, vocab_size=vocab),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    processor = tf.InternVLProcessor(
        image_processor=tf.GotOcr2ImageProcessorPil(
            size=_SIZE, crop_to_patches=True, min_patches=1, max_patches=3
        ),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    return config, processor


def _qwen(cls: Any, processor_class: Any, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    def make(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
        config = cls(
            text_config={**_TEXT, "vocab_size": vocab, **text},
            vision_config={"patch_size": 4, "spatial_merge_size": 2, **vision},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<begin>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<end>"),
        )
        processor = processor_class(
            image_processor=tf.Qwen2VLImageProcessorPil(
                patch_size=4,
                merge_size=2,
                size={"shortest_edge": 8 * 8, "longest_edge": 40 * 40},
            ),
            tokenizer=tokenizer,
        )
        return config, processor

    return make


_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
_QWEN_VISION = {"depth": 2, "num_heads": 2}


def _gemma3(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**_VISION),
        text_config=tf.Gemma3TextConfig(
            **_TEXT,
            vocab_size=vocab,
            sliding_window=8,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention"],
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<begin>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end>"),
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )
    processor = tf.Gemma3Processor(
        image_processor=tf.Gemma3ImageProcessorPil(size=_SIZE),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    return config, processor


def _gemma4(attends_to_images: bool, per_layer: int) -> _Make:
    def make(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
        config = tf.Gemma4Config(
            vision_config={
                **{k: v for k, v in _VISION.items() if k != "image_size"},
                "num_key_value_heads": 2,
                "head_dim": 12,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            text_config={
                **_TEXT,
                "vocab_size": vocab,
                "vocab_size_per_layer_input": vocab,
                "hidden_size_per_layer_input": per_layer,
                "global_head_dim": 8,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"],
                "use_bidirectional_attention": "vision" if attends_to_images else None,
                "pad_token_id": 0,
            },
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            boi_token_id=tokenizer.convert_tokens_to_ids("<begin>"),
            eoi_token_id=tokenizer.convert_tokens_to_ids("<end>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
            audio_token_id=tokenizer.convert_tokens_to_ids("<audio>"),
        )
        processor = tf.Gemma4Processor(
            feature_extractor=tf.Gemma4AudioFeatureExtractor(),
            image_processor=tf.Gemma4ImageProcessorPil(
                patch_size=4, max_soft_tokens=70, pooling_kernel_size=2
            ),
            tokenizer=tokenizer,
            video_processor=None,
            image_seq_length=70,
        )
        return config, processor

    return make


_ROLES4 = {
    "image_token": "<image>",
    "boi_token": "<begin>",
    "eoi_token": "<end>",
    "audio_token": "<audio>",
    "boa_token": "<begin>",
    "eoa_token": "<end>",
}


def _pixtral(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    """Images of several lines of patches, with a token after each."""
    vision = tf.PixtralVisionConfig(**{**_VISION, "image_size": 32})
    config = tf.LlavaConfig(
        vision_config=vision,
        text_config=tf.MistralConfig(**_TEXT, vocab_size=vocab, sliding_window=None),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, _pixtral_processor(tokenizer, 1)


def _mistral3(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.Mistral3Config(
        vision_config=tf.PixtralVisionConfig(**{**_VISION, "image_size": 32}),
        text_config=tf.MistralConfig(**_TEXT, vocab_size=vocab, sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        spatial_merge_size=2,
    )
    return config, _pixtral_processor(tokenizer, 2)


def _pixtral_processor(tokenizer: Any, merge: int) -> Any:
    return tf.PixtralProcessor(
        image_processor=tf.PixtralImageProcessorPil(
            size={"longest_edge": 32}, patch_size=4 * merge
        ),
        tokenizer=tokenizer,
        patch_size=4,
        spatial_merge_size=merge,
        image_token="<image>",
        image_break_token="<begin>",
        image_end_token="<end>",
    )


_PINPOINTS = [[16, 32], [32, 16], [32, 32]]  # sizes to which images are resized


def _llava_next(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.LlavaNextConfig(
        vision_config=tf.CLIPVisionConfig(**_VISION),
        text_config=tf.MistralConfig(**_TEXT, vocab_size=vocab, sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = tf.LlavaNextProcessor(
        image_processor=tf.LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size=_SIZE, image_grid_pinpoints=_PINPOINTS
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _llava_onevision(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(**_VISION),
        text_config=tf.Qwen2Config(**_TEXT, vocab_size=vocab),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = tf.LlavaOnevisionProcessor(
        image_processor=tf.LlavaOnevisionImageProcessorPil(
            size=_SIZE, image_grid_pinpoints=_PINPOINTS
        ),
        tokenizer=tokenizer,
        video_processor=None,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    return config, processor


def _idefics3(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.Idefics3Config(
        vision_config=_VISION,
        text_config=tf.LlamaConfig(**_TEXT, vocab_size=vocab),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    processor = tf.Idefics3Processor(
        image_processor=tf.Idefics3ImageProcessorPil(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
    )
    return config, processor


def _aya_vision(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    config = tf.AyaVisionConfig(
        vision_config=tf.SiglipVisionConfig(**_VISION),
        text_config=tf.Cohere2Config(
            **_TEXT,
            vocab_size=vocab,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )
    processor = tf.AyaVisionProcessor(
        image_processor=tf.GotOcr2ImageProcessorPil(
            size=_SIZE, crop_to_patches=True, min_patches=1, max_patches=3
        ),
        tokenizer=tokenizer,
        patch_size=8,
        img_size=16,
    )
    return config, processor


def _glm4v(tokenizer: Any, vocab: int) -> tuple[Any, Any]:
    named = tokenizer.convert_tokens_to_ids
    config = tf.Glm4vConfig(
        text_config={
            **_TEXT,
            "vocab_size": vocab,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
        },
        vision_config={
            **_QWEN_VISION,
            "hidden_size": 24,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "image_size": 16,
            "patch_size": 4,
        },
        image_token_id=named("<image>"),
        video_token_id=named("<video>"),
        image_start_token_id=named("<begin>"),
        image_end_token_id=named("<end>"),
        video_start_token_id=named("<video begin>"),
        video_end_token_id=named("<video end>"),
    )
    processor = tf.Glm4vProcessor(
        image_processor=tf.Glm4vImageProcessorPil(
            patch_size=4,
            merge_size=2,
            size={"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * 40 * 40},
        ),
        tokenizer=tokenizer,
    )
    return config, processor


_ARGUMENTS = (  # of processors
    *("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens"),
    *("image_seq_length", "image_seq_len", "num_image_tokens", "spatial_merge_size", "img_size"),
    *("image_token", "image_break_token", "image_end_token"),
)
_SEES = {"image_token": "<image>"}
FAMILIES: dict[str, tuple[dict[str, str], str, _Make]] = {
    "llava": (_SEES, "<image>", _llava),
    "internvl": (
        {
            "context_image_token": "<image>",
            "start_image_token": "<begin>",
            "end_image_token": "<end>",
            "video_token": "<video>",
        },
        "<image>",
        _internvl,
    ),
    "qwen2_vl": (
        _SEES,
        "<begin><image><end>",
        _qwen(
            tf.Qwen2VLConfig,
            tf.Qwen2VLProcessor,
            {"rope_parameters": _MROPE},
            {**_QWEN_VISION, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
        ),
    ),
    "qwen2_5_vl": (
        _SEES,
        "<begin><image><end>",
        _qwen(
            tf.Qwen2_5_VLConfig,
            tf.Qwen2_5_VLProcessor,
            {"rope_parameters": _MROPE},
            {
                **_QWEN_VISION,
                "hidden_size": 24,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        ),
    ),
    "qwen3_vl": (
        _SEES,
        "<begin><image><end>",
        _qwen(
            tf.Qwen3VLConfig,
            tf.Qwen3VLProcessor,
            {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
            {
                **_QWEN_VISION,
                "hidden_size": 24,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        ),
    ),
    "gemma3": (
        {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"},
        "<begin>",
        _gemma3,
    ),
    "gemma4": (_ROLES4, "<image>", _gemma4(True, 0)),
    "gemma4_small": (_ROLES4, "<image>", _gemma4(False, 4)),
    "pixtral": (_SEES, "<image>", _pixtral),
    "mistral3": (_SEES, "<image>", _mistral3),
    "llava_next": (_SEES, "<image>", _llava_next),
    "llava_onevision": (_SEES, "<image>", _llava_onevision),
    "idefics3": (_SEES, "<image>", _idefics3),
    "aya_vision": (_SEES, "<image>", _aya_vision),
    "glm4v": ({**_SEES, "video_token": "<video>"}, "<begin><image><end>", _glm4v),
    "qwen3_5": (
        _SEES,
        "<begin><image><end>",
        _qwen(
            tf.Qwen3_5Config,
            tf.Qwen3VLProcessor,
            {
                "rope_parameters": {
                    **_MROPE,
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 1.0,
                },
                "layer_types": ["linear_attention", "full_attention"],
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            {
                **_QWEN_VISION,
                "hidden_size": 24,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
            },
        ),
    ),
}


@cache
def tiny_image_model(family: str) -> Path:
    """A directory that exists as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-images-")
    _kept.append(folder)
    path = Path(folder.name) / family
    roles, image, make = FAMILIES[family]
    tokenizer = _tokenizer(roles, image, _MORE.get(family, []))
    if family in ("pixtral", "mistral3"):  # transformers requires it for their processor
        pytest.importorskip("torchvision")
    try:
        with without_video():
            config, processor = make(tokenizer, len(tokenizer))
    except ModuleNotFoundError:  # transformers 5.17's Gemma 4
        pytest.importorskip("torchvision")
        raise
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.get_text_config().eos_token_id = config.get_text_config().bos_token_id = None
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(0.1 * noise)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    about: dict[str, Any] = {"processor_class": type(processor).__name__}
    for part in ("image_processor", "feature_extractor"):
        if hasattr(processor, part):
            about[part] = json.loads(getattr(processor, part).to_json_string())
    about |= {name: getattr(processor, name) for name in _ARGUMENTS if hasattr(processor, name)}
    (path / "processor_config.json").write_text(json.dumps(about))
    return path


_kept: list[tempfile.TemporaryDirectory[str]] = []


def random_image(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_token(family: str) -> str:
    """The placeholder of an image in a prompt of this family."""
    return FAMILIES[family][1]
