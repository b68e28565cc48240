"""`llmc inspect` and `llmc check` on screen: numbers, verdicts, exit codes, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny_models import make_config, save_checkpoint

from llmc.check import check as check_module
from llmc.cli.inspect_show import ranges
from llmc.cli.main import main
from llmc.cli.verify import require_certificate
from llmc.config import EngineConfig
from llmc.errors import CompileError

FLAGS = ["--dtype", "float32", "--device", "cpu", "--block-size", "4"]
PLANTED = Path(__file__).parents[1] / "check" / "planted_passes.py"


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "shape"
    make_config("mixtral", num_hidden_layers=6, dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint("llama", tmp_path_factory.mktemp("check") / "tiny"))


@pytest.fixture(autouse=True)
def _own_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "cache_dir", lambda: tmp_path / "cache")


def test_inspect_prints_every_section_and_writes_the_page(
    config_only: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "graph.html"
    words = ["--memory", "1MiB", "--bandwidth", "10", "--graph", str(page)]
    assert main(["inspect", config_only, *FLAGS, *words]) == 0
    out, err = capsys.readouterr()
    for text in ("shape", "0-5", "2 of 4", "in 1 MiB", "10 GB/s", "fuse_norms"):
        assert text in out, text
    assert "2 of 6 layers were captured" in out
    assert not [line for line in out.splitlines() if line != line.rstrip() or len(line) > 120]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(page) in err.replace("\n", "")


def test_inspect_prints_json(config_only: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", config_only, *FLAGS, "--bandwidth", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_layers"] == 6 and found["layers"]["5"]["experts"]["num_experts"] == 4
    assert found["machine"]["bandwidth"] == 10e9
    assert found["fit"][0]["tokens_per_s"][0] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "--bandwidth", "0"], "--bandwidth must be above 0"),
        (["inspect", "--memory", "much"], "--memory must be a number of bytes"),
        (["inspect", "--graph", "/no/such/folder/x.html"], "does not exist"),
        (["inspect", "no/such/model/here"], "no model at"),
        (["check", "--longest-prompt", "0"], "--longest-prompt must be a positive integer"),
        (["check", "--extra-pass", "nothing"], "is not a pass"),
        (["check", "--disable-pass", "nothing"], "unknown pass"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_check_certifies_and_serve_takes_its_word(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", checkpoint, *FLAGS, "-O0"]) == 0
    out, _ = capsys.readouterr()
    assert "certified" in out and "NOT" not in out and "after layer 1" in out
    config = EngineConfig(
        model=checkpoint, dtype="float32", device="cpu", block_size=4, opt_level=0
    )
    with mock.patch.object(check_module, "check_model", side_effect=AssertionError):
        require_certificate(config)
    assert "certified on" in capsys.readouterr().err


def test_check_names_the_wrong_pass_and_serve_refuses(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = f"{PLANTED}:wrong_attention"
    assert main(["check", checkpoint, *FLAGS, "-O0", "--extra-pass", wrong]) == 1
    out, _ = capsys.readouterr()
    assert "NOT certified" in out
    assert "cause: pass wrong_attention, first seen at the output of layer 0" in out
    assert "run it with --disable-pass wrong_attention" in out
    config = EngineConfig(
        model=checkpoint,
        dtype="float32",
        device="cpu",
        block_size=4,
        opt_level=0,
        extra_passes=[wrong],
    )
    with pytest.raises(CompileError, match="not certified.*wrong_attention") as refused:
        require_certificate(config)
    assert "--disable-pass wrong_attention" in refused.value.hint  # type: ignore[attr-defined]


def test_serve_verifies_before_it_loads(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("starlette", reason="the server's dependencies are not installed")
    wrong = f"{PLANTED}:wrong_attention"
    words = [checkpoint, *FLAGS, "-O0", "--port", "0", "--extra-pass", wrong, "--verify"]
    with mock.patch("llmc.cli.serve_run.run_server", side_effect=AssertionError):
        assert main(["serve", *words]) == 2
    _, err = capsys.readouterr()
    assert "is not served" in err and "hint: serve it with --disable-pass wrong_attention" in err


def test_layers_are_named_by_ranges() -> None:
    assert ranges([-1, 0, 1, 2, 4, 6], 6) == "before, 0-2, 4, after"
    assert ranges([3], 6) == "3"
    assert ranges(range(0, 40, 2), 40) == "0, 2, 4, 6, ..., 38"
