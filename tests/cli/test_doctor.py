"""`llmc doctor`: what it finds, and what it says of what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.main import main
from llmc.kernels.cpu import build
from llmc.kernels.cpu.compile import write_manifest
from llmc.load_test import doctor
from llmc.load_test.required_packages import Finding, check_packages

# `llmc doctor` in an interpreter that does not find the package named by the first argument.
WITHOUT = """
import importlib.metadata
import sys

[_, without] = sys.argv

class Finder:
    def __init__(self, inner):
        self.inner = inner

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != without:
            return self.inner.find_spec(name, path, target)

sys.meta_path = [Finder(one) for one in sys.meta_path]

def version(name):
    if name == without:
        raise importlib.metadata.PackageNotFoundError(name)
    return "99"

from llmc.load_test import required_packages

required_packages.version = version
required_packages.requires = lambda name: [f"{without}>=1", "typer"]

from llmc.cli.main import main

sys.exit(main(["doctor"]))
"""


def test_this_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    for name in ("instructions", "C++ ops", "threads", "memory", "GPU", "torch", "typer"):
        assert any(line.split()[1:2] == [name.split()[0]] for line in lines), name
    assert all(line.split()[0] in ("ok", "note", "missing", "->") for line in lines[:9])


def test_huge_pages(tmp_path: Path) -> None:
    file = tmp_path / "enabled"
    assert list(doctor._huge_pages(file)) == []
    file.write_text("always [madvise] never\n")
    [found] = doctor._huge_pages(file)
    assert found == Finding(name="huge pages", value="madvise")
    file.write_text("always madvise [never]\n")
    [found] = doctor._huge_pages(file)
    assert "echo madvise" in found.advice


def test_packages_that_are_missing_or_too_old() -> None:
    found = {
        one.name: one
        for one in check_packages(
            [
                "torch>=99",
                "no-such-package>=1",
                "typer",
                "numpy; python_version < '3'",
                "no-such-exporter>=1; extra == 'otel'",
            ]
        )
    }
    assert found["torch"].is_needed and "torch>=99" in found["torch"].advice
    assert found["no-such-package"].value == "not installed"
    assert found["typer"].is_ok and "numpy" not in found
    assert found["extra otel"].advice == "for traces: pip install 'llmc-engine[otel]'"
    assert not found["extra otel"].is_needed


def test_a_cache_that_is_not_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "cache", Path("/proc/cache")):
        monkeypatch.setenv("LLMC_CACHE_DIR", str(folder))
        assert "GGUF files such as the default model can't be served" in doctor._folder().advice
        assert str(folder.parent) in doctor._kernels().advice
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))
    assert doctor._folder().is_ok and not list(tmp_path.glob("tmp*"))


def test_missing_things_are_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = Finding(name="x", value="none", advice="install it", is_needed=True)
    monkeypatch.setattr(doctor, "examine", lambda: iter([needed]))
    assert main(["doctor"]) == 1
    assert "-> install it" in capsys.readouterr().out


def test_packages_that_the_report_itself_would_use() -> None:
    """In a process that can't import the package, which also appears as not installed."""
    for package in ("pydantic", "psutil", "torch"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", WITHOUT, package], capture_output=True, text=True
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        [index] = [i for i, line in enumerate(lines) if line.startswith(f"missing {package} ")]
        assert f"-> pip install '{package}" in lines[index + 1]
        assert lines[-1] == "1 missing"
        assert done.stdout.startswith("ok" if package == "pydantic" else "note    machine")


def test_where_the_ops_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the package or an earlier start, else from the compiler that would build them."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "echo mine")  # answers --version
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "nothing")
    assert doctor._kernels().value == "built at the first start, by echo mine"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "apt install" in doctor._kernels().advice
    library = tmp_path / "ops.so"
    library.write_text("made elsewhere")
    level = build.pick_level()
    if level is None:
        pytest.skip("no level of instructions fits this processor")
    write_manifest(library, [level])
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    assert doctor._kernels() == Finding(name="C++ ops", value=str(library))


def test_a_level_that_does_not_exist_ends_no_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CPU_TARGET", "native")
    processor, threads, *_ = doctor.examine()
    assert processor.is_needed and "is not an instruction set level" in processor.advice
    assert threads.name == "threads"


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    has_tool: Any = {"nvidia-smi": "/usr/bin/nvidia-smi"}.get
    monkeypatch.setattr(shutil, "which", has_tool)
    assert "torch with CUDA" in doctor._gpu().advice


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert doctor._folder().is_ok
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "LLMC_CACHE_DIR" in doctor._folder().advice
