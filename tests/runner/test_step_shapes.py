"""Which graph a step is padded to, and why another step has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_graphs import FakeGraphs

from llmc.compiler.lower import StepFunction
from llmc.engine.plan import RowWork, StepPlan
from llmc.runner.buckets import Buckets
from llmc.runner.graphs import StepGraphs, StepShape
from llmc.runner.step_shapes import StepShapes


def step(min_size: int = 1) -> StepFunction:
    return StepFunction(call=lambda **_: None, inputs=(), source="", min_size=min_size)


def work(*requests: tuple[int, int], sample: bool = True) -> StepPlan:
    """A step of requests given as (tokens before it, new tokens); the last one draws a token."""
    last = len(requests) - 1
    return StepPlan(
        step=0,
        work=[
            RowWork(row=row, start=start, num_tokens=count, sample=sample or row != last)
            for row, (start, count) in enumerate(requests)
        ],
    )


def shapes(**options: Any) -> tuple[StepShapes, StepGraphs]:
    graphs = StepGraphs(FakeGraphs())
    buffers: Any = SimpleNamespace(max_requests=18, max_tokens=4096)
    made = StepShapes(
        Buckets((1, 2, 4, 8, 16)),
        buffers,
        graphs,
        **{"expanded_from": None, "max_model_len": 16384, **options},
    )
    return made, graphs


@pytest.mark.parametrize(
    ("plan", "min_size", "want"),
    [
        (work((0, 512)), 1, (512, 1, 1)),  # exactly a graph's size: no dummy
        (work((0, 2048)), 1, (2048, 1, 1)),
        (work((9, 1), (0, 511)), 1, (512, 2, 2)),
        (work((9, 1), (8, 1), (0, 510)), 1, (576, 4, 4)),  # a dummy, because three fits no bucket
        (work((0, 512)), 2, (576, 2, 2)),  # Inductor's step takes two rows at least
        (work((0, 512), sample=False), 1, (576, 2, 2)),  # nor a step without samples
        (work((0, 511)), 1, (512, 2, 2)),
        (work((0, 1025)), 1, (1152, 2, 2)),
    ],
)
def test_a_step_gets_dummies_only_for_missing_tokens_rows_and_samples(
    plan: StepPlan, min_size: int, want: tuple[int, int, int]
) -> None:
    made, graphs = shapes()
    function = step(min_size)
    for _ in range(2):
        made.choose(plan, function)
    assert graphs.next_shape(function, ()) == StepShape(*want)


@pytest.mark.parametrize(
    ("expanded_from", "request_", "reason"),
    [
        (128, (0, 1023), "not_captured"),
        (128, (0, 1024), "long_prompts"),
        (128, (7900, 130), "not_captured"),  # under 1024 * 1024 pairs
        (128, (7900, 131), "long_prompts"),
        (128, (9000, 127), "not_captured"),  # too few tokens to expand the latents for
        (None, (0, 1024), "not_captured"),
    ],
)
def test_long_prompts_leave_graphs_where_latents_are_expanded(
    expanded_from: int | None, request_: tuple[int, int], reason: str
) -> None:
    made, _ = shapes(expanded_from=expanded_from)
    assert made.choose(work(request_), step())[1] == reason


def test_larger_steps_have_no_graph() -> None:
    made, graphs = shapes()
    function = step()
    for _ in range(3):
        assert made.choose(work((9, 1), (8, 1), (0, 2046)), function)[1] == "too_large"
    assert graphs.next_shape(function, ()) is None
