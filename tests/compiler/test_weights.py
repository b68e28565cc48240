"""Recipes over checkpoint tensors: merged, turned, converted, tied, random; or refused."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_config, save_checkpoint
from torch import Tensor, nn

from llmc.compiler.build import build
from llmc.compiler.cache import ProgramCache
from llmc.compiler.program import load_weights
from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.kernels.cpu.pages import HugePages
from llmc.kernels.quantized_linear import quantization_of
from llmc.passes.inputs import QuantizedPart, Shard, WeightInput
from llmc.startup.compile import compile_model, keep
from llmc.startup.resolve import resolve
from llmc.weights import checkpoint
from llmc.weights import load as load_module
from llmc.weights.checkpoint import SomeOf, StoredTensor, open_checkpoint
from llmc.weights.load import (
    CheckpointWeights,
    DirectWeights,
    DummyWeights,
    make_weight,
    make_weights,
)

MEMORY = HugePages(torch.device("cpu"))


class Plain:
    def __init__(self, tensors: Mapping[str, Tensor], *, by_rows: bool = False) -> None:
        self.tensors = tensors
        self.by_rows = by_rows
        self.filled: list[tuple[int, ...]] = []

    def reads_rows(self, name: str) -> bool:
        return self.by_rows

    def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
        self.filled.append(tuple(out.shape))
        whole = self.tensors[name]
        out.copy_(whole if part is None else part.of(whole))


A, B = torch.randn(6, 8).bfloat16(), torch.randn(4, 8).bfloat16()
SOURCE = Plain({"a": A, "b": B, "bias": torch.arange(3.0), "one": torch.tensor(5.0)})
SHAPES = {name: tuple(t.shape) for name, t in SOURCE.tensors.items()}


def make(*parts: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Tensor:
    return make_weight(WeightInput(parts=parts, **options), SHAPES, dtype, SOURCE, MEMORY)


def test_one_part_and_several() -> None:
    assert torch.equal(make("a"), A)
    assert torch.equal(make("a", "b"), torch.cat((A, B)))
    assert torch.equal(make("bias", dtype=torch.float32), torch.arange(3.0))
    assert torch.equal(make("bias", "bias", dtype=torch.float32), torch.arange(3.0).repeat(2))
    assert torch.equal(make("one", dtype=torch.float32), torch.tensor(5.0))


def test_a_part_is_cast_to_the_dtype_of_the_graph() -> None:
    assert torch.equal(make("a", dtype=torch.float32), A.float())


def test_rows_in_another_order() -> None:
    got = make("a", "b", order=((7, 2), (0, 1), (3, 3)))
    assert torch.equal(got, torch.cat((A, B))[[7, 8, 0, 3, 4, 5]])
    rows = shard(0, (6, 2))
    role = WeightInput(parts=("a",), shards=(rows,), order=((1, 2), (0, 1)))
    assert torch.equal(
        make_weight(role, SHAPES, torch.bfloat16, SOURCE, MEMORY, rank=1), A[[4, 5, 3]]
    )


def test_functions_of_a_part() -> None:
    """The first is the dtype in which the part is loaded: its rounding stays."""
    got = make("bias", dtype=torch.float32, functions=("float32", "exp", "neg"))
    assert torch.equal(got, -torch.arange(3.0).exp())
    source = Plain({"a": torch.full((3,), 1.001)})
    role = WeightInput(parts=("a",), functions=("bfloat16", "float32", "exp"))
    rounded = make_weight(role, {"a": (3,)}, torch.float32, source, MEMORY)
    assert torch.equal(rounded, torch.ones(3).exp())


def test_transposed_parts() -> None:
    assert torch.equal(make("a", transposed=True), A.T)
    shapes = {"a": (6, 8), "c": (6, 2)}
    source = Plain({"a": A, "c": B.view(-1)[:12].view(6, 2)})
    role = WeightInput(parts=("a", "c"), transposed=True)
    got = make_weight(role, shapes, torch.bfloat16, source, MEMORY)
    assert torch.equal(got, torch.cat((A.T, source.tensors["c"].T)))
    assert got.is_contiguous()


def shard(dim: int, *sections: tuple[int, int], size: int = 2) -> Shard:
    return Shard(dim=dim, sections=sections, size=size)


def test_shards_of_parts() -> None:
    def of(rank: int, *parts: str, shards: tuple[Shard | None, ...], **options: Any) -> Tensor:
        role = WeightInput(parts=parts, shards=shards, **options)
        return make_weight(role, SHAPES, torch.bfloat16, SOURCE, MEMORY, rank=rank)

    rows, columns = shard(0, (6, 2)), shard(1, (8, 4), size=4)
    assert torch.equal(of(1, "a", shards=(rows,)), A[3:])
    assert torch.equal(of(2, "a", shards=(columns,)), A[:, 4:6])
    assert torch.equal(of(1, "a", "b", shards=(rows, None)), torch.cat((A[3:], B)))
    assert torch.equal(of(1, "a", transposed=True, shards=(shard(0, (8, 2)),)), A.T[4:])
    assert torch.equal(of(0, "a", transposed=True, shards=(shard(1, (6, 3), size=3),)), A.T[:, :2])
    fused = shard(0, (4, 4), (1, 1), (1, 1), size=4)  # four query heads over one of key and value
    assert torch.equal(of(2, "a", shards=(fused,)), A[[2, 4, 5]])
    doubled = shard(0, (4, 2), size=4)  # two heads over four ranks
    assert [of(r, "b", shards=(doubled,)).tolist() for r in range(4)] == [
        half.tolist() for half in (B[:2], B[:2], B[2:], B[2:])
    ]


def test_a_stack_goes_on_with_rows_of_other_parts() -> None:
    """Of one more expert, or, by fixed parts of the same tensors, of two."""
    stack, gate, up = torch.randn(3, 4, 8), torch.randn(2, 8), torch.randn(2, 8)
    source = Plain({"stack": stack, "gate": gate, "up": up})
    shapes = {name: tuple(t.shape) for name, t in source.tensors.items()}

    def of(*parts: str, **options: Any) -> Tensor:
        role = WeightInput(parts=("stack", *parts), **options)
        return make_weight(role, shapes, torch.float32, source, MEMORY, rank=1)

    assert torch.equal(of("gate", "up"), torch.cat((stack, torch.cat((gate, up))[None])))
    own, halves = shard(1, (4, 2)), shard(0, (2, 2))
    narrow = torch.cat((gate[1:], up[1:]))[None]
    assert torch.equal(
        of("gate", "up", shards=(own, halves, halves)), torch.cat((stack[:, 2:], narrow))
    )
    twice = [dataclasses.replace(halves, rank=rank) for rank in (0, 1)]
    parts = [part for part in ("gate", "up") for _ in twice]
    made = of(*parts, shards=(own, *twice, *twice))
    assert torch.equal(made[3:], torch.stack((gate, up)))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_shard_is_read_some_rows_at_a_time(
    dim: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(12, 8, 10).bfloat16()
    save_file({"other": torch.ones(3), "w": whole}, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)["w"]
    row = stored.num_bytes // 12
    monkeypatch.setattr(checkpoint, "_READ_AT_ONCE", 5 * row)
    read: list[int] = []
    read_whole = StoredTensor.read

    def spy(self: StoredTensor, out: Tensor | None = None) -> Tensor:
        read.append(self.num_bytes)
        return read_whole(self, out)

    monkeypatch.setattr(StoredTensor, "read", spy)
    size = whole.shape[dim]
    part = SomeOf(shape=stored.shape, dim=dim, ranges=((1, 2), (size - 3, 3)))
    want = torch.cat((whole.narrow(dim, 1, 2), whole.narrow(dim, size - 3, 3)), dim)
    out = torch.empty(want.shape, dtype=dtype)
    part.read(stored, out)
    assert torch.equal(out, want.to(dtype))
    assert max(read) <= 5 * row


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


IN_TWO = {
    "whole": (),
    "part of the rows": (Shard(dim=0, sections=((96, 2), (64, 2), (32, 1)), size=2),),
    "part of the inputs": (Shard(dim=1, sections=((64, 2),), size=2),),
}


@pytest.mark.parametrize("kind", IN_TWO)
@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_some_rows_at_a_time_are_quantized_as_the_whole_is(
    format: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "_rows_at_once", lambda depth: 32)
    tensors = {"a": torch.randn(192, 64), "b": torch.randn(3, 32, 64)}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    for part, rank in (("a", 0), ("a", 1), ("b", 0)):
        shards = IN_TWO[kind] if part == "a" else ()
        held = shapes[part][-1] // (2 if kind == "part of the inputs" and part == "a" else 1)
        to = quantization_of(format, 64, held)
        assert to is not None
        kept = QuantizedPart(to=to, part="weight")
        role = WeightInput(parts=(part,), shards=shards, quantized=kept)
        one, two = (Plain(tensors, by_rows=by_rows) for by_rows in (False, True))
        whole, pieces = (
            make_weights(role, shapes, torch.float32, source, MEMORY, rank) for source in (one, two)
        )
        assert len(one.filled) == 1 and len(two.filled) > 2
        assert max(math.prod(shape) for shape in two.filled) <= 64 * 32
        assert len(whole) == 2 and all(torch.equal(whole[r], pieces[r]) for r in whole)


def test_experts_that_are_stored_one_by_one_are_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy of all of them, also where a rank or a quantization needs only some."""
    path, module = save_checkpoint("mixtral", tmp_path), module_of("mixtral")
    source = CheckpointWeights(module, open_checkpoint(path))
    stacks = [n for n, p in module.named_parameters() if p.dim() == 3]
    converted = source._from.convert(stacks[0])
    want = converted[stacks[0]]
    assert len(stacks) == 4 and all(source.reads_rows(name) for name in stacks)
    monkeypatch.setattr(source._from, "convert", None)
    experts, rows, inputs = want.shape
    for part in (
        None,
        SomeOf(shape=(experts, rows, inputs), dim=0, ranges=((1, 2),)),
        SomeOf(shape=(experts, rows, inputs), dim=1, ranges=((2, 3), (rows - 5, 4))),
        SomeOf(shape=(experts, rows, inputs), dim=2, ranges=((1, inputs - 2),)),
    ):
        expected = want if part is None else part.of(want)
        got = torch.zeros(expected.shape, dtype=torch.float64)
        source.fill(stacks[0], got, part)
        assert torch.equal(got, expected.double())


def test_several_threads_read_what_one_does(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors = dense.program, open_checkpoint(dense.path)
    used = set()

    class Watched(DirectWeights):
        def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
            time.sleep(0.001)  # so that others take some
            used.add(threading.get_ident())
            super().fill(name, out, part)

    made = []
    for threads in (1, 4):
        used.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        made.append(load_weights(program, Watched(program.parameters, tensors)))
        assert (len(used) > 1) == (threads > 1)
        # the current GPU of a new thread is the first one, whatever the rank
        assert (used == {threading.get_ident()}) == (threads == 1)
    one, four = made
    assert one.keys() == four.keys() and all(torch.equal(one[n], four[n]) for n in one)

    def broken(*_: object, **__: object) -> None:
        raise CheckpointError("ends inside a tensor")

    monkeypatch.setattr(Watched, "fill", broken)
    with pytest.raises(CheckpointError, match="ends inside"):
        load_weights(program, Watched(program.parameters, tensors))


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


def test_tensors_of_a_quantization_that_nothing_describes(tmp_path: Path) -> None:
    """As tools write them that leave config.json as it is (optimum-quanto, HQQ)."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{KEY}._data"] = tensors.pop(KEY).to(torch.int8)

    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"{KEY}\._data is of a quantization.*; use another"):
        load(module_of("llama"), tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    edit(tmp_path, lambda t: t.update({KEY: torch.zeros(8, 32)}))
    with pytest.raises(CheckpointError) as caught:
        load(module_of("llama"), tmp_path)
    assert f"{KEY} has shape [8, 32] instead of [16, 32]" in str(caught.value)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    save_checkpoint("mixtral", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(n for n in tensors if ".experts.3." in n)
    del tensors[gone]
    save_file(tensors, file)
    with pytest.raises(CheckpointError):
        load(module_of("mixtral"), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("family", "part"), [("llama", "self_attn.k_proj"), ("mixtral", ".experts.3.")]
)
def test_weights_whose_scales_nothing_describes_are_refused(
    dtype: torch.dtype, family: str, part: str, tmp_path: Path
) -> None:
    file = save_checkpoint(family, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if part in n)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"is stored in \w+, which no quantization_config"):
        load(module_of(family), tmp_path)


def test_packed_weights_that_nothing_describes_are_named(tmp_path: Path) -> None:
    name = KEY.replace("weight", "qweight")
    edit(tmp_path, lambda t: t.update({name: t.pop(KEY).int()}))
    with pytest.raises(CheckpointError, match=f"{name} is of a quantization that config.json does"):
        load(module_of("llama"), tmp_path)


def test_tensors_without_a_place_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strays = ("stray.weight", "stray.\u00b2.weight", f"stray.{'9' * 5000}.weight")  # odd numbers
    edit(tmp_path, lambda t: t.update({name: torch.zeros(2) for name in strays}))
    load(module_of("llama"), tmp_path)
    assert "3 tensors of the checkpoint are not used by the model: " in caplog.text
    assert ", stray.weight, stray.\u00b2.weight" in caplog.text


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


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["whole", "base-model"])
@pytest.mark.parametrize("differs", [False, True])
def test_a_head_that_is_stored_though_embeddings_are_tied(
    tmp_path: Path, differs: bool, prefix: str
) -> None:
    """As transformers does it: another head than the embeddings is a weight of its own. Their
    names may be those of transformers' model, or such as it renames."""
    path = save_checkpoint("llama", tmp_path / "m", tie_word_embeddings=True, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differs)
    named = {name.replace("model.", prefix): tensor for name, tensor in tensors.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    source = resolve(EngineConfig(model=str(path), device="cpu"), torch.device("cpu"))
    cache = ProgramCache(tmp_path)
    for _ in range(2):
        compiled = compile_model(source, cache)
        program = compiled.program
        parts = {part for _, role in program.weight_inputs() for part in role.parts}
        assert ({"lm_head.weight", "model.embed_tokens.weight"} <= parts) == differs
        assert bool(program.parameters.aliases) != differs
        keep(compiled, cache)
    assert program.from_cache
