"""The certificate of an architecture: made in a child process, kept, shown, and acted upon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import save_checkpoint

from llmc.check.architecture import check_architecture, is_rounding
from llmc.check.background import BackgroundCheck
from llmc.cli.verify import require_certificate
from llmc.config import EngineConfig
from llmc.errors import CompileError
from llmc.startup.architecture_certificate import (
    ArchitectureCertificate,
    ArchitectureCertificates,
    describe_status,
)
from llmc.startup.start import start_engine

pytestmark = pytest.mark.slow
PLANTED = Path(__file__).with_name("planted_passes.py")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty store in which the C++ ops of other runs are found."""
    from llmc.cache_dir import cache_dir
    from llmc.kernels.cpu.build import load

    load()  # the first test of a machine builds them, for all others too
    root = tmp_path / "cache"
    root.mkdir()
    for entry in cache_dir().iterdir() if cache_dir().is_dir() else ():
        if entry.name not in ("certificates", "programs", "configs"):
            (root / entry.name).symlink_to(entry)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(root))
    yield root


def config(path: Path, **options: Any) -> EngineConfig:
    given = {"dtype": "float32", "device": "cpu", "block_size": 4, "opt_level": 0} | options
    return EngineConfig(model=str(path), max_model_len=64, max_num_seqs=2, **given)


def check(given: EngineConfig, info: Any) -> ArchitectureCertificate:
    ended, found = threading.Event(), []
    with BackgroundCheck(given, info, lambda c: (found.append(c), ended.set())):
        assert ended.wait(600)
    [certificate] = found
    return certificate


@pytest.mark.parametrize(
    ("layers", "kl", "expected"),
    [
        ((3e-6, 6e-6, 1.2e-5, 3e-5, 1e-4), 9e-7, True),
        ((3e-6, 6e-6, 2e-4, 3e-4), 9e-7, False),  # a jump at one layer
        ((3e-5, 6e-5, 2e-4), 9e-7, False),  # from the first layer on
        ((3e-6, 6e-6, 1.2e-5, 3e-5, 1e-4), 1e-4, False),  # other probabilities
    ],
)
def test_rounding_that_layers_amplify_is_no_difference(
    layers: tuple[float, ...], kl: float, expected: bool
) -> None:
    found: Any = SimpleNamespace(
        layers=[SimpleNamespace(relative=relative) for relative in layers],
        logits=SimpleNamespace(kl_max=kl, top1=1.0, relative=layers[-1]),
        limit=SimpleNamespace(kl=1e-6, top1=1.0, relative=2e-5),
    )
    assert is_rounding(found) == expected


def test_a_wrong_pass_is_found_beside_the_engine_and_left_out_at_the_next_start(
    cache: Path, tmp_path: Path
) -> None:
    checkpoint = save_checkpoint("mistral", tmp_path / "model")
    given = config(checkpoint, extra_passes=[f"{PLANTED}:wrong_attention"])
    info = start_engine(given).info
    assert info.certificate_key and not info.disabled_passes
    assert describe_status(info, is_checked=True) == {"status": "pending"}
    assert describe_status(info, is_checked=False) == {"status": "not checked"}

    found = check(given, info)
    assert found.status == "different" and found.fixed_by == ("wrong_attention",)
    assert "wrong_attention" in str(found)
    shown = describe_status(info, is_checked=True)
    assert shown["status"] == "different" and "wrong_attention" in shown["reason"]
    with pytest.raises(CompileError, match="not certified.*wrong_attention") as refused:
        require_certificate(given)
    assert "--disable-pass wrong_attention" in refused.value.hint  # type: ignore[attr-defined]

    again = start_engine(given).info
    assert again.disabled_passes == ("wrong_attention",)
    assert "wrong_attention: off" in again.pass_reports
    cured = describe_status(again, is_checked=True)
    assert (cured["status"], cured["disabled_passes"]) == ("certified", ["wrong_attention"])
    kept_on = replace(given, passes={"wrong_attention": True})
    assert start_engine(kept_on).info.disabled_passes == ()


def test_a_right_model_is_certified_and_the_result_is_kept(cache: Path, tmp_path: Path) -> None:
    given = config(save_checkpoint("mistral", tmp_path / "model"))
    info = start_engine(given).info
    found = check_architecture(given)
    assert (found.status, found.reason, found.fixed_by) == ("certified", "", ())
    ArchitectureCertificates(cache).save(info.certificate_key, found)
    assert describe_status(info, is_checked=True)["status"] == "certified"
    assert check(given, info) == found, "known at once"


def test_a_damaged_certificate_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArchitectureCertificates(tmp_path)
    store.save("key", ArchitectureCertificate.not_checked("no reason"))
    kept = store.load("key")
    assert kept is not None and str(kept).endswith("with transformers: no reason")
    (tmp_path / "certificates" / "architectures" / "key.json").write_text('{"status": "fine"}')
    assert store.load("key") is None
    assert "re-creating it" in caplog.text
