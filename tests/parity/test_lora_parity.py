"""LoRA adapters of many requests in one batch answer as PEFT does with each alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import tiny_engine
import torch
from rank_threads import RankThreads, rank_threads
from tiers import tiered
from tiny_adapters import peft, peft_model, save_adapter
from tiny_configs import save_random, tiny_config
from tiny_models import (
    FAMILIES,
    Continuation,
    continue_greedily,
    load_reference,
    prompts,
    save_checkpoint,
)

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.lora_request import LoRARequest
from llmc.sampling_params import SamplingParams

LENGTHS = (1, 5, 19, 33, 12, 30)
NUM_TOKENS = 8
LINEARS = {
    "llama": {
        "attention": ["q_proj", "v_proj"],
        "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "head": ["lm_head", "down_proj", "embed_tokens"],
    },
    "gemma3": {  # its embedding scales what it looks up
        "attention": ["q_proj", "embed_tokens"],
        "all": "all-linear",
        "head": ["embed_tokens"],
    },
    "gpt2": {
        "attention": ["c_attn"],
        "all": ["c_attn", "c_proj", "c_fc"],
        "head": ["lm_head", "wte", "wpe"],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine with two slots for three adapters, and what PEFT answers with each of them."""

    running: tiny_engine.Running
    adapters: tuple[LoRARequest | None, ...]
    expected: tuple[tuple[Continuation, ...], ...]  # for each adapter, for each prompt

    def engine(self, **options: Any) -> EngineCore:
        return self.running.engine(
            adapters=self.running.started.engine._features.adapters, **options
        )

    def stop(self) -> None:
        """Wait for the other ranks; raises what went wrong on one."""
        processes = self.running.started.rank_processes
        if processes is not None:
            assert isinstance(processes, RankThreads)
            processes.stop()

    def check(self, engine: EngineCore, lengths: Sequence[int] = LENGTHS) -> None:
        """Every prompt with every adapter, in turns; all at once."""
        params = SamplingParams(temperature=0.0, logprobs=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        wanted = []
        for i in range(len(self.expected[0])):
            for j, adapter in enumerate(self.adapters):
                want = self.expected[j][i]
                if len(want.prompt) in lengths:
                    wanted.append(want)
                    engine.add(
                        AddRequest(
                            request_id=str(len(wanted) - 1),
                            prompt_token_ids=want.prompt,
                            sampling=params,
                            adapter=adapter,
                        )
                    )
        got = tiny_engine.finish(engine)
        assert len(got) == len(wanted)
        skipped, wrong = tiny_engine.differences(wanted, [got[str(i)] for i in range(len(wanted))])
        assert not wrong
        assert skipped <= NUM_TOKENS


def make_subject(family: str, root: Path, *, copies: bool = True, **options: Any) -> Subject:
    """`copies`: an adapter has copies of the embedding and the head, as PEFT saves it by itself."""
    changes = {"tie_word_embeddings": True} if family == "gemma3" else {}
    path = save_checkpoint(family, root / "model", **changes)
    on = LINEARS[family]
    is_conv = family == "gpt2"
    adapters = (
        save_adapter(
            load_reference(path), root / "small", number=1, r=3, target_modules=on["attention"],
            fan_in_fan_out=is_conv,
        ),
        None,
        save_adapter(
            load_reference(path), root / "wide", number=2, r=8, lora_alpha=4,
            target_modules=on["all"], use_rslora=True, fan_in_fan_out=is_conv,
        ),
        save_adapter(
            load_reference(path), root / "head", number=3, r=4, target_modules=on["head"],
            **({"ensure_weight_tying": True} if family == "gemma3" else
               {"rank_pattern": {on["head"][0]: 6}, "alpha_pattern": {on["head"][0]: 3}}),
            save_embedding_layers="auto" if copies else False,
        ),
    )  # fmt: skip
    return serve(path, adapters, LENGTHS, **options)


def serve(
    path: Path,
    adapters: Sequence[LoRARequest | None],
    lengths: Sequence[int],
    **options: Any,
) -> Subject:
    expected = []
    for adapter in adapters:
        with peft_model(load_reference(path), adapter) as answering:
            expected.append(
                tuple(continue_greedily(answering, p, NUM_TOKENS) for p in prompts(lengths))
            )
    with rank_threads():
        running = tiny_engine.start(
            path, enable_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=8, **options
        )
    return Subject(running=running, adapters=tuple(adapters), expected=tuple(expected))


# The ranks of each: with two of llama's key heads, and a cut vocabulary, on two.
RANKS = {"gpt2": 1, "llama": 1, "llama on 2 ranks": 2, "gpt2 on 2 ranks": 2}


@pytest.fixture(
    scope="module", params=tiered(RANKS, *(name for name in RANKS if name != "gpt2 on 2 ranks"))
)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    family = request.param.split()[0]
    size = RANKS[request.param]
    made = make_subject(family, tmp_path_factory.mktemp(family), tensor_parallel_size=size)
    yield made
    made.stop()


def test_adapters_change_the_answers(subject: Subject) -> None:
    answers = {tuple(c.tokens for c in of_one) for of_one in subject.expected}
    assert len(answers) == len(subject.adapters)


def test_many_adapters_in_one_batch(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = subject.engine()
    loader = engine._features.adapters
    loads = Mock(wraps=loader.begin)
    monkeypatch.setattr(loader, "begin", loads)
    subject.check(engine)
    assert loads.call_count > 3  # two slots for three adapters


def test_chunked_prefill_and_preemption(subject: Subject) -> None:
    engine = subject.engine(max_num_batched_tokens=16, num_blocks=19)
    subject.check(engine, lengths=(33, 30))
    assert engine.scheduler.num_preemptions > 0


def test_prefixes_are_cached_by_adapter(subject: Subject) -> None:
    engine = subject.engine()
    subject.check(engine, lengths=(33,))
    assert engine.stats().prefix_cache_hits == 0  # one prompt, by four different models
    subject.check(engine, lengths=(33,))
    assert engine.stats().prefix_cache_hits == len(subject.adapters) * 32


@pytest.mark.parametrize("size", [1, 2])
def test_a_tied_embedding_that_scales_its_rows(size: int, tmp_path: Path) -> None:
    subject = make_subject("gemma3", tmp_path, tensor_parallel_size=size)
    test_adapters_change_the_answers(subject)
    subject.check(subject.engine())
    subject.stop()


def test_over_parts_of_quantized_weights(tmp_path: Path) -> None:
    """What one rank says, said by four, of key heads that two share and of groups that are cut."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32,
    }  # fmt: skip
    path = save_checkpoint("qwen3", tmp_path / "model", **sizes)
    adapter = save_adapter(
        load_reference(path), tmp_path / "all", number=1, r=4,
        target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"],
    )  # fmt: skip
    options = {"quantization": "int4", "activation_bits": 32}
    told = []
    for size in (1, 4):
        subject = serve(path, (adapter,), (12,), tensor_parallel_size=size, **options)
        engine = subject.engine()
        told.append(tiny_engine.generate(engine, prompts((5, 19, 12)), 8, adapter=adapter))
        subject.stop()
    for one, many in zip(*told, strict=True):
        assert many.tokens == one.tokens
        assert many.logprobs == pytest.approx(one.logprobs, abs=tiny_engine.LOGPROB_TOLERANCE)


def test_an_adapter_that_can_not_be_had_ends_its_request_alone(tmp_path: Path) -> None:
    """On two ranks, of which the other one never hears of it."""
    path = save_checkpoint("llama", tmp_path / "model")
    good, bad = (
        save_adapter(
            load_reference(path), tmp_path / name, number=i, r=2, target_modules=["q_proj"]
        )
        for i, name in enumerate(("good", "bad"), start=1)
    )
    file = Path(bad.lora_path) / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({n: t * torch.nan for n, t in tensors.items()}, file)
    subject = serve(path, (good,), (12,), tensor_parallel_size=2)
    engine = subject.engine()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for name, adapter in (("bad", bad), ("good", good), ("none", None)):
        prompt = list(subject.expected[0][0].prompt)
        engine.add(
            AddRequest(request_id=name, prompt_token_ids=prompt, sampling=params, adapter=adapter)
        )
    errors: dict[str, Any] = {}
    while engine.has_work:
        errors |= {u.request_id: u.error for u in engine.step() if u.error or u.finish_reason}
    assert "not finite" in str(errors.pop("bad"))
    assert errors == {"good": None, "none": None}
    subject.check(subject.engine(), lengths=(12,))
    subject.stop()


@pytest.mark.parametrize("quantization", ["int8"])
def test_over_quantized_weights(quantization: str, tmp_path: Path) -> None:
    """What an adapter adds is what it adds to the weights in full, within their rounding."""
    subject = make_subject("llama", tmp_path, copies=False, quantization=quantization)
    reports = subject.running.started.info.pass_reports
    assert any("quantized_linear" in one for one in reports)
    params = SamplingParams(temperature=0.0, logprobs=0, max_tokens=1, ignore_eos=True)
    engine = subject.engine()
    for j, adapter in enumerate(subject.adapters):
        prompt = subject.expected[j][3].prompt
        engine.add(
            AddRequest(request_id=str(j), prompt_token_ids=prompt, sampling=params, adapter=adapter)
        )
    got = tiny_engine.finish(engine)
    for j, of_adapter in enumerate(subject.expected):
        want = of_adapter[3]
        if want.margins[0] > 0.2:  # what rounding to 8 bits can move here
            assert got[str(j)].tokens == list(want.tokens[:1])
            assert abs(got[str(j)].logprobs[0] - want.logprobs[0]) < 0.1
    assert sum(of_adapter[3].margins[0] > 0.2 for of_adapter in subject.expected) > 1


ASKED: dict[str, dict[str, Any]] = {
    "bfloat16": {"target_modules": ["q_proj", "embed_tokens"]},
    "regex": {"target_modules": r".*\.(up_proj|embed_tokens)"},
    "all-linear": {"target_modules": "all-linear"},
    "one-layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "embed_tokens"],
        "rank_pattern": {r"model.layers.0.self_attn.q_proj": 5, "embed_tokens": 3},
        "alpha_pattern": {r"layers\.\d+\.self_attn\.k_proj": 1, "q_proj": 7},
        "use_rslora": True,
    },
}


def test_adapters_as_peft_can_be_asked_for_them(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model")
    adapters = [
        save_adapter(load_reference(path), tmp_path / name, number=i, **{"r": 4, **asked})
        for i, (name, asked) in enumerate(ASKED.items(), start=1)
    ]
    file = Path(adapters[0].lora_path) / "adapter_model.safetensors"
    short = {name: tensor.bfloat16() for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(short, file)
    subject = serve(path, adapters, (12,))
    answers = {want.logprobs for of_one in subject.expected for want in of_one}
    assert len(answers) == len(adapters)
    subject.check(subject.engine())


FEW = (1, 5, 19)
ROUTED = {
    "mixtral": "gate and up in one parameter",
    "gpt_oss": "stored by input, with biases",
    "nemotron_h": "no gate; beside recurrent states",
    "longcat_flash": "in a loop of the model's own, some of which change nothing",
    "llama4_text": "all of them for each token",
}


@pytest.mark.parametrize(
    ("family", "size"),
    tiered(
        [*((family, 1) for family in ROUTED), *((family, 2) for family in ROUTED)],
        ("mixtral", 1),
        ("mixtral", 2),
        ("gpt_oss", 1),
    ),
)
def test_routed_experts(family: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if family in FAMILIES:
        save_checkpoint(family, path)
    else:
        save_random(tiny_config(family), path)
    up, down = f"experts.{'up' if family == 'nemotron_h' else 'gate_up'}_proj", "experts.down_proj"
    # PEFT takes no adapters of different target_parameters together: each has a model of its own
    asked: dict[str, dict[str, Any]] = {
        "all": {"r": 3, "target_modules": ["k_proj", "q_a_proj"], "target_parameters": [up, down]},
        "up": {
            "r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": [],
            "target_parameters": [up],
        },
        "down": {
            "r": 2, "rank_pattern": {r".*\.1\..*down_proj": 5}, "target_modules": [],
            "target_parameters": [down],
        },
    }  # fmt: skip
    adapters: list[LoRARequest | None] = [
        save_adapter(load_reference(path), tmp_path / name, number=i, **config)
        for i, (name, config) in enumerate(asked.items(), start=1)
    ]
    subject = serve(path, [*adapters, None], FEW, max_lora_expert_rank=5, tensor_parallel_size=size)
    test_adapters_change_the_answers(subject)
    subject.check(subject.engine(), lengths=FEW)
    subject.check(subject.engine(max_num_batched_tokens=16, num_blocks=19), lengths=FEW)
    subject.stop()


def test_experts_by_themselves(tmp_path: Path) -> None:
    """As of models that had a linear for each expert; PEFT joins them when it loads them."""
    path = save_checkpoint("mixtral", tmp_path / "model")
    shapes = {"w1": (64, 32), "w2": (32, 64), "w3": (64, 32)}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        moe = f"base_model.model.model.layers.{layer}.block_sparse_moe"
        for module, (n, k) in {
            f"{moe}.experts.{expert}.{linear}": shape
            for expert in range(4)
            for linear, shape in shapes.items()
        }.items():
            tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(3, k, generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(n, 3, generator=generator)
    folder = tmp_path / "old"
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=list(shapes), inference_mode=True
    )
    config.save_pretrained(folder)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    subject = serve(path, (LoRARequest("old", 1, str(folder)), None), FEW, max_lora_expert_rank=6)
    test_adapters_change_the_answers(subject)
    subject.check(subject.engine(), lengths=FEW)


def test_experts_and_router_as_peft_takes_all_linears(tmp_path: Path) -> None:
    """It makes parameters of what was linears: the router's weight, the stacks of experts."""
    path = save_checkpoint("mixtral", tmp_path / "model")
    adapter = save_adapter(
        load_reference(path), tmp_path / "all", number=1, r=2, target_modules="all-linear"
    )
    config = (Path(adapter.lora_path) / "adapter_config.json").read_text()
    assert '"gate.weight"' in config and '"gate_up_proj"' in config
    subject = serve(path, (None, adapter), FEW, max_lora_expert_rank=4)
    test_adapters_change_the_answers(subject)
    subject.check(subject.engine(), lengths=FEW)
