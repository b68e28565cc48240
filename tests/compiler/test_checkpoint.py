"""open_checkpoint: the tensors of a safetensors directory, or one clear sentence."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.weights.checkpoint import open_checkpoint

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "half": torch.tensor([1.5, -2.5], dtype=torch.float16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
}


def save_sharded(path: Path, **changes: Any) -> None:
    """Two shards and an index over them."""
    files = {"one.safetensors": ["a", "b"], "two.safetensors": ["half", "scalar", "empty"]}
    for name, tensors in files.items():
        save_file({t: TENSORS[t] for t in tensors}, path / name)
    weight_map = {t: name for name, tensors in files.items() for t in tensors}
    index = {"metadata": {}, "weight_map": weight_map | changes}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def check_all(path: Path) -> None:
    stored = open_checkpoint(path)
    assert set(stored) == set(TENSORS)
    for name, want in TENSORS.items():
        assert stored[name].shape == tuple(want.shape)
        got = stored[name].read()
        assert got.dtype == want.dtype and torch.equal(got, want), name
        assert stored[name].num_bytes == want.numel() * want.dtype.itemsize


def refused(path: Path, *words: str) -> None:
    """One sentence, no line break, with these words in it."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    for word in words:
        assert word in message, message


def test_a_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_all(tmp_path)


def test_a_single_file_of_another_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    check_all(tmp_path)


def test_shards(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    check_all(tmp_path)


def test_numbered_shards_need_no_index(tmp_path: Path) -> None:
    """If all are there. A vendor's own files beside them are another set."""
    for number, names in enumerate((["a", "b"], ["half", "scalar", "empty"]), 1):
        file = tmp_path / f"model-{number:05}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in names}, file)
    assert open_checkpoint(tmp_path).keys() == TENSORS.keys()
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "x.safetensors")
    refused(tmp_path, "shard 1 of 2 (model-...) is missing", "so is model.safetensors.index.json")
    (tmp_path / "y-00001-of-00001.safetensors").write_bytes(b"")
    refused(tmp_path, "has no model.safetensors and no model.safetensors.index.json")


def test_a_number_of_shards_that_no_memory_holds(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / f"model-1-of-{10**12}.safetensors")
    save_file(TENSORS, tmp_path / f"model-3-of-{10**12}.safetensors")
    refused(tmp_path, f"shard 2 of {10**12} (model-...) is missing")


def test_reading_into_a_given_tensor(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    out = torch.zeros(6, 4)
    open_checkpoint(tmp_path)["a"].read(out[2:5])
    assert torch.equal(out[2:5], TENSORS["a"])
    assert out[:2].sum() == 0 and out[5].sum() == 0


def test_tensors_are_compared_byte_for_byte(tmp_path: Path) -> None:
    wide = torch.arange(3 << 20, dtype=torch.float32)
    tensors = {"a": wide, "same": wide.clone(), "other": wide.clone(), "short": wide[:5].clone()}
    tensors["other"][-1] = 0.0
    save_file(tensors, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)
    equal = {name: stored["a"].equals(stored[name]) for name in tensors}
    assert equal == {"a": True, "same": True, "other": False, "short": False}


def test_a_missing_shard(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    refused(tmp_path, "'two.safetensors', which is missing")


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    """As with transformers: the index may be left over from the shards that it was merged from."""
    save_sharded(tmp_path, ghost="gone.safetensors")
    save_file({"a": TENSORS["a"] + 1}, tmp_path / "model.safetensors")
    [tensor] = open_checkpoint(tmp_path).values()
    assert torch.equal(tensor.read(), TENSORS["a"] + 1)


def test_a_tensor_that_the_index_promises_and_no_shard_holds(tmp_path: Path) -> None:
    save_sharded(tmp_path, ghost="one.safetensors")
    refused(tmp_path, "the index lists ghost")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ""]
)
def test_an_index_that_names_a_file_outside(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    save_sharded(inside, x=name)
    with pytest.raises(CheckpointError, match=r"names (a file outside|''|'\.\.')"):
        open_checkpoint(inside)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}', "\x00"]
)
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json can't be read")


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    """Cut inside the length, the header and the data."""
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors is not a complete safetensors file")


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": TENSORS["a"]}, file)
    stored = open_checkpoint(tmp_path)["a"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="ends inside tensor 'a'"):
        stored.read()


def test_a_header_of_absurd_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refused(tmp_path, "not a complete safetensors file")


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html>\n")
    refused(tmp_path, "not a complete safetensors file", "download it again")


def test_a_pointer_that_git_left_in_place_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "is a Git LFS pointer", "run `git lfs pull`")


def _with_dtype(tensor: Tensor, dtype: str, file: Path) -> None:
    """A file whose header names another dtype of the same width."""
    save_file({"odd": tensor}, file)
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + size].replace(b'"U8"', f'"{dtype}"'.encode())
    header = header.rstrip()
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])


def test_an_unknown_dtype(tmp_path: Path) -> None:
    _with_dtype(torch.zeros(4, dtype=torch.uint8), "Q9", tmp_path / "model.safetensors")
    refused(tmp_path, "Q9")
    save_file({"odd": torch.zeros(4, dtype=torch.uint16)}, tmp_path / "model.safetensors")
    refused(tmp_path, "tensor 'odd' has dtype U16, which is not supported")


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(tmp_path, "only pickled weights", "use a checkpoint in safetensors")


def test_no_weights_at_all(tmp_path: Path) -> None:
    refused(tmp_path, "has no model.safetensors", "--load-format dummy")


def test_a_vendors_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    refused(
        tmp_path,
        "pickled weights (such as 'consolidated.00.pth')",
        "use a checkpoint in safetensors",
    )
