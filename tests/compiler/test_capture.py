"""build and capture: one labelled graph for every number of tokens, or a clear error."""

from __future__ import annotations

import linecache
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_graphs import Values, run, step
from tiny_models import make_config, prompts, reference_logits
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from llmc.compiler.attention_fallback import build_model, capture_model
from llmc.compiler.build import build
from llmc.compiler.capture import capture
from llmc.errors import CheckpointError, CompileError
from llmc.passes.inputs import CacheInput, StepInput, WeightInput, input_of
from llmc.pooling import LM

CPU = torch.device("cpu")


def test_one_graph_for_every_number_of_tokens(dense: Any) -> None:
    """The captured graph itself, before any pass, gives the model's logits for T = 1 and others."""
    graph = dense.captured
    weights = {n: p.detach() for n, p in dense.reference.state_dict().items()}
    for count in (1, 2, 3, 19, 47):
        tokens = list(prompts((count,))[0])
        values = Values.of(
            token_ids=step(torch.tensor(tokens)), positions=step(torch.arange(count))
        )
        logits = run(graph, Values(step=values.step, weights=weights))
        assert logits.shape == (1, count, dense.program.vocab_size)
        want = reference_logits(dense.reference, tokens)
        torch.testing.assert_close(logits[0], want, rtol=1e-4, atol=1e-4)


def test_the_number_of_tokens_stays_symbolic(dense: Any) -> None:
    for graph in (dense.captured, dense.program.graph):
        tokens = next(n for n in graph.graph.nodes if input_of(n) == StepInput(name="token_ids"))
        (size,) = tokens.meta["val"].shape
        assert isinstance(size, torch.SymInt)
        constants = {
            arg
            for n in graph.graph.nodes
            for arg in (*n.args, *(a for a in n.args if isinstance(a, list | tuple) for a in a))
            if isinstance(arg, int)
        }
        assert 19 not in constants, "the example's number of tokens was baked into the graph"


def test_every_placeholder_has_a_role(dense: Any) -> None:
    for graph in (dense.captured, dense.program.graph):
        found = [input_of(n) for n in graph.graph.nodes if n.op == "placeholder"]
        assert None not in found
        caches = [role for role in found if isinstance(role, CacheInput)]
        assert {(c.layer, c.part) for c in caches} == {
            (layer, part) for layer in (0, 1) for part in ("key", "value")
        }


def test_weights_are_inputs_and_not_constants(dense: Any) -> None:
    """One graph must serve every fine-tune of an architecture."""
    parts = {
        part
        for n in dense.captured.graph.nodes
        if isinstance(role := input_of(n), WeightInput)
        for part in role.parts
    }
    assert parts == set(dense.reference.state_dict())


def test_identical_layers_give_identical_subgraphs(dense: Any) -> None:
    """A cache reaches its layer as a tensor, never as a layer number."""
    nodes = [n for n in dense.captured.graph.nodes if n.op == "call_function"]
    marks = [i for i, n in enumerate(nodes) if "llmc.attention" in str(n.target)]
    assert len(marks) == 2
    first, second = (nodes[i] for i in marks)
    assert first.args[5:] == second.args[5:]
    around = [[str(n.target) for n in nodes[i - 8 : i + 8]] for i in marks]
    assert around[0] == around[1]


# What can't be captured


class OddConfig(tf.PretrainedConfig):
    model_type = "llmc-test-odd"


class OddModel(tf.PreTrainedModel):
    """A model whose forward is whatever the test sets."""

    config_class = OddConfig
    body: Callable[[Any, Tensor, Tensor], Tensor]

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        x = type(self).body(self, self.embed(input_ids), position_ids)
        return CausalLMOutput(logits=self.head(x))


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    tf.AutoConfig.register(OddConfig.model_type, OddConfig, exist_ok=True)
    tf.AutoModelForCausalLM.register(OddConfig, OddModel, exist_ok=True)


def breaks(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # here
    return x


def branches(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x * 2
    return x


def reads_a_value(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    scale = float(x.sum().item())  # here
    return x * scale


@pytest.mark.parametrize("body", [breaks, branches, reads_a_value])
def test_a_graph_break_names_the_file_and_line(
    body: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OddModel, "body", body, raising=False)
    with pytest.raises(CompileError) as caught:
        capture(build(OddConfig(), torch.float32), CPU)
    first = body.__code__.co_firstlineno
    line = next(i for i in range(first, first + 6) if "# here" in linecache.getline(__file__, i))
    message = str(caught.value)
    assert message.startswith("OddModel can't be captured in one graph at ")
    assert f"{__file__}:{line}" in message
    assert "\n" not in message and len(message) < 800


def asks_for_the_length(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 100 else x


def loops_over_blocks(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    for _ in range((x.shape[1] + 7) // 8):
        x = x + 1
    return x


def asks_in_vain(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    unused = x * 2 if x.shape[1] > 100 else x * 3  # noqa: F841
    return x + 1


@pytest.mark.parametrize("body", [asks_for_the_length, loops_over_blocks])
def test_a_model_that_computes_other_lengths_in_other_ways_is_refused(
    body: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards are not kept: one answer would stay in the graph without a word."""
    monkeypatch.setattr(OddModel, "body", body, raising=False)
    with pytest.raises(CompileError, match=r"computes \d+ tokens differently from 19"):
        capture(build(OddConfig(), torch.float32), CPU)


def asks_for_a_great_length(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 8192 else x


@pytest.mark.parametrize("context", [9000, 32768])
def test_lengths_up_to_the_context_are_tried(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OddModel, "body", asks_for_a_great_length, raising=False)
    config = OddConfig(max_position_embeddings=context)
    with pytest.raises(CompileError, match="tokens differently from 19"):
        capture(build(config, torch.float32), CPU)


def test_a_branch_that_makes_no_difference_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OddModel, "body", asks_in_vain, raising=False)
    assert capture(build(OddConfig(), torch.float32), CPU).vocab_size == 12


def takes_a_list(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return x[..., [7, 6, 5, 4, -5, 2, 1, 0]]


def writes_to_a_list(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    x[..., [2, 4]] = 0.5
    x[:, :, [3]] = -1.0
    return x


def names_no_device(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    x = x.masked_fill(torch.arange(8) > 5, -1.0) + torch.zeros(8)
    return x * torch.tensor([1.0, 2.0]).repeat(4) + torch.ones(8).cumsum(0) * positions[..., None]


@pytest.mark.parametrize("body", [takes_a_list, writes_to_a_list, names_no_device])
def test_tensors_that_the_code_makes_keep_their_numbers(
    body: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no data on meta, where torch makes a tensor of a list of indices; and on the CPU,
    where it makes those without a device, they don't fit the model's."""
    monkeypatch.setattr(OddModel, "body", body, raising=False)
    torch.manual_seed(0)
    model = OddModel(OddConfig())
    graph = capture(build(OddConfig(), torch.float32), CPU).graph
    ids = torch.tensor([3, 1, 11, 0])
    values = Values.of(token_ids=step(ids), positions=step(torch.arange(4)))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    logits = run(graph, Values(step=values.step, weights=weights))
    with torch.no_grad():
        want = model(ids[None], torch.arange(4)[None]).logits
    torch.testing.assert_close(logits, want)


def test_no_capture_state_is_left_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OddModel, "body", breaks, raising=False)
    with pytest.raises(CompileError):
        capture(build(OddConfig(), torch.float32), CPU)
    monkeypatch.setattr(OddModel, "body", lambda self, x, p: x + p[..., None], raising=False)
    captured = capture(build(OddConfig(), torch.float32), CPU)
    assert captured.vocab_size == 12


def test_a_config_of_no_causal_language_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="can't build a causal language model"):
        build(tf.ViTConfig(), torch.float32)


def test_a_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(CheckpointError, match="can't build a causal language model"):
        build(make_config("gpt2", n_head=5), torch.float32)


# Raised by torch itself for a function in transformers' code of this model.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_failed_attempt_logs_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Bloom's own code computes its attention, so the attempt without it fails first."""
    torch.manual_seed(0)
    config = tf.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64)
    built = build_model(config, torch.float32, LM, 64)
    capture_model(built, CPU)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
