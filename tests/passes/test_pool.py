"""running_pool and pool: the graph ends with a vector for each sample."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_graphs import Values, apply, roles, run, step, trace
from torch import fx

from llmc.kernels.pool_tokens import pool_tokens
from llmc.passes.edit import calls, val
from llmc.passes.inputs import StateInput, StepInput
from llmc.passes.pool import pool, running_pool
from llmc.passes.slot_state import slot_state
from llmc.pooling import METHODS, Method

GEN = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(1, 5, 4, generator=GEN)
COUNT = torch.arange(1, 4)[:, None].float()  # of a request's 3 tokens


def _reading_both(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return pool_tokens(x + 0 * positions[None, :, None])


def test_the_rows_become_float32_and_say_whether_they_are_finite() -> None:
    rows = torch.tensor([[1.0, 2.0], [math.inf, 1.0], [math.nan, 0.0]], dtype=torch.bfloat16)
    x = step(rows, dynamic=0)
    pooled, (report,) = apply(trace(lambda x: x * 2, x=x), pool())
    assert report.changed and not report.removed
    token, vector = run(pooled, Values.of(x=x))
    assert token.tolist() == [0, -1, -1]
    assert vector.dtype == torch.float32 and vector[0].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("method", [m for m in METHODS if m != "last"])
def test_each_token_gets_what_is_pooled_up_to_it(method: Method) -> None:
    """Two requests side by side: one begins with 3 tokens, the other goes on after 2 others."""
    x, positions = step(HIDDEN, dynamic=1), step(torch.tensor([0, 1, 2, 2, 3]))
    graph = trace(_reading_both, x=x, positions=positions)
    made, reports = apply(graph, running_pool(method=method), slot_state())
    op = "running_max" if method == "max" else "linear_recurrence"
    assert reports[0].added[f"llmc.{op}.default"] == 1
    assert [role.op for role in roles(made, StateInput)] == [op]
    earlier = torch.randn(4, generator=GEN)
    state = torch.full((3, 4), math.nan)
    state[2] = earlier
    bounds = {
        "query_start": step(torch.tensor([0, 3, 5], dtype=torch.int32)),
        "context_len": step(torch.tensor([3, 4], dtype=torch.int32)),
        "request_row": step(torch.tensor([1, 2])),
    }
    assert {role.name for role in roles(made, StepInput)} == {"x", "positions", *bounds}
    tensors = {"x": HIDDEN, "positions": positions.tensor}
    tensors |= {name: bound.tensor for name, bound in bounds.items()}
    inputs = roles(made, object)
    given = [state if isinstance(role, StateInput) else tensors[role.name] for role in inputs]
    with torch.no_grad():
        pooled = fx.Interpreter(made).run(*given)[0]
    first, last = HIDDEN[0, :3], HIDDEN[0, 4]
    want = {
        "cls": (first[0], earlier),
        "mean": (first.mean(0), (earlier + HIDDEN[0, 3:].sum(0)) / 4),
        "weightedmean": (
            (first * COUNT).sum(0) / 6,
            (earlier + 3 * HIDDEN[0, 3] + 4 * last) / 10,
        ),
        "max": (first.amax(0), torch.stack((earlier, HIDDEN[0, 3], last)).amax(0)),
        "mean_sqrt_len": (first.sum(0) / 3**0.5, (earlier + HIDDEN[0, 3:].sum(0)) / 2),
    }[method]
    torch.testing.assert_close(pooled[2], want[0])
    torch.testing.assert_close(pooled[4], want[1])


def test_what_follows_the_pooling_has_the_dtype_of_the_model() -> None:
    x, positions = step(HIDDEN.bfloat16(), dynamic=1), step(torch.tensor([0, 1, 2, 2, 3]))

    def with_layers(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_reading_both(x, positions))

    graph = trace(with_layers, x=x, positions=positions)
    made, _ = apply(graph, running_pool(method="mean"))
    assert not calls(made.graph, pool_tokens.overload)
    assert val(made.graph.output_node().args[0]).dtype == torch.bfloat16


def test_the_last_token_needs_no_pooling() -> None:
    x, positions = step(HIDDEN, dynamic=1), step(torch.tensor([0, 1, 2, 2, 3]))
    made, _ = apply(trace(_reading_both, x=x, positions=positions), running_pool(method="last"))
    assert not calls(made.graph, pool_tokens.overload)
    assert not roles(made, StateInput)
