"""The certificate of an encoder's architecture: a right one, and one whose positions are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from llmc.check.architecture import check_architecture
from llmc.compiler import heads
from llmc.config import EngineConfig


def config_in(path: Path, family: str, architecture: str, **fields: Any) -> EngineConfig:
    made = tf.AutoConfig.for_model(family, **fields)
    made.architectures = [architecture]
    made.save_pretrained(path)
    return EngineConfig(model=str(path))


def test_vectors_and_scores_are_certified(tmp_path: Path) -> None:
    windows = config_in(tmp_path / "a", "modernbert", "ModernBertModel", num_hidden_layers=4)
    assert check_architecture(windows).status == "certified"
    scores = config_in(
        tmp_path / "b", "xlm-roberta", "XLMRobertaForSequenceClassification", num_labels=1
    )
    assert check_architecture(scores).status == "certified"
    of_tokens = config_in(tmp_path / "c", "bert", "BertForTokenClassification", num_labels=3)
    assert check_architecture(of_tokens).status == "certified"


def test_wrong_positions_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path, "roberta", "RobertaModel")
    monkeypatch.setattr(heads, "first_position", lambda config: 0)
    found = check_architecture(config)
    assert found.status == "different" and "its vectors differ by" in found.reason
