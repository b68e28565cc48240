"""Models whose own code calls torch's attention get the logits that this code computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from own_models import WIDTH, SmallConfig, SmallModel, assert_served_logits
from torch import Tensor, nn

from llmc.compiler.traceable import _attention

HEADS, DIM = 4, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _visible(query: Tensor) -> Tensor:
    return torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_visible(q))


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[2], q.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, mask.masked_fill(~_visible(q), float("-inf")))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], dropout_p=0.0, is_causal=True, enable_gqa=True
    )


FORMS: dict[str, Attend] = {f.__name__: f for f in (causal, masked, added, grouped)}


class OwnConfig(SmallConfig):
    model_type = "llmc-test-own-attention"
    form: str = "causal"


class OwnLayer(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        split = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).transpose(1, 3)
        q, k, v = (split[:, :, i] for i in range(3))
        attended = FORMS[self.form](q, k, v)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class OwnModel(SmallModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config, (OwnLayer(config.form) for _ in range(2)))


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    tf.AutoConfig.register(OwnConfig.model_type, OwnConfig, exist_ok=True)
    tf.AutoModelForCausalLM.register(OwnConfig, OwnModel, exist_ok=True)


@pytest.mark.parametrize("form", FORMS)
def test_the_stand_in_computes_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, HEADS, 5, DIM)
    want = FORMS[form](q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", _attention)
    torch.testing.assert_close(FORMS[form](q, k, v), want)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_models_code(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OwnModel(OwnConfig(form=form)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    assert_served_logits(tmp_path, lambda ids: model(ids, torch.arange(ids.shape[1])[None]).logits)
