"""Prompts as the runner tells of them, the table of measured kernels, and torch's own kernels."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.kernels.prompt_table import (
    OWN,
    TABLE,
    Measured,
    choose,
    head_dims,
    load_table,
    measured_on,
)
from llmc.kernels.prompts import MIN_TOKENS, Prompts

CPU = torch.device("cpu")


def line(tokens: int, is_fresh: bool = True, head_dim: int = 128, **ms: float) -> Measured:
    return Measured(chip="sm_90", head_dim=head_dim, tokens=tokens, is_fresh=is_fresh, ms=ms)


def test_prompts_are_the_last_requests_of_a_step() -> None:
    found = Prompts.find([(1, 70), (200, 200), (1, 9), (128, 300), (MIN_TOKENS, MIN_TOKENS)])
    assert (found.first_request, found.end_request, found.first_token) == (3, 5, 202)
    assert found.lengths == ((128, 300), (128, 128))
    assert (found.num_tokens, found.num_keys, found.are_fresh) == (256, 428, False)
    assert Prompts.find([(300, 300)]).are_fresh
    none = Prompts.find([(300, 300), (MIN_TOKENS - 1, 400)])
    assert none.lengths == () and none.num_tokens == 0


@pytest.mark.parametrize("lengths", [(), ((5, 5),), ((1, 9), (7, 2**30))], ids=str)
def test_words_are_read_as_they_were_written(lengths: tuple[tuple[int, int], ...]) -> None:
    prompts = Prompts(first_request=3, first_token=17, lengths=lengths)
    words = prompts.words()
    assert (words.dtype, words.device.type, len(words)) == (
        torch.int32,
        "cpu",
        2 + 2 * len(lengths),
    )
    assert Prompts.read(words) == prompts


def test_the_longest_line_that_a_prompt_reaches_decides() -> None:
    lines = [
        line(512, triton=1.0, flash=2.0, cudnn=3.0),
        line(2048, triton=3.0, flash=2.0, cudnn=1.0),
        line(8192, triton=3.0, flash=1.0, cudnn=2.0),
        line(2048, is_fresh=False, triton=3.0, flash=1.0),
        line(2048, head_dim=64, triton=1.0, flash=0.97),
    ]

    def fastest(*lengths: tuple[int, int], head_dim: int = 128) -> str:
        return choose(lines, head_dim, Prompts(lengths=lengths))

    assert fastest() == OWN
    assert fastest((200, 200)) == OWN, "shorter than any that was measured"
    assert fastest((2047, 2047)) == OWN
    assert fastest((2048, 2048)) == "cudnn"
    assert fastest((4000, 4000), (96, 96)) == "cudnn", "the average counts"
    assert fastest((9000, 9000)) == "flash"
    assert fastest((9000, 9001)) == "flash"
    assert fastest((2048, 8192)) == "flash"
    assert fastest((2048, 8193)) == OWN, "a longer context than was measured"
    assert fastest((4096, 4096), head_dim=64) == OWN, "a gain of 3 % is none"
    assert fastest((4096, 4096), head_dim=96) == OWN
    assert head_dims(lines) == (128,)
    assert head_dims([]) == ()


def test_the_committed_table_is_what_a_benchmark_writes() -> None:
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    assert set(data) == {"measured", "lines"}
    assert bool(data["measured"]) == bool(data["lines"]), "lines come with what measured them"
    for run in data["measured"]:
        assert {"chip", "machine", "date", "versions"} <= set(run)
    for one in load_table():
        assert {OWN} < set(one.ms) <= {OWN, "flash", "cudnn"}
        assert one.chip in {run["chip"] for run in data["measured"]}
        assert min(one.ms.values()) > 0 and one.tokens >= MIN_TOKENS
    assert measured_on(CPU) == ()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    pytest.importorskip("triton", reason="triton is not installed: prompts are not divided")
    from llmc.kernels.triton import torch_attention

    table: dict[str, Any] = {}
    monkeypatch.setattr(torch_attention, "KERNELS", table)
    torch_attention.works.cache_clear()
    yield table
    torch_attention.works.cache_clear()


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_a_kernel_serves_only_where_it_is_right(
    name: str, kernels: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from llmc.kernels.triton.torch_attention import Packed, expected, works

    def right(packed: Packed) -> Tensor:
        return expected(packed)

    def top_left(packed: Packed) -> Tensor:
        fresh = Prompts(lengths=tuple((new, new) for new, _ in packed.prompts.lengths))
        count = len(packed.query)
        key, value = packed.key[:count], packed.value[:count]
        return expected(dataclasses.replace(packed, key=key, value=value, prompts=fresh))

    def nan(packed: Packed) -> Tensor:
        return right(packed) * float("nan")

    def missing(packed: Packed) -> Tensor:
        raise RuntimeError("no kernel image is available")

    def probe() -> bool:
        works.cache_clear()
        return works(name, 64, 4, torch.bfloat16, CPU)

    kernels[name] = right
    assert probe() and not caplog.records
    for wrong, words in ((nan, "nan away"), (missing, "no kernel image")):
        kernels[name] = wrong
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert not probe()
        assert words in caplog.text and name in caplog.text
    kernels[name] = top_left  # a causal mask from the wrong corner: cuDNN's, and why it gets less
    assert probe() is (name == "cudnn")


def test_flash_is_called_as_this_torch_declares_it() -> None:
    """Shapes and argument types only: nothing but a GPU runs it."""
    pytest.importorskip("triton", reason="triton is not installed: prompts are not divided")
    from llmc.kernels.triton.torch_attention import Packed, flash

    query, key = (
        torch.empty(n, heads, 128, dtype=torch.bfloat16, device="meta")
        for n, heads in ((80, 32), (96, 8))
    )
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    prompts = Prompts(lengths=((40, 56), (40, 40)))
    out = flash(
        Packed(query=query, key=key, value=key, query_start=starts, key_start=starts,
               prompts=prompts, scale=0.1)
    )  # fmt: skip
    assert (out.shape, out.dtype) == (query.shape, query.dtype)


def test_cudnn_refuses_what_its_mask_gets_wrong() -> None:
    pytest.importorskip("triton", reason="triton is not installed: prompts are not divided")
    from llmc.kernels.triton.torch_attention import Packed, cudnn

    query, starts = torch.empty(4, 2, 16), torch.empty(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="from their first token on"):
        cudnn(
            Packed(query=query, key=query, value=query, query_start=starts, key_start=starts,
                   prompts=Prompts(lengths=((4, 9),)), scale=0.1)
        )  # fmt: skip
