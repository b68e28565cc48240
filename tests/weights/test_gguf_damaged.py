"""Damaged GGUF files end in one clear sentence, whatever their headers claim."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import write_gguf

from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.startup.gguf_files import model_directory
from llmc.startup.model_files import resolve_model
from llmc.weights.gguf.reader import read_header
from llmc.weights.tensors import open_tensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama").read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*, tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


PAD = bytes(4096)
DAMAGED = [
    (b"", "too short"),
    (b"GGML" + PAD, "does not begin"),
    (header(version=9) + PAD, "GGUF version 9"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + PAD, "big-endian"),
    (header(tensors=2**60) + PAD, "states 1152921504606846976 tensors"),
    (header(pairs=2**63) + PAD, "metadata entries"),
    (header(pairs=1) + struct.pack("<Q", 2**40) + PAD, "states 1099511627776 bytes"),
    (header(pairs=1) + text("k") + struct.pack("<IQ", 8, 2**40) + PAD, "for the text of 'k'"),
    (header(pairs=1) + text("k") + struct.pack("<I", 255) + PAD, "unknown type 255"),
    (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**61) + PAD, "values of 'k'"),
    (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**61) + PAD, "strings of 'k'"),
    (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + PAD, "unreadable type 9"),
    (header(pairs=2) + (text("k") + struct.pack("<IB", 0, 1)) * 2 + PAD, "'k' twice"),
    (header(pairs=1) + struct.pack("<Q", 2) + b"\xff\xfe" + PAD, "invalid UTF-8"),
    (header(tensors=1) + tensor("t", (2**60,)) + PAD, "truncated or damaged"),
    (header(tensors=1) + tensor("t", (2**40, 2**40)) + PAD, "truncated or damaged"),
    (header(tensors=1) + tensor("t", (32,), kind=255) + PAD, "type 255"),
    (header(tensors=1) + tensor("t", (33,), kind=8) + PAD, "not whole blocks"),
    (header(tensors=1) + tensor("t", (0,)) + PAD, "not whole blocks"),
    (header(tensors=1) + tensor("t", (32,), offset=7) + PAD, "not aligned"),
    (header(tensors=1) + tensor("t", (32,), offset=2**63) + PAD, "truncated or damaged"),
    (header(tensors=1) + text("t") + struct.pack("<I", 2**32 - 1) + PAD, "4294967295 dimensions"),
    (header(tensors=2) + tensor("a", (64,)) + tensor("b", (64,), offset=128) + PAD, "overlap"),
    (header(tensors=2) + tensor("a", (8,)) + tensor("a", (8,), offset=128) + PAD, "'a' twice"),
    (
        header(pairs=1) + text("general.alignment") + struct.pack("<II", 4, 3) + PAD,
        "alignment 3",
    ),
    (header() + PAD, "does not state its architecture"),
]


def test_a_description_that_is_cut_off_inside_a_character_is_read(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "llama", edit=lambda writer: writer.add_description("a caf\u00e9")
    )
    data = path.read_bytes()
    at = data.index("caf\u00e9".encode())
    path.write_bytes(data[: at + 3] + b"\xc3 " + data[at + 5 :])
    assert read_header(path).metadata["general.description"] == "a caf\ufffd "


HUGE = 8 << 30  # of files that take no space on the disk
SPARSE = [
    (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 0, HUGE - 100), "values of 'k', more"),
    (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE // 9), "strings of 'k', more"),
    (header(pairs=1) + text("k") + struct.pack("<IQ", 8, HUGE - 100), "bytes for the text of 'k'"),
    (header(tensors=HUGE // 30), "tensors, more than any model has"),
]


@pytest.mark.parametrize(("data", "message"), SPARSE, ids=[m for _, m in SPARSE])
def test_lengths_that_a_huge_file_has_room_for(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(HUGE)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_damaged_file_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(header(version=9) + PAD)
    code = f"""
import sys
from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.startup.model_files import resolve_model
try:
    resolve_model(EngineConfig(model={str(tmp_path / "m.gguf")!r}))
except CheckpointError:
    print("torch" in sys.modules or "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(("data", "message"), DAMAGED, ids=[m for _, m in DAMAGED])
def test_damaged_headers(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model(EngineConfig(model=str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert peak < 32 << 20


def test_a_file_that_ends_early(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for end in (1, 23, 24, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            read_header(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_changed_bytes_are_read_or_refused(
    whole: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 4200))
        value = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        changed[at : at + len(value)] = value
    path = tmp_path / "m.gguf"
    path.write_bytes(changed)
    try:
        found = read_header(path)
    except CheckpointError as e:
        assert len(str(e)) < 70_000
        return
    assert all(t.offset + t.num_bytes <= len(changed) for t in found.tensors.values())


SCALARS = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([0, 1, 2**31 - 1, -(2**31)]),
    st.booleans(),
    st.floats(width=32),
    st.text(max_size=8),
    st.sampled_from(["(" * 3000, "{{" * 3000, "{% if a %}" * 3000 + "{% endif %}" * 3000, "\0"]),
)
LISTS = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200),
    st.lists(st.text(max_size=3), min_size=1, max_size=200),
    st.lists(st.floats(width=32), min_size=1, max_size=200),
    st.sampled_from([[1] * 128, ["a"] * 128, ["a b c"], [" "], [0.5] * 128, [2**30] * 128]),
)
MORE_KEYS = (
    "tokenizer.ggml.pre", "tokenizer.ggml.scores", "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.precompiled_charsmap", "split.tensors.count",
    "general.alignment", "general.sampling.temp", "A.rope.scaling.type", "A.rope.scaling.factor",
    "A.rope.dimension_count", "A.attention.sliding_window_pattern", "A.expert_count",
    "A.nextn_predict_layers", "A.attention.key_length",
)  # fmt: skip


def pair(key: str, value: Any) -> GGUFValue:
    if isinstance(value, list):
        inner = GGUFValueType.get_type(value[0])
        return GGUFValue(value=value, type=GGUFValueType.ARRAY, sub_type=inner)
    return GGUFValue(value=value, type=GGUFValueType.get_type(value))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_metadata_makes_a_model_or_one_sentence(tmp_path: Path, data: st.DataObject) -> None:
    architecture = data.draw(st.sampled_from(["llama", "qwen3moe", "phi3", "mamba"]))

    def change(writer: GGUFWriter) -> None:
        pairs = writer.kv_data[0]
        keys = [*pairs, *(key.replace("A.", f"{architecture}.") for key in MORE_KEYS)]
        for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
            if data.draw(st.booleans()) and key in pairs:
                del pairs[key]
            else:
                pairs[key] = pair(key, data.draw(st.one_of(SCALARS, LISTS)))

    path = tmp_path / "m.gguf"
    path.unlink(missing_ok=True)
    try:
        write_gguf(path, architecture, edit=change)
    except (ValueError, TypeError, struct.error):  # the writer's own: an alignment of a text
        return
    try:
        folder = model_directory(path)
        for tensor in open_tensors(folder, None, torch.float32).values():
            tensor.read()
    except CheckpointError as e:
        assert "\n" not in str(e) and len(str(e)) < 600


TOKENIZERS: list[tuple[str, Any, str]] = [
    ("token_type", [1] * 3, "token_type does not have one entry per token"),
    ("token_type", ["a"] * 128, "token_type is not a list of the right type"),
    ("tokens", [7] * 128, "tokens is not a list of the right type"),
    ("tokens", ["a"] * 128, "empty or has duplicates"),
    ("model", [1], "tokenizer.ggml.model is not a string"),
    ("model", "rwkv", "of kind 'rwkv'; llmc supports"),
    ("model", "bert", "unknown_token_id is missing"),
    ("model", "llama", "scores has 0 scores for 128 tokens"),
    ("model", "t5", "scores has 0 scores for 128 tokens"),
    ("merges", ["no merge"], "tokenizer can't be used"),
]


@pytest.mark.parametrize(("key", "value", "message"), TOKENIZERS)
def test_damaged_tokenizers(key: str, value: Any, message: str, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0][f"tokenizer.ggml.{key}"] = pair(key, value)
        writer.kv_data[0].pop("tokenizer.ggml.merges" if key == "model" else "none", None)

    path = write_gguf(tmp_path / "m.gguf", "llama", edit=change)
    with pytest.raises(CheckpointError, match=message) as caught:
        model_directory(path)
    assert str(caught.value).startswith("m.gguf: ") and len(str(caught.value)) < 300


def test_a_later_part_under_the_name_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(header(pairs=1) + text("split.no") + struct.pack("<IH", 2, 1) + PAD)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(header() + PAD)
    with pytest.raises(CheckpointError, match="holds part 2 of a split model, by what it says"):
        read_header(path)


def test_parts_that_repeat_or_miss_tensors(whole: bytes, tmp_path: Path) -> None:
    one, two = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    one.write_bytes(whole)
    with pytest.raises(CheckpointError, match="part m-00002-of-00002.gguf is missing"):
        read_header(one)
    two.write_bytes(whole)
    with pytest.raises(CheckpointError, match="m-00002-of-00002.gguf repeats tensor"):
        read_header(one)
    two.write_bytes(header() + PAD)
    assert read_header(one).files == (one, two)
    two.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="m-00002-of-00002.gguf tensor .* truncated"):
        read_header(one)
    huge = tmp_path / "m-00001-of-99999.gguf"
    huge.write_bytes(whole)
    with pytest.raises(CheckpointError, match="part m-00002-of-99999.gguf is missing"):
        read_header(huge)
