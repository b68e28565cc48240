"""Tiny EAGLE-3 heads, written like their trainers' checkpoints, and a reference of what they
compute by the format's description: plain torch, one sequence at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
DRAFT_VOCAB = 64
HIDDEN, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
LAYERS = 4  # of the target
TAPS = [2, 1, 3]  # its hidden states as transformers counts them: what enters these layers
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "vocab_size": tiny_models.VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_aux_hidden_state_layer_ids": TAPS,
    "max_position_embeddings": 32,  # from its training; not a limit
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def target(path: Path, **changes: Any) -> Path:
    return tiny_models.save_checkpoint("llama", path, num_hidden_layers=LAYERS, **changes)


def random_weights(num_taps: int = 3, *, seed: int = 0, hidden: int = HIDDEN) -> Weights:
    """Weights of a head that is mostly wrong, with the names of the first published heads."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    ids = torch.randperm(tiny_models.VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    return {
        "fc.weight": drawn(hidden, num_taps * hidden),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": drawn(HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": drawn(KV_HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": drawn(KV_HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": drawn(hidden, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": drawn(64, hidden),
        "midlayer.mlp.up_proj.weight": drawn(64, hidden),
        "midlayer.mlp.down_proj.weight": drawn(hidden, 64),
        "norm.weight": norm(),
        "lm_head.weight": drawn(DRAFT_VOCAB, hidden),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(tiny_models.VOCAB), ids),
    }


def save(path: Path, weights: Weights, **changes: Any) -> Path:
    path.mkdir(parents=True)
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(
        {name: w.contiguous() for name, w in weights.items()}, path / "model.safetensors"
    )
    return path


# ---- a pair that agrees ----

WIDE = 128  # hidden size: a channel for each token, and one that is always 1


def following(length: int, first: int) -> tuple[int, ...]:
    """A sequence by the rule of the agreeing target, whose single cycle has all 96 tokens."""
    tokens = [first]
    while len(tokens) < length:
        tokens.append((13 * tokens[-1] + 5) % tiny_models.VOCAB)
    return tuple(tokens)


def agreeing(folder: Path) -> tuple[Path, Path]:
    """A target whose next token depends only on its last one, and a head that knows the rule.

    Embeddings are one channel per token; layers add nothing. The head moves its input feature (the
    token before its own) to the channel of the token that follows by the rule. So it is right if
    its own token follows by the rule.
    """
    sizes = {"hidden_size": WIDE, "intermediate_size": WIDE, "head_dim": DIM}
    path = target(folder / "agreeing", **sizes)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    vocab = tiny_models.VOCAB
    follows = (13 * torch.arange(vocab) + 5) % vocab  # one cycle of all tokens
    channel = torch.eye(vocab, WIDE)
    embedding = channel.clone()
    embedding[:, -1] = 1.0
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    weights["model.embed_tokens.weight"] = embedding
    head_rows = torch.zeros(vocab, WIDE)
    head_rows[follows] = channel
    weights["lm_head.weight"] = 0.5 * head_rows
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    own = random_weights(hidden=WIDE)
    own = {n: torch.ones_like(w) if n.endswith("norm.weight") else w for n, w in own.items()}
    own["fc.weight"] = torch.cat([torch.eye(WIDE), torch.zeros(WIDE, 2 * WIDE)], 1)
    own["midlayer.self_attn.o_proj.weight"].zero_()
    moves = torch.zeros(WIDE, WIDE)  # what is added: the next token's channel minus its own
    moves[:vocab, :vocab] = channel[:, :vocab][follows].T - torch.eye(vocab)
    scale = math.sqrt(WIDE / 2)  # of the norm before the MLP: two channels of 1
    gate = torch.zeros(WIDE, WIDE)
    gate[:, -1] = 20 / scale
    own["midlayer.mlp.gate_proj.weight"] = gate
    own["midlayer.mlp.up_proj.weight"] = moves / scale
    own["midlayer.mlp.down_proj.weight"] = torch.eye(WIDE) / float(F.silu(torch.tensor(20.0)))
    own["lm_head.weight"] = weights["lm_head.weight"].clone()
    own = {n: w for n, w in own.items() if n not in ("d2t", "t2d")}
    return path, save(folder / "knowing", own, draft_vocab_size=None, **sizes)


# ---- what a head computes ----


@dataclass(slots=True)
class Reference:
    """`weights` with the names of `random_weights`, and `embedding` [V, N] of the target."""

    weights: Weights
    embedding: Tensor
    norm_before_residual: bool = False

    def run(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T] and their features g [T, N] -> logits [T, D] and u [T, N]."""
        w = {n.removeprefix("midlayer."): t for n, t in self.weights.items()}
        e = self.embedding[torch.tensor(tokens)]
        normed = _norm(features, w["hidden_norm.weight"])
        x = torch.cat([_norm(e, w["input_layernorm.weight"]), normed], -1)
        attended = _attend(x, w)
        h = (normed if self.norm_before_residual else features) + attended
        y = _norm(h, w["post_attention_layernorm.weight"])
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        u = h + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        return _norm(u, w["norm.weight"]) @ w["lm_head.weight"].T, u

    def fuse(self, taps: Tensor) -> Tensor:
        """Hidden states of the target [T, k * N] -> g [T, N]."""
        return taps @ self.weights["fc.weight"].T

    def widen(self, logits: Tensor) -> Tensor:
        wide = torch.full((*logits.shape[:-1], tiny_models.VOCAB), float("-inf"))
        ids = self.weights["d2t"] + torch.arange(DRAFT_VOCAB)
        wide[..., ids] = logits
        return wide


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _attend(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    count = len(x)

    def heads(name: str, number: int) -> Tensor:
        return (x @ w[f"self_attn.{name}_proj.weight"].T).view(count, number, DIM)

    place = torch.arange(count)[:, None] * 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([f(place)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

    def turned(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat([-second, first], -1) * sin

    group = HEADS // KV_HEADS
    query = turned(heads("q", HEADS))
    key = turned(heads("k", KV_HEADS)).repeat_interleave(group, 1)
    value = heads("v", KV_HEADS).repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(DIM)
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), value)
    return out.reshape(count, HEADS * DIM) @ w["self_attn.o_proj.weight"].T
