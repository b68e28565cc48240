"""What a model is called in the API: a local one by its directory alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_model import MODEL_NAME, needs_model

from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.startup.model_files import load_config, resolve_model


@pytest.mark.parametrize("spelling", ["{0}", "{0}/", "{0}/../my-model", "."])
def test_a_local_model_is_called_like_its_directory(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(model)
    files = resolve_model(EngineConfig(model=spelling.format(model)))
    assert files.name == "my-model" and not files.is_default


@needs_model
def test_the_default_model_has_a_name() -> None:
    assert resolve_model(EngineConfig()).name == MODEL_NAME
    assert resolve_model(EngineConfig(model=MODEL_NAME)).name == MODEL_NAME


def test_an_error_repeats_the_path_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(model=str(tmp_path))
    with pytest.raises(CheckpointError, match="config.json of ") as caught:
        load_config(resolve_model(config), config)
    assert str(tmp_path) in str(caught.value)
