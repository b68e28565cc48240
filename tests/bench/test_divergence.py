"""`python -m bench.divergence`: what rounding costs in accuracy, beside llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import bench_package  # noqa: F401 - before bench
import pytest
from torch_threads import torch_threads

from llmc.kernels.cpu.levels import multiplies_integers
from llmc.startup.default_model import default_model_path
from llmc.startup.gguf_files import model_directory
from llmc.text.tokenizer import Tokenizer

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: llama.cpp can't be compared")

from bench.divergence import NEAR, TOPIC, by_float32, by_llama_cpp, by_llmc, divergence

THREADS = 2


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with torch_threads(THREADS):
        yield


@pytest.mark.exhaustive
@pytest.mark.skipif(not multiplies_integers(), reason="this CPU's inputs are not rounded")
def test_rounded_inputs_deviate_no_further_than_those_of_llama_cpp() -> None:
    """The condition for products of 8-bit inputs: the same weights, and the KL to float32."""
    path = default_model_path()
    ids = Tokenizer.load(model_directory(path)).encode(topics[TOPIC])[:192]
    want = by_float32(path, ids, THREADS)
    theirs = divergence(want, by_llama_cpp(path, ids, THREADS, NEAR))
    assert theirs > 0
    assert divergence(want, by_llmc(path, ids, activation_bits=8)) <= theirs
    assert divergence(want, by_llmc(path, ids)) < theirs / 1000
