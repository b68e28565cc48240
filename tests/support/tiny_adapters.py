"""Random LoRA adapters, created and saved by PEFT, and PEFT's own output with them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.lora_request import LoRARequest

peft = pytest.importorskip("peft", reason="peft is not installed (it is in the test extra)")


def save_adapter(
    model: Any,
    path: Path,
    *,
    number: int = 1,
    save_embedding_layers: bool | str = False,
    **config: Any,
) -> LoRARequest:
    """Save an adapter for `model` (transformers') in `path`, whose last part is its name."""
    wanted = peft.LoraConfig(task_type="CAUSAL_LM", **config)
    with _quiet():
        made = peft.get_peft_model(model, wanted)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.3 * drawn)
    with _quiet():
        made.save_pretrained(path, save_embedding_layers=save_embedding_layers)
    return LoRARequest(path.name, number, str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore warnings: PEFT calls functions that transformers deprecates, and warns of defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def peft_model(model: Any, adapter: LoRARequest | None) -> Iterator[Any]:
    """The model with an adapter, applied by PEFT."""
    if adapter is None:
        yield model
        return
    with _quiet():
        loaded = peft.PeftModel.from_pretrained(model, adapter.lora_path).eval()
    try:
        yield loaded
    finally:
        loaded.unload()
