"""Recipes over checkpoint tensors: merged, turned, converted, tied, random; or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_config, save_checkpoint
from torch import Tensor, nn

from llmc.compiler.attention_fallback import capture_model
from llmc.compiler.build import build
from llmc.compiler.program import load_weights, rewrite
from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.passes.inputs import WeightInput
from llmc.startup.compile import build_as_stored, rewrite_options
from llmc.startup.resolve import resolve
from llmc.weights.checkpoint import open_checkpoint
from llmc.weights.load import CheckpointWeights, DummyWeights, make_weight

CPU = torch.device("cpu")


class Plain:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def fill(self, name: str, out: Tensor) -> None:
        out.copy_(self.tensors[name])


A, B = torch.randn(6, 8).bfloat16(), torch.randn(4, 8).bfloat16()
SOURCE = Plain({"a": A, "b": B, "bias": torch.arange(3.0), "one": torch.tensor(5.0)})
SHAPES = {name: tuple(t.shape) for name, t in SOURCE.tensors.items()}


def make(*parts: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Tensor:
    return make_weight(WeightInput(parts=parts, **options), SHAPES, dtype, SOURCE, CPU)


def test_one_part_and_several() -> None:
    assert torch.equal(make("a"), A)
    assert torch.equal(make("a", "b"), torch.cat((A, B)))
    assert torch.equal(make("bias", dtype=torch.float32), torch.arange(3.0))
    assert torch.equal(make("bias", "bias", dtype=torch.float32), torch.arange(3.0).repeat(2))
    assert torch.equal(make("one", dtype=torch.float32), torch.tensor(5.0))


def test_a_part_is_cast_to_the_dtype_of_the_graph() -> None:
    assert torch.equal(make("a", dtype=torch.float32), A.float())


def test_transposed_parts() -> None:
    assert torch.equal(make("a", transposed=True), A.T)
    shapes = {"a": (6, 8), "c": (6, 2)}
    source = Plain({"a": A, "c": B.view(-1)[:12].view(6, 2)})
    role = WeightInput(parts=("a", "c"), transposed=True)
    got = make_weight(role, shapes, torch.bfloat16, source, CPU)
    assert torch.equal(got, torch.cat((A.T, source.tensors["c"].T)))
    assert got.is_contiguous()


# A whole program


def module_of(family: str, **changes: Any) -> nn.Module:
    return build(make_config(family, **changes), torch.float32).module


def load(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Every parameter of the module by name."""
    source = CheckpointWeights(module, open_checkpoint(path))
    state = module.state_dict()
    source.check(state)
    out = {}
    for name, meta in state.items():
        out[name] = torch.full(meta.shape, float("nan"), dtype=meta.dtype)
        source.fill(name, out[name])
    return out


def test_a_program_gets_every_weight_in_its_final_form(dense: Any) -> None:
    program = dense.program
    module = build(make_config("qwen3"), torch.float32).module
    source = CheckpointWeights(module, open_checkpoint(dense.path))
    weights = load_weights(program, source)
    plain = dense.reference.state_dict()
    merged = 0
    for node, role in program.weight_inputs():
        want = (
            torch.cat([plain[p] for p in role.parts])
            if len(role.parts) > 1
            else (plain[role.parts[0]])
        )
        assert torch.equal(weights[node.name], want), role
        merged += len(role.parts) > 1
    assert merged == 4, "two layers with q, k, v and gate, up"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "phi3", "gpt2", "gpt_neox"])
def test_stored_names_and_layouts_are_converted(family: str, tmp_path: Path) -> None:
    """Mixtral stores its experts one by one; transformers stacks them: both must agree."""
    from tiny_models import load_reference

    save_checkpoint(family, tmp_path)
    want = load_reference(tmp_path).state_dict()
    got = load(module_of(family), tmp_path)
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_experts_are_stored_one_by_one_in_the_file(tmp_path: Path) -> None:
    """What the test above relies on: a conversion did happen."""
    save_checkpoint("mixtral", tmp_path)
    stored, params = set(open_checkpoint(tmp_path)), set(module_of("mixtral").state_dict())
    assert any(".experts.3." in name for name in stored)
    assert not any(".experts.3." in name for name in params)


def edit(path: Path, change: Any) -> Path:
    """Save a tiny checkpoint with one thing changed about its tensors."""
    save_checkpoint("llama", path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return path


KEY = "model.layers.1.self_attn.k_proj.weight"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    edit(tmp_path, lambda t: t.pop(KEY))
    with pytest.raises(CheckpointError, match=f"does not fit its config.json: {KEY} is missing"):
        load(module_of("llama"), tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    edit(tmp_path, lambda t: [t.pop(n) for n in list(t) if "layers.0" in n])
    with pytest.raises(CheckpointError, match=r"\(and 4 more\)"):
        load(module_of("llama"), tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    edit(tmp_path, lambda t: t.update({KEY: torch.zeros(8, 32)}))
    with pytest.raises(CheckpointError) as caught:
        load(module_of("llama"), tmp_path)
    assert f"{KEY} has shape [8, 32], config.json asks for [16, 32]" in str(caught.value)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    save_checkpoint("mixtral", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(n for n in tensors if ".experts.3." in n)
    del tensors[gone]
    save_file(tensors, file)
    with pytest.raises(CheckpointError):
        load(module_of("mixtral"), tmp_path)


def test_tensors_without_a_place_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(tmp_path, lambda t: t.update({"stray.weight": torch.zeros(2)}))
    load(module_of("llama"), tmp_path)
    assert "1 tensors of the checkpoint have no place in the model: stray.weight" in caplog.text


def test_tied_embeddings_are_read_once_and_counted_once(tmp_path: Path) -> None:
    import tiny_engine

    path = save_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(path)
    stored = sum(t.num_bytes for t in open_checkpoint(path).values())
    running = tiny_engine.start(path)
    assert running.started.info.weight_bytes == stored


def test_a_tied_model_loads_from_a_file_that_has_the_other_name(tmp_path: Path) -> None:
    """Some checkpoints keep the head and leave the embedding out."""
    path = save_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file)
    got = load(module_of("llama", tie_word_embeddings=True), path)
    assert torch.equal(got["model.embed_tokens.weight"], tensors["lm_head.weight"])


# Random weights


def draw(name: str, *shape: int, seed: int = 0) -> Tensor:
    out = torch.empty(shape)
    DummyWeights(seed).fill(name, out)
    return out


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    assert torch.equal(draw("a.weight", 64, 64), draw("a.weight", 64, 64))
    assert not torch.equal(draw("a.weight", 64, 64), draw("b.weight", 64, 64))
    assert not torch.equal(draw("a.weight", 64, 64), draw("a.weight", 64, 64, seed=1))
    spread = draw("a.weight", 256, 256)
    assert abs(float(spread.std()) - 0.02) < 1e-3 and abs(float(spread.mean())) < 1e-3
    assert torch.equal(draw("norm.weight", 8), torch.ones(8))
    large = draw("a.weight", 600, 1000)
    assert abs(float(large.std()) - 0.02) < 1e-3 and len(large.unique(dim=0)) == 600
    assert torch.equal(draw("q.bias", 8), torch.zeros(8))


def test_a_merged_dummy_weight_equals_its_parts(dense: Any) -> None:
    """So that switching a pass off does not change the model that a benchmark runs."""
    weights = load_weights(dense.program, DummyWeights(3))
    for node, role in dense.program.weight_inputs():
        rows = [tuple(dense.reference.state_dict()[p].shape) for p in role.parts]
        want = torch.cat([draw(p, *s, seed=3) for p, s in zip(role.parts, rows, strict=True)])
        assert torch.equal(weights[node.name], want), role


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_that_is_stored_though_embeddings_are_tied(tmp_path: Path, differs: bool) -> None:
    """As transformers does it: another head than the embeddings is a weight of its own."""
    save_checkpoint("llama", tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differs)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = resolve(EngineConfig(model=str(tmp_path), device="cpu"), CPU)
    built = build_as_stored(source)
    program = rewrite(capture_model(built, CPU), rewrite_options(source))
    parts = {part for _, role in program.weight_inputs() for part in role.parts}
    assert ({"lm_head.weight", "model.embed_tokens.weight"} <= parts) == differs
    assert bool(program.parameters.aliases) != differs
