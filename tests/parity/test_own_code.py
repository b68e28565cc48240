"""Models with their own code, as repositories have it, get the logits that this code computes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from own_models import CONTEXT, WIDTH, SmallConfig, SmallModel, assert_served_logits
from tiers import tiered
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as by_another_name
from transformers.modeling_outputs import CausalLMOutput

from llmc.check import check
from llmc.compiler.build import build
from llmc.compiler.capture import capture
from llmc.config import EngineConfig
from llmc.errors import CompileError

HEADS, DIM = 4, 8
LOG, THEIR_LOG = logging.getLogger(__name__), tf.logging.get_logger("transformers")
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


class OwnConfig(SmallConfig):
    model_type = "llmc-test-own-code"
    form: str = ""


def _frequencies() -> Tensor:
    return 100.0 ** (-torch.arange(0, DIM, 2).float() / DIM)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def tables(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Computed when the module is constructed, cut to the text, and read by position."""
    cos, sin = (x[: q.shape[2]].to(q.dtype)[positions][:, None] for x in (layer.cos, layer.sin))
    return _causal(_turned(q, cos, sin), _turned(k, cos, sin), v)


class Rotary(nn.Module):
    """Computes its tables again in the first call, for as many tokens as it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", _frequencies(), persistent=False)
        self._compute(CONTEXT)
        self.rows: int | None = None

    def _compute(self, rows: int) -> None:
        self.rows = rows
        angles = torch.outer(torch.arange(rows).float(), self.frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        if self.rows is None or seq_len > self.rows:
            self._compute(seq_len)
        return self.cos[:seq_len].to(x.dtype), self.sin[:seq_len].to(x.dtype)


def first_call(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (x[positions][:, None] for x in layer.rotary(v, seq_len=q.shape[2]))
    return _causal(_turned(q, cos, sin), _turned(k, cos, sin), v)


def if_computed(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Asks whether its tables were computed when the module was constructed."""
    if layer.cos[0, 0] == 0 or not (layer.sin[1:].abs() > 0).any():
        angles = torch.zeros(CONTEXT, DIM, device=q.device)
        layer.cos, layer.sin = angles.cos(), angles.sin()
    return tables(layer, q, k, v, positions)


def saved_mask(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    tokens = q.shape[2]
    scores = q @ k.mT / math.sqrt(DIM)
    shown = layer.mask[:, :, :tokens, :tokens]
    return scores.masked_fill(shown == 0, float("-inf")).softmax(-1) @ v


def mask(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    tokens = q.shape[2]
    shown = layer.is_shown[:tokens, :tokens]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=shown)


def slopes(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    index = torch.arange(q.shape[2], device=q.device)
    bias = (index - index[:, None]) * layer.slopes[:, None, None]
    bias = bias.masked_fill(index > index[:, None], float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def autocast(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    with torch.autocast(device_type=q.device.type, enabled=False):
        angles = positions[:, None, :, None].float() * _frequencies().to(q.device)
        angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    return _causal(_turned(q, cos, sin), _turned(k, cos, sin), v)


def messages(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    LOG.info("attention of %d tokens", q.shape[2])
    THEIR_LOG.warning_once("this method is deprecated")
    return _causal(q, k, v)


def loss(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Leaves terms of a loss in attributes, of which one is read."""
    layer.loss = q.square().mean()
    layer.sum = layer.loss + k.sum()
    return _causal(q, k, v)


def another_name(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return by_another_name(q, k, v, is_causal=True)


def torchs_module(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    x = (q + k + v).transpose(1, 2).flatten(2)
    out = layer.attention(x, x, x, attn_mask=later, need_weights=False)[0]
    return out.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def cache(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    k, v = tf.DynamicCache().update(k, v, 0)
    return _causal(q, k, v)


def uninitialized(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    tokens = q.shape[2]
    ignored = torch.empty(HEADS, tokens, tokens, device=q.device, dtype=q.dtype)
    scores = torch.baddbmm(ignored, q[0], k[0].mT, beta=0.0, alpha=DIM**-0.5)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v[0])[None]


def two_products(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Scores are sums of a part for each head and one that all heads share, as of latents."""
    own, shared = q.split((DIM - 2, 2), -1), k[:, :1].split((DIM - 2, 2), -1)
    scores = own[1] @ shared[1].mT + own[0] @ k[..., : DIM - 2].mT
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (scores * 0.3).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def of_latents(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """All heads share keys, whose first part is the values."""
    own, shared = q.split((DIM - 2, 2), -1), k[:, 0].split((DIM - 2, 2), -1)
    scores = own[1] @ shared[1].unsqueeze(1).mT + own[0] @ shared[0].unsqueeze(-3).mT
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    weights = (scores * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = torch.einsum("bhql,blc->bhqc", weights, shared[0])
    return torch.cat((mixed, v[..., :2] * 0), -1)


FORMS: dict[str, Attend] = {
    form.__name__: form
    for form in (
        tables,
        first_call,
        if_computed,
        saved_mask,
        mask,
        slopes,
        autocast,
        messages,
        loss,
        another_name,
        torchs_module,
        cache,
        uninitialized,
        two_products,
        of_latents,
    )
}


class OwnLayer(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if form == "torchs_module":
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        if form == "first_call":
            self.rotary = Rotary()
        angles = torch.outer(torch.arange(CONTEXT).float(), _frequencies()).repeat(1, 2)
        shown = torch.ones(CONTEXT, CONTEXT).tril()
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("is_shown", shown.bool(), persistent=False)
        self.register_buffer("mask", shown.view(1, 1, CONTEXT, CONTEXT))
        self.register_buffer("slopes", 0.5 ** torch.arange(1, HEADS + 1))
        # only the checkpoint has the values of these
        self.register_buffer("gain", torch.empty(WIDTH))
        self.register_buffer("drawn", torch.rand(WIDTH))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        split = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).transpose(1, 3)
        q, k, v = (split[:, :, i] for i in range(3))
        attended = FORMS[self.form](self, q, k, v, positions)
        return x * self.gain + self.out(attended.transpose(1, 2).flatten(2)) + self.drawn


class OwnModel(SmallModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config, (OwnLayer(config.form) for _ in range(2)))


class OtherConfig(OwnConfig):
    model_type = "llmc-test-own-signature"


class OtherModel(OwnModel):
    """Takes only its tokens, by another name."""

    config_class = OtherConfig

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        return super().forward(idx)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    for config, model in ((OwnConfig, OwnModel), (OtherConfig, OtherModel)):
        tf.AutoConfig.register(config.model_type, config, exist_ok=True)
        tf.AutoModelForCausalLM.register(config, model, exist_ok=True)


@pytest.mark.parametrize(
    "form",
    tiered(
        FORMS,
        "tables",
        "if_computed",
        "slopes",
        "loss",
        "torchs_module",
        "uninitialized",
        "of_latents",
    ),
)
def test_logits_are_those_of_the_models_code(form: str, tmp_path: Path) -> None:
    _compare(OwnModel(OwnConfig(form=form)), tmp_path)


def test_code_that_takes_only_its_tokens(tmp_path: Path) -> None:
    _compare(OtherModel(OtherConfig(form="another_name")), tmp_path)


class Remembering(nn.Module):
    """Uses a number of the tokens of an earlier call."""

    def __init__(self, only_counts: bool = False) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.attention, self.only_counts = OwnLayer("another_name"), only_counts

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.last is not None:
            x = x + (1 if self.only_counts else self.last)
        self.last = x.mean()
        return self.attention(x, positions)


@pytest.mark.parametrize("only_counts", [False, True])
def test_numbers_of_earlier_calls_are_refused(only_counts: bool) -> None:
    with pytest.raises(CompileError, match="Remembering.last may be read by a later call"):
        _capture(lambda: Remembering(only_counts))


def by_assignment(layer: Any, x: Tensor) -> None:
    layer.steps = layer.steps + 1


def in_place(layer: Any, x: Tensor) -> None:
    layer.steps[:1] += x.shape[1]


def in_place_data(layer: Any, x: Tensor) -> None:
    layer.steps.data.add_(1)


def before_branch(layer: Any, x: Tensor) -> None:
    layer.steps.mul_(x.sum() > 0)


def nothing(layer: Any, x: Tensor) -> None:
    pass


class CountingLayer(nn.Module):
    """Branches on a number that it changes."""

    def __init__(self, change: Callable[[Any, Tensor], None], is_saved: bool = False) -> None:
        super().__init__()
        self.change = change
        self.attention = OwnLayer("another_name")
        self.register_buffer("steps", torch.tensor([2, 1]), persistent=is_saved)
        self.register_buffer("is_scaled", torch.tensor(False), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.change is before_branch:
            self.change(self, x)
        if self.steps[0] > 3 or self.is_scaled:
            x = x * 77
        if self.change is not before_branch:
            self.change(self, x)
        return self.attention(x, positions)


@pytest.mark.parametrize("change", [by_assignment, in_place, in_place_data, before_branch])
def test_branches_on_what_forward_changes_are_refused(change: Any) -> None:
    with pytest.raises(CompileError, match="branches on the value of"):
        _capture_counting(change)


def test_branches_on_what_checkpoints_have_are_refused() -> None:
    with pytest.raises(CompileError, match="branches on the value of a tensor"):
        _capture_counting(nothing, is_saved=True)


def test_branches_on_what_the_constructor_computes() -> None:
    assert "77" not in _capture_counting(nothing)


def _capture_counting(change: Any, is_saved: bool = False) -> str:
    return _capture(lambda: CountingLayer(change, is_saved))


def _capture(layer: Callable[[], nn.Module]) -> str:
    """The code of the graph of a model with this layer."""

    def init(model: OwnModel, config: OwnConfig) -> None:
        SmallModel.__init__(model, config, [layer()])

    with mock.patch.object(OwnModel, "__init__", init):
        built = build(OwnConfig(), torch.float32)
    return capture(built, torch.device("cpu")).graph.code


MODELS = {
    "own": lambda: OwnModel(OwnConfig(form="tables")),
    "other": lambda: OtherModel(OtherConfig(form="mask")),
}


@pytest.mark.parametrize(
    ("model", "dtype"),
    tiered(
        [(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16")],
        ("own", "float32"),
        ("other", "bfloat16"),
    ),
)
def test_it_is_certified(model: str, dtype: str, tmp_path: Path) -> None:
    """transformers leaves uninitialized what the constructor computes."""
    _save(MODELS[model](), tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype=dtype, device="cpu", opt_level=0, block_size=4)
    with mock.patch.object(check, "cache_dir", return_value=tmp_path):
        assert check.check_model(config).certified


def _save(model: OwnModel, path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.eval().parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    for layer in model.layers:
        layer.gain.uniform_(0.5, 2, generator=generator)
    model.save_pretrained(path)


def _compare(model: OwnModel, path: Path) -> None:
    _save(model, path)
    assert_served_logits(path, lambda ids: model(ids).logits)
