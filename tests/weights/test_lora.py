"""Adapters on disk: what is read of good ones, and what is said of those that can't be served."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from llmc.errors import InvalidRequestError
from llmc.lora_request import LoRARequest
from llmc.passes.inputs import AdapterInput
from llmc.runner.adapter_store import lora_targets, target_sizes
from llmc.weights.lora import PlainWeight, open_adapter, read_adapter
from llmc.weights.lora_places import LoraPlace, LoraSize
from llmc.weights.parameters import Parameters

NEEDS_PYDANTIC = pytest.mark.skipif(
    find_spec("pydantic_core") is None, reason="pydantic is not installed: `regex` looks around"
)
TARGETS = {
    LoraPlace("model.q.weight"): LoraSize(6, 8, 2),
    LoraPlace("model.o.weight"): LoraSize(8, 8, 2),
    LoraPlace("model.embed.weight", "embedding"): LoraSize(8, 5, 2),
}
UP, DOWN = "model.1.experts.gate_up", "model.1.experts.down"
PARAMETERS = Parameters(
    shapes={
        "model.embed.weight": (5, 8),
        "model.q.weight": (6, 8),
        "model.o.weight": (8, 8),
        UP: (3, 4, 8),
        f"{UP}_bias": (3, 4),
        DOWN: (3, 8, 2),
    },
    aliases={},
    is_plain=False,
    experts={
        UP: ("model.1.moe.experts.{}.w1", "model.1.moe.experts.{}.w3"),
        DOWN: ("model.1.moe.experts.{}.w2",),
    },
)
EXPERTS = {
    **TARGETS,
    LoraPlace(UP, "experts"): LoraSize(4, 8, 4, 3),
    LoraPlace(DOWN, "experts"): LoraSize(8, 2, 4, 3),
}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", "peft_version": "0.21"}


def good_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "base_model.model.model.q.lora_A.weight": torch.randn(2, 8),
        "base_model.model.model.q.lora_B.weight": torch.randn(6, 2),
    }


def save(path: Path, config: Any = CONFIG, tensors: dict[str, Tensor] | None = None) -> LoRARequest:
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "adapter_config.json").write_text(text, encoding="utf-8")
    safetensors.torch.save_file(
        good_tensors() if tensors is None else tensors, path / "adapter_model.safetensors"
    )
    return LoRARequest("one", 1, str(path))


@pytest.mark.parametrize(
    "changes,scale",
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"alpha_pattern": {"q": 3}}, 1.5),
        ({"alpha_pattern": {"elsewhere": 3}}, 4.0),
        ({"r": 7, "rank_pattern": {"model.q": 2}}, 4.0),
        ({"alpha_pattern": {r"model\.(q|k|v)": 3}}, 1.5),
        ({"alpha_pattern": {r"(a+)+|el\w*": 3, ".*k": 5, r"(mo\w+\.)*q": 6}}, 3.0),
        ({"alpha_pattern": {".*" * 40 + "z": 3, "(m?o?d?e?l?.?q?)+" * 20 + "z": 5}}, 4.0),
    ],
)
def test_scales(changes: dict[str, Any], scale: float, tmp_path: Path) -> None:
    adapter = save(tmp_path, {**CONFIG, **changes})
    weights = read_adapter(adapter, open_adapter(adapter, TARGETS, PARAMETERS), torch.float32, {})
    ((a, b),) = weights.values()
    stored = good_tensors()
    torch.testing.assert_close(a, stored["base_model.model.model.q.lora_A.weight"])
    torch.testing.assert_close(b, scale * stored["base_model.model.model.q.lora_B.weight"])


def test_names_that_modules_had_when_the_adapter_was_trained(tmp_path: Path) -> None:
    """Also of copies; a module's present name goes before another's former one."""
    former = {"text.model.q": "model.q", "text.model.embed": "model.embed", "model.o": "model.q"}
    parameters = replace(PARAMETERS, former_names=former)
    tensors = {**good_tensors(), A.replace("q", "o"): torch.ones(2, 8)}
    tensors |= {B.replace("q", "o"): torch.ones(8, 2), COPY: torch.ones(5, 8)}
    renamed = {
        key.replace("model.q", "text.model.q").replace("model.embed", "text.model.embed"): tensor
        for key, tensor in tensors.items()
    }
    (tmp_path / "present").mkdir()
    one, two = (
        open_adapter(save(path, tensors=named), TARGETS, parameters)
        for path, named in ((tmp_path / "present", tensors), (tmp_path, renamed))
    )
    assert two.parts.keys() == one.parts.keys() == set(list(TARGETS)[:2])
    assert {part.module.name for parts in two.parts.values() for part in parts} == {
        "model.q",
        "model.o",
    }
    assert two.copies.keys() == one.copies.keys() == {"model.embed.weight"}


def test_a_file_that_was_written_again_is_not_read_by_the_old_header(tmp_path: Path) -> None:
    """As when training continues in the same directory: the tensors now begin elsewhere."""
    adapter = save(tmp_path)
    stored = open_adapter(adapter, TARGETS, PARAMETERS)
    tensors = {A: torch.zeros(2, 8), B: torch.zeros(6, 2), COPY: torch.zeros(5, 8)}
    save(tmp_path, tensors=tensors)
    with pytest.raises(InvalidRequestError, match="has changed since it was first used; load it"):
        read_adapter(adapter, stored, torch.float32, {})
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_adapter(adapter, stored, torch.float32, {})


COPY = "base_model.model.model.embed.base_layer.weight"
EMBEDDING = {
    "base_model.model.model.embed.lora_embedding_A": torch.ones(2, 5),
    "base_model.model.model.embed.lora_embedding_B": torch.ones(8, 2),
}


def test_a_copy_of_the_models_embedding(tmp_path: Path) -> None:
    own = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    adapter = save(tmp_path, tensors={**EMBEDDING, COPY: own})
    stored = open_adapter(adapter, TARGETS, PARAMETERS)
    for served in (own, own.bfloat16()):  # PEFT would put the copy into a model of that dtype
        plain = {"model.embed.weight": PlainWeight.of(served)}
        weights = read_adapter(adapter, stored, served.dtype, plain)
        assert list(weights) == [LoraPlace("model.embed.weight", "embedding")]
    changed = own.clone()
    changed[4, 7] += 1
    for plain, reason in (
        ({"model.embed.weight": PlainWeight.of(changed)}, "has other values"),
        (
            {"model.embed.weight": PlainWeight.of(own[:4])},
            "1 more rows.*tokens added to the model's 4",
        ),
        ({"model.embed.weight": PlainWeight.of(own[:, :4])}, r"is \[5, 4\] and not \[5, 8\]"),
        ({}, "is not served as stored"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            read_adapter(adapter, stored, torch.float32, plain)


def test_copies_beside_an_adapter_that_is_not_on_them(tmp_path: Path) -> None:
    """As PEFT saves them with save_embedding_layers=True. Other weights are refused by name."""
    own = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    name = "base_model.model.model.o.weight"
    adapter = save(tmp_path, tensors={**good_tensors(), name: own})
    stored = open_adapter(adapter, TARGETS, PARAMETERS)
    served = {"model.o.weight": PlainWeight.of(own)}
    assert read_adapter(adapter, stored, torch.float32, served)
    with pytest.raises(InvalidRequestError, match="copy of 'model.o.weight'.* has other values"):
        read_adapter(adapter, stored, torch.float32, {"model.o.weight": PlainWeight.of(own + 1)})
    for other in ("base_model.model.score.weight", "base_model.model.model.q.lora_x.weight"):
        adapter = save(tmp_path, tensors={**good_tensors(), other: own})
        with pytest.raises(InvalidRequestError, match=f"it has '{other}'"):
            open_adapter(adapter, TARGETS, PARAMETERS)


def test_a_tied_embedding_without_the_heads_part(tmp_path: Path) -> None:
    adapter = save(tmp_path, {**CONFIG, "ensure_weight_tying": True}, EMBEDDING)
    assert open_adapter(adapter, TARGETS, PARAMETERS).parts, "embedding and head are two weights"
    tied = {
        **TARGETS,
        LoraPlace("head.weight", "embedding"): LoraSize(8, 5, 2),
        LoraPlace("model.embed.weight"): LoraSize(5, 8, 2),
        LoraPlace("head.weight"): LoraSize(5, 8, 2),
    }
    with pytest.raises(InvalidRequestError, match="nothing on the head"):
        open_adapter(adapter, tied, PARAMETERS)
    head = {"head.lora_A.weight": torch.ones(2, 8), "head.lora_B.weight": torch.ones(5, 2)}
    both = save(tmp_path, {**CONFIG, "ensure_weight_tying": True}, {**EMBEDDING, **head})
    assert len(open_adapter(both, tied, PARAMETERS).parts) == 2


A, B = "base_model.model.model.q.lora_A.weight", "base_model.model.model.q.lora_B.weight"
# of a square weight it is not known which side is the inputs'
O_PAIR = {A.replace(".q.", ".o."): torch.ones(2, 8), B.replace(".q.", ".o."): torch.ones(8, 2)}


@pytest.mark.parametrize(
    "config,tensors,reason",
    [
        ("{", None, "can't be read"),
        ("[" * 100_000, None, "can't be read"),
        ([], None, "is not a JSON object"),
        ({**CONFIG, "peft_type": "IA3"}, None, "is 'IA3', not 'LORA'; serve the model that PEFT's"),
        ({**CONFIG, "use_dora": True}, None, "it uses use_dora"),
        ({**CONFIG, "modules_to_save": ["lm_head"]}, None, "it uses modules_to_save"),
        ({**CONFIG, "bias": "all"}, None, "trains biases"),
        ({**CONFIG, "init_lora_weights": "pissa"}, None, "init_lora_weights is 'pissa', which ch"),
        ({**CONFIG, "init_lora_weights": "olora"}, None, "path_initial_model_for_weight_conver"),
        ({**CONFIG, "init_lora_weights": ["eva"]}, None, r"init_lora_weights is \['eva'\]"),
        ({**CONFIG, "target_parameters": "experts.down"}, None, "is not a list of names"),
        ({**CONFIG, "target_parameters": ["a"] * 4097}, None, "has 4097 names; the limit is 4096"),
        ({**CONFIG, "target_parameters": ["o.weight"]}, O_PAIR, "linear layers that support ad"),
        ({**CONFIG, "lora_bias": True}, None, "it uses lora_bias"),
        ({**CONFIG, "bias": "lora_only"}, None, "trains biases"),
        ({**CONFIG, "some_new_method": {"a": 1}}, None, "it uses some_new_method"),
        ({**CONFIG, "r": 0}, None, "r in adapter_config.json is 0"),
        ({**CONFIG, "r": "2"}, None, "r in adapter_config.json is '2'"),
        ({**CONFIG, "r": 2.5}, None, r"r in adapter_config.json is 2\.5"),
        ({**CONFIG, "lora_alpha": 10**400}, None, "lora_alpha in adapter_config.json is 1000"),
        ({**CONFIG, "lora_alpha": float("nan")}, None, "lora_alpha in adapter_config.json is nan"),
        ({**CONFIG, "lora_alpha": None}, None, "lora_alpha in adapter_config.json is None"),
        pytest.param(
            *({**CONFIG, "rank_pattern": {"(?=a)q": 1}}, None, "rank_pattern has '.*look-around"),
            marks=NEEDS_PYDANTIC,
        ),
        ({**CONFIG, "alpha_pattern": {"(": 1}}, None, r"alpha_pattern has '\('"),
        ({**CONFIG, "r": 3}, {A: torch.ones(3, 8), B: torch.ones(6, 3)}, "raise max_lora_rank"),
        ({**CONFIG, "r": 1}, None, r"rank 1 and this model require \[1, 8\] and \[6, 1\]"),
        (CONFIG, {A: torch.ones(2, 9), B: torch.ones(6, 2)}, r"lora_A \[2, 9\]"),
        (CONFIG, {A: torch.ones(2, 8)}, "has only lora_A"),
        (CONFIG, {A: torch.ones(2, 8).int(), B: torch.ones(6, 2)}, "torch.int32"),
        (CONFIG, {}, "is empty"),
        (CONFIG, {A.replace(".q.", ".embed."): torch.ones(2, 8)}, "model's linear layers"),
        (CONFIG, {A.replace("A.weight", "magnitude"): torch.ones(2, 8)}, "is not a lora_A or"),
        (CONFIG, {"model.q.lora_embedding_A": torch.ones(2, 8)}, "model's embedding layers"),
        (CONFIG, dict([next(iter(EMBEDDING.items()))]), "has only lora_A"),
        (CONFIG, {COPY: torch.ones(5, 8)}, "is empty"),
    ],
)
def test_refused(
    config: Any, tensors: dict[str, Tensor] | None, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        open_adapter(save(tmp_path, config, tensors), TARGETS, PARAMETERS)
    assert "LoRA adapter 'one'" in str(caught.value)


def on(module: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    name = f"base_model.model.model.{module}"
    return {f"{name}.lora_A.weight": a.contiguous(), f"{name}.lora_B.weight": b.contiguous()}


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_in_one_parameter(is_transposed: bool, tmp_path: Path) -> None:
    """The wrappers are in the order of the module's parameters, the last outermost. Before 0.20
    PEFT had A and B of most models turned."""
    gen = torch.Generator().manual_seed(2)
    a = {n: torch.randn(3, 2, k, generator=gen) for n, k in (("up", 8), ("down", 2))}
    b = {n: torch.randn(3, k, 2, generator=gen) for n, k in (("up", 4), ("down", 8))}
    wrapped = {"up": "1.experts.base_layer", "down": "1.experts"}
    tensors = {}
    for name, module in wrapped.items():
        left, right = (b[name].mT, a[name].mT) if is_transposed else (a[name], b[name])
        tensors |= on(module, left.flatten(0, 1), right.permute(1, 2, 0).flatten(1, 2))
    config = {
        **CONFIG,
        "target_parameters": ["experts.down", "1.experts.gate_up", "q.weight"],
        "alpha_pattern": {"experts.down": 3, "q": 100},
    }
    adapter = save(tmp_path, config, {**tensors, **good_tensors()})
    stored = open_adapter(adapter, EXPERTS, PARAMETERS)
    weights = read_adapter(adapter, stored, torch.float32, {})
    scales = {"up": 4.0, "down": 1.5}
    for name, place in (("up", LoraPlace(UP, "experts")), ("down", LoraPlace(DOWN, "experts"))):
        torch.testing.assert_close(weights[place][0], a[name])
        torch.testing.assert_close(weights[place][1], scales[name] * b[name])
    q = weights[LoraPlace("model.q.weight")]  # PEFT compares the parameter's name: q.weight
    torch.testing.assert_close(q[1], 4.0 * good_tensors()[B])


def test_experts_by_themselves(tmp_path: Path) -> None:
    """Gate and up are ranks of one A, and of B each has its channels. An expert may lack one."""
    gen = torch.Generator().manual_seed(3)

    def pair(rank: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rank, k, generator=gen), torch.randn(n, rank, generator=gen)

    gate, up, lone, down = pair(2, 2, 8), pair(1, 2, 8), pair(2, 2, 8), pair(2, 8, 2)
    experts = "1.moe.experts"
    adapter = save(
        tmp_path,
        {**CONFIG, "rank_pattern": {"experts.0.w3": 1}},
        {
            **on(f"{experts}.0.w3", *up),
            **on(f"{experts}.0.w1", *gate),
            **on(f"{experts}.2.w3", *lone),
            **on(f"{experts}.1.w2", *down),
        },
    )
    stored = open_adapter(adapter, EXPERTS, PARAMETERS)
    weights = read_adapter(adapter, stored, torch.float32, {})
    a, b = weights[LoraPlace(UP, "experts")]
    want = torch.zeros(3, 4, 8)
    want[0, :2], want[0, 2:] = 4 * gate[1] @ gate[0], 8 * up[1] @ up[0]
    want[2, 2:] = 4 * lone[1] @ lone[0]
    torch.testing.assert_close(b @ a, want)
    a, b = weights[LoraPlace(DOWN, "experts")]
    torch.testing.assert_close((b @ a)[1], 4 * down[1] @ down[0])
    assert not (b @ a)[::2].any()


STACKED = {"target_parameters": ["experts.gate_up"]}


@pytest.mark.parametrize(
    "config,module,shapes,targets,reason",
    [
        (STACKED, "1.experts", ((6, 8), (4, 6)), TARGETS, r"are disabled: set max_lora_expert"),
        ({}, "1.moe.experts.0.w2", ((2, 2), (8, 2)), TARGETS, "are disabled: set max_lora_exper"),
        (STACKED, "1.experts", ((2, 8), (4, 2)), EXPERTS, r"require \[6, 8\] and \[4, 6\]"),
        (STACKED, "1.experts.base_layer", ((6, 8), (4, 6)), EXPERTS, "model's linear layers t"),
        ({**STACKED, "r": 5}, "1.experts", ((15, 8), (4, 15)), EXPERTS, "limit is 4; raise max_lo"),
        ({**STACKED, "peft_version": "0.19.1"}, "1.experts", ((6, 8), (8, 6)),
         {LoraPlace(UP, "experts"): LoraSize(8, 8, 4, 3)}, "can't be distinguished; train it wi"),
        ({}, "1.moe.experts.3.w2", ((2, 2), (8, 2)), EXPERTS, "but there are 3 experts"),
        ({}, "1.moe.experts.0.w1", ((2, 8), (4, 2)), EXPERTS, r"require \[2, 8\] and \[2, 2\]"),
        ({}, "1.experts", ((6, 8), (4, 6)), EXPERTS, "linear layers that support adapte"),
        ({"target_parameters": ["gate_up_bias"]}, "1.experts", ((2, 4), (3, 2)), EXPERTS,
         "linear layers that support adapte"),
        (STACKED, "1.experts", ((6, 8), (4, 6)), {**TARGETS, LoraPlace(DOWN, "experts"):
         LoraSize(8, 2, 4, 3)}, "whose code in this model does not support adapters"),
        (STACKED, "1.experts", ((6, 8), (4, 6)), {**TARGETS},
         "whose code in this model does not support adapters"),
    ],
)  # fmt: skip
def test_refused_on_experts(
    config: Any, module: str, shapes: Any, targets: Any, reason: str, tmp_path: Path
) -> None:
    adapter = save(tmp_path, {**CONFIG, **config}, on(module, *map(torch.ones, shapes)))
    with pytest.raises(InvalidRequestError, match=reason):
        open_adapter(adapter, targets, PARAMETERS, max_expert_rank=0 if targets is TARGETS else 4)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    for wrong in (float("nan"), float("inf"), 3e38):  # times the scale, the last is infinite
        adapter = save(tmp_path, tensors={**good_tensors(), B: torch.full((6, 2), wrong)})
        parts = open_adapter(adapter, TARGETS, PARAMETERS)
        with pytest.raises(InvalidRequestError, match=r"model\.q\.weight are not finite"):
            read_adapter(adapter, parts, torch.float32, {})


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is not a directory with"):
        open_adapter(LoRARequest("one", 1, str(tmp_path / "nowhere")), TARGETS, PARAMETERS)
    adapter = save(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    parts = open_adapter(adapter, TARGETS, PARAMETERS)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InvalidRequestError, match="not a complete safetensors file"):
        open_adapter(adapter, TARGETS, PARAMETERS)
    with pytest.raises(InvalidRequestError, match="has changed since"):
        read_adapter(adapter, parts, torch.float32, {})
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(InvalidRequestError, match=r"its directory has no adapter_model\.safe"):
        open_adapter(adapter, TARGETS, PARAMETERS)


@pytest.mark.parametrize(
    "name,number,path,param",
    [
        ("", 1, "p", "lora_name"),
        ("../x", 1, "p", "lora_name"),
        ("a/../b", 1, "p", "lora_name"),
        ("a//b", 1, "p", "lora_name"),
        ("a\nb", 1, "p", "lora_name"),
        ("a" * 201, 1, "p", "lora_name"),
        ("a", 0, "p", "lora_int_id"),
        ("a", True, "p", "lora_int_id"),
        ("a", 1, "", "lora_path"),
        ("a", 1, "p\0q", "lora_path"),
    ],
)
def test_requests_for_adapters(name: str, number: int, path: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LoRARequest(name, number, path)
    assert caught.value.param == param


def test_weights_that_several_layers_share(tmp_path: Path) -> None:
    """PEFT has an adapter for each of the layers; which is which, the graph does not say."""
    names = ("model.1.q.weight", "model.3.q.weight", "embed.weight", "lm_head.weight")
    parameters = Parameters(
        shapes=dict.fromkeys(names, (6, 8)),
        aliases={**dict.fromkeys(names[:2], names[:2]), **dict.fromkeys(names[2:], names[2:])},
        is_plain=True,
    )
    roles = [
        (SimpleNamespace(name=f"{place}.{matrix}"), role(weight, matrix))
        for place, weight in enumerate((names[0], names[0], names[2]))
        for matrix in ("a", "b")
    ]
    program: Any = SimpleNamespace(adapter_inputs=lambda: roles, parameters=parameters)
    a, b = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 6)
    bound = {node.name: a if node.name.endswith("a") else b for node, _ in roles}
    targets = target_sizes(lora_targets(program, bound))
    assert targets.keys() == {LoraPlace("embed.weight"), LoraPlace("lm_head.weight")}
    named = {n.replace("model.q", "model.3.q"): t for n, t in good_tensors().items()}
    with pytest.raises(InvalidRequestError, match="3.q', which is one of several layers"):
        open_adapter(save(tmp_path, tensors=named), targets, parameters)


def role(weight: str, matrix: Any) -> AdapterInput:
    return AdapterInput(op="linear", matrix=matrix, weights=(weight,), widths=(6,))
