"""A tiny random model with a tokenizer and a chat template, created on the fly."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models import save_checkpoint
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.model_info import ModelInfo
from llmc.startup.start import start_engine
from llmc.text.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LICENSE = Path(__file__).parents[2] / "LICENSE"


@cache
def tiny_chat_model() -> Path:
    """A directory that exists as long as this process. The vocabulary is learned from LICENSE."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-chat-")
    _kept.append(folder)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(LICENSE)], trainer)
    path = Path(folder.name) / "tiny-chat"
    save_checkpoint(
        "llama", path, vocab_size=backend.get_vocab_size(), max_position_embeddings=2048
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[2], clean_up_tokenization_spaces=False
    )
    hf.chat_template = TEMPLATE
    hf.save_pretrained(path)
    return path


def save_tiny_classifier(path: Path, maker: Any, labels: tuple[str, ...] = ("bad", "good")) -> Any:
    """The same with a random head, saved with the tokenizer. `maker`: transformers' Auto class."""
    config = AutoConfig.from_pretrained(tiny_chat_model(), num_labels=len(labels))
    config.id2label = dict(enumerate(labels))
    model = maker.from_config(config).eval()
    model.save_pretrained(path)
    for file in tiny_chat_model().glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return model


_kept: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(kw_only=True)
class TinyChat:
    engine: EngineCore
    info: ModelInfo
    tokenizer: Tokenizer
    config: EngineConfig

    def end_ranks(self) -> None:
        """Do nothing: there are no ranks."""


def start_tiny_chat(model: Path | None = None, **options: Any) -> TinyChat:
    """Start it for live_server, at -O0 in float32; `options` are EngineConfig's."""
    path = model or tiny_chat_model()
    config = EngineConfig(model=str(path), opt_level=0, dtype="float32", **options)
    started = start_engine(config)
    folder = started.info.tokenizer_path
    assert folder is not None
    tokenizer = Tokenizer.load(folder)
    return TinyChat(engine=started.engine, info=started.info, tokenizer=tokenizer, config=config)
