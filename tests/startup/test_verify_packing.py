"""A model that mixes tokens outside its attention, or forgets, is refused and never kept."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import save_checkpoint
from torch import Tensor

from llmc.compiler.cache import ProgramCache, config_digest
from llmc.config import EngineConfig
from llmc.errors import CompileError
from llmc.startup.start import Started, start_engine


def _shifted(x: Tensor) -> Tensor:
    """Each token's predecessor, for every number of tokens by the same code."""
    return torch.nn.functional.pad(x, (0, 0, 1, 0))[:, : x.shape[1]]


class MixingConfig(tf.LlamaConfig):
    model_type = "llmc-test-mixing"
    banned: float | None = None  # the logits of the last tokens


class MixingModel(tf.LlamaForCausalLM):
    """Each token's embedding takes half of its predecessor's, across request borders too."""

    config_class = MixingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = _Shifted(config.vocab_size, config.hidden_size)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self.config.banned is not None:
            out.logits[..., 80:] = self.config.banned
        return out


class _Shifted(torch.nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return x + 0.5 * _shifted(x)


class FirstTokenConfig(tf.LlamaConfig):
    model_type = "llmc-test-first-token"


class FirstTokenModel(tf.LlamaForCausalLM):
    """The first token of a step, whichever it is, has logits of zero."""

    config_class = FirstTokenConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits[:, 0] = 0
        return out


class ForgettingConfig(tf.LlamaConfig):
    model_type = "llmc-test-forgetting"


class ForgettingModel(tf.LlamaForCausalLM):
    """The same within a request: right when packed, wrong where a prompt is cut."""

    config_class = ForgettingConfig

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        x = self.model.embed_tokens(input_ids)
        x = x + 0.5 * _shifted(x) * (position_ids != 0)[..., None]
        return super().forward(inputs_embeds=x, position_ids=position_ids, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    tf.AutoConfig.register(ForgettingConfig.model_type, ForgettingConfig, exist_ok=True)
    tf.AutoModelForCausalLM.register(ForgettingConfig, ForgettingModel, exist_ok=True)
    tf.AutoConfig.register(FirstTokenConfig.model_type, FirstTokenConfig, exist_ok=True)
    tf.AutoModelForCausalLM.register(FirstTokenConfig, FirstTokenModel, exist_ok=True)
    tf.AutoConfig.register(MixingConfig.model_type, MixingConfig, exist_ok=True)
    tf.AutoModelForCausalLM.register(MixingConfig, MixingModel, exist_ok=True)


def start(path: Path) -> Started:
    return start_engine(
        EngineConfig(model=str(path), dtype="float32", device="cpu", max_model_len=32, block_size=4)
    )


def config_of(kind: type[tf.LlamaConfig], **fields: Any) -> tf.LlamaConfig:
    return kind(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **fields,
    )


@pytest.mark.parametrize("banned", [-float("inf"), -1e4, torch.finfo(torch.float32).min])
def test_banned_tokens_do_not_hide_what_a_model_mixes(banned: float, tmp_path: Path) -> None:
    config = config_of(MixingConfig, banned=banned)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CompileError, match="mixes the tokens of requests"):
        start(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (MixingConfig, "mixes the tokens of requests"),
        (FirstTokenConfig, "mixes the tokens of requests"),
        (ForgettingConfig, "loses information from earlier steps"),
    ],
)
def test_a_model_that_mixes_or_forgets_is_refused_every_time(
    kind: type[tf.LlamaConfig], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgramCache, "__init__", lambda self, root: _use(self, tmp_path))
    config = config_of(kind)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for _ in range(2):
        with pytest.raises(CompileError, match=reason):
            start(tmp_path / "model")
    assert not list((tmp_path / "programs").glob("*")), "a refused program was kept"


def test_a_sound_program_is_kept_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgramCache, "__init__", lambda self, root: _use(self, tmp_path))
    path = save_checkpoint("llama", tmp_path / "model")
    first, second = start(path), start(path)
    details = [next(p.detail for p in s.phases if p.name == "compile") for s in (first, second)]
    assert "from cache" not in details[0]
    assert "from cache" in details[1]
    [entry] = (tmp_path / "programs").glob("*")
    (entry / "graph.json").write_text("{", encoding="utf-8")
    third = start(path)
    assert "from cache" not in next(p.detail for p in third.phases if p.name == "compile")


def test_a_registered_model_is_keyed_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "modeling_mixing.py"
    monkeypatch.setattr(inspect, "getfile", lambda cls: str(code))
    code.write_text("a = 1", encoding="utf-8")
    ours, theirs = config_digest(MixingConfig()), config_digest(tf.LlamaConfig())
    code.write_text("a = 2", encoding="utf-8")
    assert config_digest(MixingConfig()) != ours, "a graph of the old code would be served"
    assert config_digest(tf.LlamaConfig()) == theirs


def _use(cache: Any, root: Path) -> None:
    cache._root = root / "programs"
