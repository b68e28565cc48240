"""join_shared_experts: a layer's shared expert is computed by the linears of its routed ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tiny_graphs import Arg, Values, apply, assert_idempotent, assert_same, ops, step, trace, weight
from torch import Tensor, fx
from torch.nn import functional as F

from llmc.kernels.act_mul import act_mul, activate
from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.expert_linear import expert_linear
from llmc.passes.inputs import Shard, WeightInput
from llmc.passes.join_shared_experts import join_shared_experts
from llmc.passes.quantize_linears import quantize_linears

GEN = torch.Generator().manual_seed(0)
TOKENS, CHOICES, WIDTH, EXPERTS, INNER = 5, 3, 64, 6, 32
CHOOSE = "llmc.choose_experts.default"


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GEN) / shape[-1] ** 0.5


def inputs(count: int = 1, gates: int = 2) -> dict[str, Arg]:
    """`up` and `down` of the experts, and those of a shared one that is `count` times as wide."""
    parts = tuple(f"shared.{name}" for name in ("gate", "up")[2 - gates :])
    made: dict[str, Arg] = {
        "x": step(rand(1, TOKENS, WIDTH), dynamic=1),
        "logits": step(rand(TOKENS, EXPERTS)),
        "slot_mapping": step(torch.tensor([3, -1, 0, 7, 2])),
        "up": weight("up", rand(EXPERTS, gates * INNER, WIDTH)),
        "down": weight("down", rand(EXPERTS, WIDTH, INNER)),
        "one_up": Arg(
            tensor=rand(gates * count * INNER, WIDTH), role=WeightInput(parts=parts)
        ),
        "one_down": weight("shared.down", rand(WIDTH, count * INNER)),
    }  # fmt: skip
    return made


def values(given: Mapping[str, Arg]) -> Values:
    """With the parts of the merged weight apart."""
    role = given["one_up"].role
    assert isinstance(role, WeightInput)
    whole = Values.of(**given)
    parts = given["one_up"].tensor.chunk(len(role.parts))
    return Values(
        step=whole.step, weights={**whole.weights, **dict(zip(role.parts, parts, strict=True))}
    )


def silu(x: Tensor) -> Tensor:
    return act_mul.overload(x, "silu")


def experts(
    x: Tensor, logits: Tensor, slots: Tensor, up: Tensor, down: Tensor, *, act: Any = silu,
    repeats: bool = True, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    rows = x.view(-1, WIDTH)
    share, index = choose_experts.overload(
        logits, slots, CHOICES, True, torch.float32, None, "sigmoid", 1, 1, 0.0, 2.5
    )
    if repeats:
        rows = rows.unsqueeze(1).expand(-1, CHOICES, -1).reshape(-1, WIDTH)
    chosen = index.reshape(-1)
    inner = act(expert_linear.overload(rows, up, None, chosen, False))
    out = expert_linear.overload(inner, down, None, chosen, False)
    return sum_experts.overload(out, share, dtype).view(x.shape)  # type: ignore[no-any-return]


def layer(act: Any = silu, *, first: bool = False, repeats: bool = True) -> Callable[..., Tensor]:
    """Padding tokens, whose results nothing reads, are left out of the comparison."""

    def run(
        x: Tensor, logits: Tensor, slot_mapping: Tensor, up: Tensor, down: Tensor, one_up: Tensor,
        one_down: Tensor,
    ) -> Tensor:  # fmt: skip
        routed = experts(x, logits, slot_mapping, up, down, act=act, repeats=repeats)
        shared = F.linear(act(F.linear(x, one_up)), one_down)
        total = shared + routed if first else routed + shared
        return total * (slot_mapping >= 0)[:, None]

    return run


def joined(gm: fx.GraphModule) -> dict[str, int]:
    """What is left of the shared expert's own ops."""
    return {n: c for n, c in ops(gm).items() if n in ("aten.linear.default", "aten.add.Tensor")}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_a_shared_expert_is_the_last_one(count: int, gates: int, first: bool) -> None:
    given = inputs(count, gates)
    act = silu if gates == 2 else lambda x: activate.overload(x, "relu2")
    gm = trace(layer(act, first=first, repeats=first), **given)
    fused, (report,) = apply(gm, join_shared_experts())
    assert joined(gm) and not joined(fused) and report.changed
    [choice] = (node for node in fused.graph.nodes if str(node.target) == CHOOSE)
    assert list(choice.meta["val"][1].shape[1:]) == [CHOICES + count]
    assert_same(fused, gm, values(given))
    assert_idempotent(gm, join_shared_experts())


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_a_quantized_one_too(format: Any) -> None:
    given = inputs()
    gm, _ = apply(trace(layer(), **given), quantize_linears(format=format))
    fused, _ = apply(gm, join_shared_experts())
    made = ops(fused)
    assert made["llmc.quantized_expert_linear.default"] == 2
    assert "llmc.quantized_linear.default" not in made and "aten.add.Tensor" not in made
    assert_same(fused, gm, values(given))


def gated(
    x: Tensor, slot_mapping: Tensor, up: Tensor, down: Tensor, one_up: Tensor, one_down: Tensor,
    router: Tensor,
) -> Tensor:  # fmt: skip
    logits, gate = F.linear(x.view(-1, WIDTH), router).split([EXPERTS, 1], -1)
    routed = experts(x, logits, slot_mapping, up, down)
    shared = gate.sigmoid() * F.linear(silu(F.linear(x[0], one_up)), one_down)
    return (routed.view(-1, WIDTH) + shared) * (slot_mapping >= 0)[:, None]


def test_a_gate_is_the_last_logit() -> None:
    given = {**inputs(), "router": weight("router", rand(EXPERTS + 1, WIDTH))}
    del given["logits"]
    gm = trace(gated, **given)
    fused, _ = apply(gm, join_shared_experts())
    made = ops(fused)
    assert made["aten.linear.default"] == 1 and "aten.sigmoid.default" not in made
    assert "aten.add.Tensor" not in made and "aten.split_with_sizes.default" not in made
    assert_same(fused, gm, values(given))
    assert_idempotent(gm, join_shared_experts())


def test_each_rank_has_its_part() -> None:
    given = inputs()
    whole = values(given)
    of_up, of_inner = ((INNER, 2), (INNER, 2)), ((INNER, 2),)
    one = Shard(dim=0, sections=of_inner, size=2)
    roles = {
        "up": WeightInput(parts=("up",), shards=(Shard(dim=1, sections=of_up, size=2),)),
        "down": WeightInput(parts=("down",), shards=(Shard(dim=2, sections=of_inner, size=2),)),
        "one_up": WeightInput(parts=("shared.gate", "shared.up"), shards=(one, one)),
        "one_down": WeightInput(
            parts=("shared.down",), shards=(Shard(dim=1, sections=of_inner, size=2),)
        ),
    }
    sizes = {
        "up": (EXPERTS, INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER // 2),
        "one_up": (INNER, WIDTH), "one_down": (WIDTH, INNER // 2),
    }  # fmt: skip
    parts = {n: Arg(tensor=torch.empty(sizes[n]), role=role) for n, role in roles.items()}
    gm = trace(layer(), **{**given, **parts})
    fused, _ = apply(gm, join_shared_experts())
    assert not joined(fused)
    for rank in (0, 1):
        assert_same(fused, gm, Values(step=whole.step, weights=whole.weights, rank=rank))


def beside(
    shared: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    read: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[..., list[Tensor]]:
    """The sum of the routed experts and of what `shared` makes of x and two weights."""

    def run(
        x: Tensor, logits: Tensor, slot_mapping: Tensor, up: Tensor, down: Tensor, one_up: Tensor,
        one_down: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        one = shared(x, one_up, one_down)
        total = experts(x, logits, slot_mapping, up, down, dtype=dtype) + one
        return [total, one[:0]] if read else [total]

    return run


def plain(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(silu(F.linear(x, up)), down)


def recipe(name: str, **changed: Any) -> dict[str, Arg]:
    given = inputs()[name]
    return {name: Arg(tensor=given.tensor, role=WeightInput(**changed))}


OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Arg]]] = {
    "a width that is no multiple": (
        layer(),
        {
            "one_up": Arg(tensor=rand(96, WIDTH), role=WeightInput(parts=("a", "b"))),
            "one_down": weight("shared.down", rand(WIDTH, 48)),
        },
    ),
    "another activation": (
        beside(lambda x, up, down: F.linear(act_mul.overload(F.linear(x, up), "gelu"), down)),
        {},
    ),
    "another input": (beside(lambda x, up, down: plain(x + 1, up, down)), {}),
    "a gate that the router does not compute": (
        beside(lambda x, up, down: plain(x, up, down) * x[..., :1].sigmoid()),
        {},
    ),
    "a bias": (beside(lambda x, up, down: F.linear(silu(F.linear(x, up)), down, up[0])), {}),
    "a sum of a wider type": (beside(plain, dtype=torch.bfloat16), {}),
    "a result that is read elsewhere": (beside(plain, read=True), {}),
    "rows in another order": (
        layer(),
        recipe("one_down", parts=("shared.down",), order=((16, 48), (0, 16))),
    ),
    "a function of the weight": (
        layer(),
        recipe("one_up", parts=("a", "b"), functions=("float32", "neg")),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_left_alone(kind: str) -> None:
    run, changed = OTHERS[kind]
    gm = trace(run, **{**inputs(), **changed})
    same, (report,) = apply(gm, join_shared_experts())
    assert not report.changed and ops(same) == ops(gm)
    others, _ = apply(trace(beside(plain), **inputs()), join_shared_experts())
    assert not joined(others), "which has none of their differences"


def test_a_quantized_one_of_two_widths_is_left_alone() -> None:
    gm, _ = apply(trace(layer(), **inputs(2)), quantize_linears(format="int8"))
    same, (report,) = apply(gm, join_shared_experts())
    assert not report.changed and ops(same) == ops(gm)
    assert report.notes == ("1 shared experts differ from the routed ones",)


def test_rests_where_it_is_unwanted() -> None:
    gm = trace(layer(), **inputs())
    same, (report,) = apply(gm, join_shared_experts(unwanted="no"))
    assert not report.changed and ops(same) == ops(gm) and report.notes == ("no",)
