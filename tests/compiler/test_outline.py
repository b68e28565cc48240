"""outline: a graph made from a model's first layers is the captured one, node by node, or none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
import transformers as tf
from tiers import tiered
from tiny_models import FAMILIES, make_config, prompts, save_checkpoint
from torch import Tensor, fx, nn
from transformers.modeling_outputs import CausalLMOutput

from llmc.compiler.build import BuiltModel, build
from llmc.compiler.capture import CapturedModel, capture
from llmc.compiler.layer_dedup import outline
from llmc.compiler.layer_dedup.outline import capture_outlined
from llmc.errors import CompileError
from llmc.passes.base import histogram
from llmc.passes.inputs import ConstantInput, input_of
from llmc.weights.parameters import Parameters

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def both(config: Any) -> tuple[CapturedModel, CapturedModel]:
    """Captured in full, and outlined; each from a build of its own."""
    return (
        capture(build(config, torch.float32), CPU),
        capture_outlined(build(config, torch.float32), CPU),
    )


def described(val: Any) -> str:
    """Symbols are numbered by the process."""
    facts = (val.shape, val.stride(), val.dtype, val.device) if isinstance(val, Tensor) else val
    return re.sub(r"\bs\d+\b", "s", str(facts))


def assert_same(want: fx.GraphModule, have: fx.GraphModule) -> None:
    """The same nodes in the same order, names left aside."""
    pairs: dict[fx.Node, fx.Node] = {}
    assert len(want.graph.nodes) == len(have.graph.nodes)
    for a, b in zip(want.graph.nodes, have.graph.nodes, strict=True):
        pairs[a] = b
        role = input_of(a)
        if isinstance(role, ConstantInput):
            other = input_of(b)
            assert isinstance(other, ConstantInput) and torch.equal(role.tensor, other.tensor)
        elif a.op == "placeholder":
            assert role == input_of(b)
        else:
            assert (a.op, a.target) == (b.op, b.target)
            args = fx.node.map_arg((a.args, a.kwargs), lambda n: pairs[n])
            assert repr(args) == repr((b.args, b.kwargs))
        assert described(a.meta.get("val")) == described(b.meta.get("val"))


# Models of transformers


@pytest.mark.parametrize(
    ("family", "captured"),
    tiered(
        [
            ("qwen3", 2),
            ("gpt_oss", 3),  # windows in turn, sinks, routed experts
            ("dense_first", 3),
        ],
        ("qwen3", 2),
    ),
)
def test_the_graph_is_the_captured_one(
    family: str, captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "dense_first", dense_first)
    full, outlined = both(make_config(family, num_hidden_layers=6))
    assert outlined.note == f"{captured} captured"
    assert outlined.vocab_size == full.vocab_size
    assert_same(full.graph, outlined.graph)


def dense_first(**changes: Any) -> Any:
    """A dense layer, then routed ones."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return tf.Glm4MoeConfig(**(sizes | changes))


def test_the_text_is_the_same(tmp_path: Path) -> None:
    path = save_checkpoint("qwen2", tmp_path, num_hidden_layers=6)
    texts = []
    for on in (True, False):
        running = tiny_engine.start(path, passes={"outline_layers": on})
        detail = {p.name: p.detail for p in running.started.phases}["compile"]
        assert ("6 layers, 2 captured" in detail) is on
        texts.append(tiny_engine.generate(running.engine(), prompts((5, 17)), 12))
    assert texts[0] == texts[1]


# Models made to trip it


class StackConfig(tf.PretrainedConfig):
    model_type = "llmc-test-stack"


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.scale = 1.0
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.scale) * factor


class AsksItsNumber(Layer):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(x) if self.number != 4 else x + self.down(self.up(x))


class Stack(tf.PreTrainedModel):
    """Six layers; a test changes what it is about."""

    config_class = StackConfig
    make_layer: Callable[[int], nn.Module] = Layer
    finish: Callable[[Any], None] = staticmethod(lambda model: None)
    body: Callable[[Any, Tensor], Tensor]

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(type(self).make_layer(i) for i in range(6))
        self.head = nn.Linear(8, 12, bias=False)
        type(self).finish(self)
        self.post_init()

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(type(self).body(self, self.embed(input_ids))))


def one_by_one(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


@pytest.fixture(autouse=True)
def _stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tf.AutoConfig.register(StackConfig.model_type, StackConfig, exist_ok=True)
    tf.AutoModelForCausalLM.register(StackConfig, Stack, exist_ok=True)
    monkeypatch.setattr(Stack, "body", one_by_one, raising=False)
    yield


def change_stack(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    for name, value in parts.items():
        monkeypatch.setattr(Stack, name, value if name == "body" else staticmethod(value))


def note_of_stack(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> str:
    """Nothing of a capture of all layers but that it is asked for, and once."""
    whole: list[BuiltModel] = []

    def capture_parts(built: Any, device: torch.device) -> CapturedModel:
        if len(built.module.layers) < 6:
            return capture(built, device)
        whole.append(built)
        return CapturedModel(
            graph=fx.GraphModule(nn.Module(), fx.Graph()),
            parameters=Parameters(shapes={}, aliases={}, is_plain=True),
            vocab_size=12,
            dtype=built.dtype,
            device=device,
        )

    change_stack(monkeypatch, **parts)
    monkeypatch.setattr(outline, "capture", capture_parts)
    note = capture_outlined(build(StackConfig(), torch.float32), CPU).note
    assert len(whole) == 1
    return note


def takes_turns(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, factor=0.5 if i % 2 else 2.0)
    return x


@pytest.mark.parametrize(("body", "captured"), [(one_by_one, 2), (takes_turns, 3)])
def test_numbers_and_arguments_of_layers_are_followed(
    body: Callable[[Any, Tensor], Tensor], captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_stack(monkeypatch, body=body)
    full, outlined = both(StackConfig())
    assert outlined.note == f"{captured} captured"
    assert_same(full.graph, outlined.graph)


class SumsFirstTokens(Layer):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(x) + x[:, : min(x.shape[1], 64)].sum(1, keepdim=True)


def test_a_size_that_all_layers_read_comes_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    change_stack(monkeypatch, make_layer=SumsFirstTokens)
    full, outlined = both(StackConfig())
    assert outlined.note == "2 captured"
    assert "sym_min" in str(histogram(full.graph))
    assert histogram(full.graph) == histogram(outlined.graph)


def test_a_weight_that_all_layers_share_belongs_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(model: Any) -> None:
        for layer in model.layers:
            layer.up.weight = model.layers[0].up.weight

    assert note_of_stack(monkeypatch, finish=finish).startswith("all captured: ")


def scaled_by_number(number: int) -> nn.Module:
    layer = Layer(number)
    layer.scale = 0.5**number
    return layer


def one_scaled(number: int) -> nn.Module:
    layer = Layer(number)
    layer.scale = 0.5 if number == 4 else 1.0
    return layer


def one_wider(number: int) -> nn.Module:
    layer = Layer(number)
    if number == 4:
        layer.up, layer.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8)
    return layer


@pytest.mark.parametrize(
    ("make_layer", "reason"),
    [
        (scaled_by_number, "4 of them differ"),
        (AsksItsNumber, "4 of them differ"),
        (one_scaled, "the first 6 are needed"),
        (one_wider, "the first 6 are needed"),
    ],
)
def test_layers_that_differ_are_all_captured(
    make_layer: Callable[[int], nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in note_of_stack(monkeypatch, make_layer=make_layer)


def between(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x) * 2 if i == 3 else layer(x)
    return x


def last_is_special(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, factor=3.0) if i == 5 else layer(x)
    return x


def divides_by_depth(model: Any, x: Tensor) -> Tensor:
    return one_by_one(model, x) / len(model.layers)


def scales_by_depth(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x, factor=1.0 / len(model.layers))
    return x


def reads_the_first(model: Any, x: Tensor) -> Tensor:
    first = model.layers[0](x)
    x = first
    for layer in model.layers[1:]:
        x = layer(x)
    return x + first


def reads_a_late_one(model: Any, x: Tensor) -> Tensor:
    seen = []
    for layer in model.layers:
        seen.append(layer(seen[-1] if seen else x))
    return seen[-1] + (seen[3] if len(seen) > 3 else seen[-1])


def twice(model: Any, x: Tensor) -> Tensor:
    return one_by_one(model, one_by_one(model, x))


def counts_on_six(model: Any, x: Tensor) -> Tensor:
    for i in range(6):
        x = model.layers[i](x)
    return x


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (between, "between layers 3 and 4 the model calls aten.mul"),
        (last_is_special, "the first 6 are needed"),
        (divides_by_depth, "the model does something different around them"),
        (scales_by_depth, "their arguments differ"),
        (reads_the_first, "of layer 0 is"),
        (reads_a_late_one, "the model does something different around them"),
        (twice, "not called once each"),
        (counts_on_six, "tracing it raised IndexError"),
    ],
)
def test_what_depends_on_a_layers_place_is_captured_in_full(
    body: Callable[[Any, Tensor], Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = note_of_stack(monkeypatch, body=body)
    assert note.startswith("all captured: ") and reason in note


class Passes(Layer):
    """Hands something on beside its result, through an object that all layers know."""

    def __init__(self, number: int, shared: Any) -> None:
        super().__init__(number)
        self.shared = shared

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        inner = torch.relu(self.up(x))
        out = x + self.down(inner if self.shared["last"] is None else inner + self.shared["last"])
        self.shared["last"] = inner
        return out


def test_what_layers_hand_on_in_secret_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: dict[str, Any] = {"last": None}

    def body(model: Any, x: Tensor) -> Tensor:
        x = one_by_one(model, x)
        shared["last"] = None
        return x

    note = note_of_stack(monkeypatch, body=body, make_layer=lambda i: Passes(i, shared))
    assert note.startswith("all captured: ")


def test_what_can_not_be_captured_is_refused_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(model: Any, x: Tensor) -> Tensor:
        return one_by_one(model, x) * float(x.sum().item())

    monkeypatch.setattr(Stack, "body", body)
    with pytest.raises(CompileError) as want:
        capture(build(StackConfig(), torch.float32), CPU)
    with pytest.raises(CompileError) as have:
        capture_outlined(build(StackConfig(), torch.float32), CPU)
    assert str(have.value) == str(want.value)
