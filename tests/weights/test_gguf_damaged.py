"""Damaged GGUF files end in one clear sentence, whatever their headers claim."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import write_gguf

from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.startup.model_files import resolve_model
from llmc.weights.gguf.reader import read_header


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
    (header(pairs=1) + struct.pack("<Q", 2) + b"\xff\xfe" + PAD, "no valid UTF-8"),
    (header(tensors=1) + tensor("t", (2**60,)) + PAD, "truncated or damaged"),
    (header(tensors=1) + tensor("t", (2**40, 2**40)) + PAD, "truncated or damaged"),
    (header(tensors=1) + tensor("t", (32,), kind=255) + PAD, "type 255"),
    (header(tensors=1) + tensor("t", (33,), kind=8) + PAD, "no whole blocks"),
    (header(tensors=1) + tensor("t", (0,)) + PAD, "no whole blocks"),
    (header(tensors=1) + tensor("t", (32,), offset=7) + PAD, "not aligned"),
    (header(tensors=1) + tensor("t", (32,), offset=2**63) + PAD, "truncated or damaged"),
    (header(tensors=1) + text("t") + struct.pack("<I", 2**32 - 1) + PAD, "4294967295 dimensions"),
    (header(tensors=2) + tensor("a", (64,)) + tensor("b", (64,), offset=128) + PAD, "overlap"),
    (header(tensors=2) + tensor("a", (8,)) + tensor("a", (8,), offset=128) + PAD, "'a' twice"),
    (
        header(pairs=1) + text("general.alignment") + struct.pack("<II", 4, 3) + PAD,
        "alignment 3",
    ),
    (header() + PAD, "does not say which architecture"),
]


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
