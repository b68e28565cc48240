"""Start-up uses the C++ ops at once where they are built, and waits for them only with weights of
few bits."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import tiny_engine
import torch
from fake_graphs import FakeGraphs
from op_cases import require_cpu_ops
from tiny_models import save_checkpoint

from llmc.config import EngineConfig
from llmc.kernels.cpu import build as cpu_build
from llmc.runner.device import HostDevice
from llmc.startup import background, bind
from llmc.startup.resolve import pick_level
from llmc.startup.start import start_engine

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("bring_up"))


def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", device="cpu", max_model_len=32)


def test_built_kernels_serve_from_the_first_step(checkpoint: Path) -> None:
    if not cpu_build.load():
        pytest.skip("no C++ compiler here: the references serve")
    build = background.start_kernels(CPU)
    assert build is not None
    build.wait()
    assert background.kernels_are_built(build)
    started = start_engine(config(checkpoint))
    # A build that was found takes a moment; whatever the race, the better step is never lost.
    if started.upgrade is not None:
        assert started.upgrade.wait(60)
    assert "llmc_cpu" in started.runner.step.source


def test_weights_of_few_bits_wait_for_a_build(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_build.load():
        pytest.skip("no C++ compiler here: the references serve")

    class Slow:
        done = False

        def wait(self) -> None:
            self.done = True

    monkeypatch.setattr(background, "start_build", Slow)
    started = start_engine(dataclasses.replace(config(checkpoint), quantization="int8"))
    assert "build C++ ops" in [phase.name for phase in started.phases]
    assert started.upgrade is None and "llmc_cpu" in started.runner.step.source


def test_a_build_that_fails_is_survived(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        done = False

        def wait(self) -> None:
            self.done = True
            raise cpu_build.BuildError("x.cpp:1: fatal error: no header")

    monkeypatch.setattr(background, "start_build", Broken)
    started = start_engine(dataclasses.replace(config(checkpoint), quantization="int8"))
    assert "build C++ ops" in [phase.name for phase in started.phases]


def test_nobody_else_waits_for_a_build(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_build.load():
        pytest.skip("no C++ compiler here: the references serve")
    finished = threading.Event()

    class Unfinished:
        done = False
        progress = "building the C++ ops, 3 of 27 files"

    def slow_load() -> bool:
        assert finished.wait(60)
        return True

    monkeypatch.setattr(background, "start_build", Unfinished)
    monkeypatch.setattr(background, "load", slow_load)
    monkeypatch.setattr(cpu_build, "is_loaded", lambda: finished.is_set())
    started = start_engine(config(checkpoint))
    assert "3 of 27 files: slow until then" in next(
        p.detail for p in started.phases if p.name == "size cache"
    )
    finished.set()
    assert started.upgrade is not None and started.upgrade.wait(60)
    assert "llmc_cpu" in started.runner.step.source


def test_the_default_on_gpus_is_graphs_and_compiles_nothing_while_it_serves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_cpu_ops()
    monkeypatch.setattr(bind, "open_device", lambda device, **options: HostDevice(FakeGraphs()))
    default = pick_level(None, torch.device("cuda"))
    runners = [tiny_engine.start(checkpoint, opt_level=n).started for n in (0, default)]
    assert [one.runner.has_graphs for one in runners] == [False, True]
    assert runners[1].upgrade is None
    monkeypatch.setattr(background, "_with_inductor", lambda *args, **options: None)
    assert tiny_engine.start(checkpoint, opt_level=2).started.upgrade is not None
