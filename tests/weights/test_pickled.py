"""Pickled checkpoints: the same tensors as safetensors, and nothing that a pickle would run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.errors import CheckpointError, InvalidRequestError
from llmc.lora_request import LoRARequest
from llmc.startup.adapter_files import as_peft
from llmc.weights.checkpoint import open_file
from llmc.weights.tensors import open_tensors


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_shards_are_converted_once(folder: Path, tmp_path: Path) -> None:
    shared = torch.randn(4, 6)
    torch.save({"a": shared, "b": shared}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"c": torch.arange(3.0).bfloat16()}, folder / "pytorch_model-00002-of-00002.bin")
    found = open_tensors(folder, None, torch.float32)
    assert sorted(found) == ["a", "b", "c"]
    assert torch.equal(found["b"].read(), shared) and found["c"].dtype == torch.bfloat16
    made = list((tmp_path / "cache" / "safetensors").iterdir())
    again = open_tensors(folder, None, torch.float32)
    assert list((tmp_path / "cache" / "safetensors").iterdir()) == made and len(made) == 1
    assert sorted(again) == sorted(found)


def test_an_adapter_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    weight = torch.randn(4, 6)
    torch.save({"base_model.model.q.lora_A.weight": weight}, folder / "adapter_model.bin")
    given = LoRARequest("old", 1, str(folder))
    made = as_peft(given, tmp_path)
    assert (made.lora_name, made.lora_int_id) == ("old", 1) and made != given
    assert (Path(made.lora_path) / "adapter_config.json").read_text() == '{"r": 4}'
    (found,) = open_file(Path(made.lora_path) / "adapter_model.safetensors").values()
    assert torch.equal(found.read(), weight)
    assert as_peft(given, tmp_path) == made == as_peft(made, tmp_path)
    (folder / "adapter_model.bin").write_bytes(b"xx")
    with pytest.raises(InvalidRequestError, match=r"'old' can't be used: adapter_model\.bin can't"):
        as_peft(given, tmp_path)


class Harmful:
    """Would make a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save({"a": Harmful(trap)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"as plain tensors: .*mkdir") as caught:
        open_tensors(folder, None, torch.float32)
    assert "weights_only" not in str(caught.value)  # torch advises to switch this off
    assert not trap.exists()


def test_what_is_no_checkpoint(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"xx")
    with pytest.raises(CheckpointError, match="as plain tensors: Unsupported operand 120; use"):
        open_tensors(folder, None, torch.float32)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04nonsense" * 10)
    with pytest.raises(CheckpointError, match="pytorch_model.bin can't be read as plain tensors"):
        open_tensors(folder, None, torch.float32)
    torch.save({"a": torch.ones(2), "step": 3}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="objects other than tensors"):
        open_tensors(folder, None, torch.float32)
