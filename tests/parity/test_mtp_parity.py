"""A checkpoint's layer for multi-token prediction: what it computes; no answer depends on it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import draft_heads
import pytest
import safetensors.torch
import tiny_engine
import tiny_models
import torch
import transformers as tf
from speculation_cases import LIMITS, SAMPLING
from tiers import tiered
from torch import Tensor, nn

from llmc.engine.plan import RowWork, StepPlan
from llmc.errors import ConfigError
from llmc.pooling import DRAFTED
from llmc.startup import draft_model

LAYERS, HIDDEN = 2, 32
SIZES: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Any] = {
    "latent attention": lambda layers: tf.DeepseekV3Config(
        **SIZES,
        num_hidden_layers=layers,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "experts": lambda layers: tf.Glm4MoeConfig(**SIZES, num_hidden_layers=layers, head_dim=8),
}


class Whole:
    """A model with one layer more, and what an MTP layer has beside that."""

    def __init__(self, kind: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model: Any = tf.AutoModelForCausalLM.from_config(
                CONFIGS[kind](LAYERS + 1), attn_implementation="eager"
            ).eval()
        base = self.model.model
        self.layer = base.layers[LAYERS]
        self.layer.enorm, self.layer.hnorm = copy.deepcopy(base.norm), copy.deepcopy(base.norm)
        self.layer.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layer.shared_head = nn.Module()
        self.layer.shared_head.norm = copy.deepcopy(base.norm)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() >= 2:
                    parameter.copy_(0.15 * noise)
                else:
                    parameter.add_(0.1 * noise)

    def save(self, path: Path) -> Path:
        """As its authors would: the config counts the model's layers alone."""
        self.model.save_pretrained(path)
        self.model.config.num_hidden_layers = LAYERS
        self.model.config.save_pretrained(path)
        return path

    @torch.no_grad()
    def states(self, tokens: list[int]) -> Tensor:
        """What leaves the model's norm, without the layer: [T, N]."""
        base, kept = self.model.model, self.model.model.layers
        base.layers = kept[:LAYERS]
        hidden: Tensor = base(torch.tensor([tokens])).last_hidden_state[0]
        base.layers = kept
        return hidden

    @torch.no_grad()
    def draft(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T] and states [T, N] beside them -> logits [T, V] and u [T, N]."""
        base, layer, count = self.model.model, self.layer, len(tokens)
        e = base.embed_tokens(torch.tensor([tokens]))
        x = layer.eh_proj(torch.cat([layer.enorm(e), layer.hnorm(states[None])], -1))
        places = torch.arange(count)[None]
        hidden = torch.full((count, count), float("-inf")).triu(1)[None, None]
        u = layer(
            x,
            attention_mask=hidden,
            position_ids=places,
            position_embeddings=base.rotary_emb(x, places),
        )
        return self.model.lm_head(layer.shared_head.norm(u))[0], u[0]


@pytest.fixture(scope="module", params=tiered(CONFIGS, "latent attention"))
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Whole, tiny_engine.Running]:
    whole = Whole(request.param)
    path = whole.save(tmp_path_factory.mktemp("mtp") / "model")
    drafting = {"method": "mtp", "num_speculative_tokens": 3}
    return whole, tiny_engine.start(path, speculative_config=drafting)


def test_logits_are_those_of_the_format(started: tuple[Whole, tiny_engine.Running]) -> None:
    """Of a prompt, and then of tokens that the layer drew itself."""
    whole, running = started
    tokens = [(7 * i + 3) % tiny_models.VOCAB for i in range(12)]
    states, own = whole.states(tokens)[:-1], tokens[1:]
    plain, runner = running.started.runner, draft_heads.drafter(running)
    theirs, blocks = [9, 10, 11], [0, 1, 2]
    work = RowWork(row=0, start=0, num_tokens=12, sample=True, new_blocks=theirs)
    plain.execute(
        StepPlan(step=0, new_rows=[draft_heads.row(tokens)], work=[work], released_rows=(0,))
    )
    pairs = [block for pair in zip(blocks, theirs, strict=True) for block in pair]
    first = RowWork(row=0, start=0, num_tokens=len(own), sample=True, new_blocks=(*pairs, 3, 0))
    plan = StepPlan(step=0, new_rows=[draft_heads.row(own)], work=[first], released_rows=(0,))
    for _ in range(3):
        logits, left = whole.draft(own, states)
        draft_heads.check_logits(draft_heads.logits_of(running, plan), logits[-1])
        [token] = runner.execute(plan).token_ids
        assert token == DRAFTED + int(logits[-1].argmax())
        own.append(token - DRAFTED)
        states = torch.cat([states, left[-1:]])
        work = RowWork(row=0, start=len(own) - 1, num_tokens=1, sample=True)
        plan = StepPlan(step=0, work=[work])


@pytest.mark.parametrize("limits", ["whole", "few-blocks"])
@pytest.mark.parametrize("sampling", ["greedy", "processed"])
def test_answers_are_those_without_it(
    started: tuple[Whole, tiny_engine.Running], limits: str, sampling: str
) -> None:
    draft_heads.answers_are_those_without_it(started[1], LIMITS[limits], SAMPLING[sampling])


def test_weights_are_held_once(tmp_path: Path) -> None:
    """The embedding, the norm and the output head are the model's."""
    path = Whole("experts").save(tmp_path / "model")
    with mock.patch.object(draft_model, "load_model", wraps=draft_model.load_model) as load:
        running = tiny_engine.start(path, speculative_config={"method": "mtp"})
    given = load.call_args.kwargs["given"]
    names = {part for role in given for part in role.parts}
    assert names == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    held = list(running.started.model.bound.values())
    assert all(any(weight is one for one in held) for weight in given.values())


def test_a_layer_that_knows_the_model_saves_steps(tmp_path: Path) -> None:
    """A model whose next token follows from its last one; the layer reads that token."""
    whole = Whole("experts")
    base, layer = whole.model.model, whole.layer
    with torch.no_grad():
        for name, parameter in whole.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                parameter.zero_()
        for norm in (base.norm, layer.enorm, layer.shared_head.norm):
            norm.weight.fill_(1.0)
        layer.eh_proj.weight.copy_(torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1))
    path = whole.save(tmp_path / "model")
    running = tiny_engine.start(path, speculative_config={"method": "mtp"})
    stats = draft_heads.answers_are_those_without_it(running, {}, {})
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    path = tiny_models.save_checkpoint("llama", tmp_path / "plain")
    with pytest.raises(ConfigError, match="'plain' has no multi-token prediction layer"):
        tiny_engine.start(path, speculative_config={"method": "mtp"})


def test_a_checkpoint_that_lacks_a_part_of_it(tmp_path: Path) -> None:
    path = Whole("experts").save(tmp_path / "model")
    weights = safetensors.torch.load_file(path / "model.safetensors")
    del weights[f"model.layers.{LAYERS}.hnorm.weight"]
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match="hnorm"):
        tiny_engine.start(path, speculative_config={"method": "mtp"})
