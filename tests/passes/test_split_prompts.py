"""split_prompts: which attention calls get the prompts of a step, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_graphs import Values, apply, cache, roles, run, step, trace
from torch import Tensor, fx

from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prompts import Prompts
from llmc.passes.inputs import StepInput, input_of
from llmc.passes.split_prompts import split_prompts

TOKENS, HEADS, DIM = 6, 2, 16
PLAIN: tuple[Any, ...] = (0, 0, 0.0, None, None)
SPLIT = split_prompts()


def layers(*flags: tuple[Any, ...], dtype: torch.dtype = torch.bfloat16) -> fx.GraphModule:
    """One attention a layer, with these flags, over one cache."""

    def model(
        x: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        out = x.sum()
        for some in flags:
            where = (query_start, context_len, block_table)
            out = out + paged_attention.overload(x, key, value, *where, 0.5, *some).sum()
        return out

    filled = torch.linspace(-1, 1, 4 * HEADS * 4 * DIM).view(4, HEADS, 4, DIM).to(dtype)
    caches = {
        part: type(one)(tensor=filled, role=one.role)
        for part in ("key", "value")
        for one in [cache(0, part)]
    }
    return trace(
        model,
        x=step(torch.linspace(-2, 2, TOKENS * HEADS * DIM).view(TOKENS, HEADS, DIM).to(dtype)),
        query_start=step(torch.tensor([0, TOKENS], dtype=torch.int32), dynamic=None),
        context_len=step(torch.tensor([TOKENS], dtype=torch.int32), dynamic=None),
        block_table=step(torch.tensor([[1, 3]], dtype=torch.int32), dynamic=None),
        **caches,
    )


def hinted(gm: fx.GraphModule) -> list[bool]:
    nodes = gm.graph.find_nodes(op="call_function", target=paged_attention.overload)
    return [len(n.args) == 15 and input_of(n.args[14]) == StepInput(name="prompts") for n in nodes]


def test_plain_layers_get_the_hint_and_answer_the_same() -> None:
    before = layers(PLAIN, PLAIN)
    after, [report] = apply(before, SPLIT)
    assert hinted(before) == [False, False] and hinted(after) == [True, True]
    assert report.notes == () and report.changed and "other inputs" in str(report)
    named = next(n for n in after.graph.nodes if input_of(n) == StepInput(name="prompts"))
    assert named.meta["val"].device.type == "cpu" and named.meta["val"].dtype == torch.int32
    steps = [role.name for role in roles(after, StepInput)]
    assert steps.count("prompts") == 1
    again, [second] = apply(after, SPLIT)
    assert hinted(again) == [True, True] and not second.changed


def test_the_hint_changes_no_result() -> None:
    before = layers(PLAIN)
    after, _ = apply(before, SPLIT)
    generator = torch.Generator().manual_seed(0)
    filled = torch.randn(4, HEADS, 4, DIM, generator=generator).bfloat16()
    given = {
        "x": torch.randn(TOKENS, HEADS, DIM, generator=generator).bfloat16(),
        "query_start": torch.tensor([0, TOKENS], dtype=torch.int32),
        "context_len": torch.tensor([TOKENS], dtype=torch.int32),
        "block_table": torch.tensor([[1, 3]], dtype=torch.int32),
    }
    caches = {(0, "key"): filled, (0, "value"): filled}
    want = run(before, Values(step=given, weights={}, caches=caches))
    hint = Prompts(lengths=(TOKENS,)).words()
    got = run(after, Values(step={**given, "prompts": hint}, weights={}, caches=caches))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ((7, 0, 0.0, None, None), torch.bfloat16),
        ((0, 8, 0.0, None, None), torch.bfloat16),
        ((0, 0, 30.0, None, None), torch.bfloat16),
        (PLAIN, torch.float32),
    ],
    ids=["window", "chunk", "softcap", "float32"],
)
def test_what_no_other_kernel_takes_is_left_alone(
    flags: tuple[Any, ...], dtype: torch.dtype
) -> None:
    after, [report] = apply(layers(flags, dtype=dtype), SPLIT)
    assert hinted(after) == [False]
    assert "1 layers: FlashAttention needs plain" in str(report)


def test_layers_get_the_hint_one_by_one() -> None:
    after, [report] = apply(layers(PLAIN, (7, 0, 0.0, None, None), PLAIN), SPLIT)
    assert hinted(after) == [True, False, True]
    assert "1 layers" in str(report)


def test_it_says_why_it_did_nothing() -> None:
    after, [report] = apply(layers(PLAIN), split_prompts(unwanted="no GPU"))
    assert hinted(after) == [False]
    assert "no GPU" in str(report)
