"""The cache of the C++ library: damage is repaired, a missing compiler is survived and reported."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.kernels.cpu import build, compile
from llmc.kernels.cpu.levels import X86_64, pick_level

LEVELS = X86_64[:1]


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its arguments where its output goes, and counts its calls."""
    script = tmp_path / "cxx"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n'
        f"echo run >> {tmp_path}/calls\n"
        f"if [ -e {tmp_path}/broken ]; then\n"
        "  echo 'x.cpp:1: fatal error: no header' >&2; exit 1\n"
        "fi\n"
        f'case "$*" in *-shared*) if [ -e {tmp_path}/unlinked ]; then exit 1; fi;; esac\n'
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo built > "$2"; fi; shift; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def calls(folder: Path) -> int:
    path = folder / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_second_build_finds_the_first(fake_compiler: Path) -> None:
    assert build.find_library() is None
    library = build.start_build().wait()
    assert build.find_library() == library
    made = calls(fake_compiler)
    assert library.read_text() == "built\n"
    assert made == len(compile.sources()) + 4  # the headers twice, the stub, the library
    assert build.start_build().wait() == library and calls(fake_compiler) == made
    cache = fake_compiler / "cache" / "cpu"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.iterdir()] == [library.parent.name]  # nothing left over


def test_a_damaged_library_is_built_again(
    fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = build.start_build().wait()
    library.write_text("bu")
    with caplog.at_level(logging.WARNING):
        assert build.start_build().wait().read_text() == "built\n"
    assert "damaged" in caplog.text


def test_a_build_that_was_ended_goes_on_where_it_stopped(fake_compiler: Path) -> None:
    (fake_compiler / "unlinked").touch()
    with pytest.raises(build.BuildError):
        build.start_build().wait()
    made = calls(fake_compiler)
    assert made == len(compile.sources()) + 3  # the headers twice, the stub, which failed
    (fake_compiler / "unlinked").unlink()
    library = build.start_build().wait()
    assert calls(fake_compiler) == made + 2  # the stub, the library
    assert [path.name for path in library.parents[1].iterdir()] == [library.parent.name]


def test_what_a_killed_build_left_is_removed_by_a_later_start(fake_compiler: Path) -> None:
    library = build.start_build().wait()
    killed, running = (library.parents[1] / name for name in ("tmp-killed", "tmp-running"))
    for folder in (killed, running):
        folder.mkdir()
    os.utime(killed, (0, 0))
    assert build.start_build().wait() == library
    assert running.exists() and not killed.exists()


def test_concurrent_builders_agree(fake_compiler: Path) -> None:
    builds = [build.start_build() for _ in range(4)]
    assert len({b.wait() for b in builds}) == 1


def test_several_processes_compile_every_file_once(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_library = build.compile_library
    waiting: list[build.Build] = []

    def joined(*args: Any, **options: Any) -> str | None:
        monkeypatch.setattr(build, "compile_library", compile_library)
        waiting.append(build.Build(pick_level(), may_be_prebuilt=False))
        time.sleep(0.3)  # a second builder without a lock would start meanwhile
        return compile_library(*args, **options)

    monkeypatch.setattr(build, "compile_library", joined)
    library = build.Build(pick_level(), may_be_prebuilt=False).wait()
    assert waiting[0].wait() == library
    assert calls(fake_compiler) == len(compile.sources()) + 4
    assert [path.name for path in library.parents[1].iterdir()] == [library.parent.name]


def test_one_that_another_process_overtook_takes_its_library(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has put the objects away, so this one can't put down its own."""
    monkeypatch.setattr(build, "_try_lock", lambda _: True)  # a file system without locks
    compile_library = build.compile_library

    def overtaken(*args: Any, **options: Any) -> str | None:
        monkeypatch.setattr(build, "compile_library", compile_library)
        build.Build(pick_level(), may_be_prebuilt=False).wait()
        return compile_library(*args, **options)

    monkeypatch.setattr(build, "compile_library", overtaken)
    library = build.Build(pick_level(), may_be_prebuilt=False).wait()
    assert library.read_text() == "built\n"
    cache = fake_compiler / "cache" / "cpu"
    assert [path.name for path in cache.iterdir()] == [library.parent.name]


def test_the_key_covers_compiler_and_sources(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toolchain = compile.find_toolchain()
    assert toolchain is not None
    other = compile.Toolchain(compiler=toolchain.compiler, version="fake 2.0")
    copy = tmp_path / "sources"
    shutil.copytree(compile.SOURCES, copy)
    keys = {toolchain.key(LEVELS), other.key(LEVELS)}
    monkeypatch.setattr(compile, "SOURCES", copy)
    assert toolchain.key(LEVELS) in keys
    with (copy / "vec.h").open("a") as file:
        file.write("// more\n")
    keys |= {toolchain.key(LEVELS), toolchain.key(X86_64[1:2]), toolchain.key(X86_64[:2])}
    assert len(keys) == 5


@pytest.fixture
def prebuilt(fake_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that came with the package, for the level in use."""
    level = pick_level()
    if level is None:
        pytest.skip("no level of instructions fits this processor")
    folder = fake_compiler / "prebuilt"
    folder.mkdir()
    (folder / "ops.so").write_text("made elsewhere")
    compile.write_manifest(folder / "ops.so", [level])
    monkeypatch.setattr(build, "PREBUILT", folder)
    return folder


def test_the_library_of_a_wheel_needs_no_compiler(
    prebuilt: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert build.is_obtainable()
    assert build.find_library() == prebuilt / "ops.so"
    assert build.start_build().wait() == prebuilt / "ops.so"
    assert not (fake_compiler / "cache" / "cpu").exists()


@pytest.mark.parametrize(
    "fault,reason",
    [
        ("truncated", "is damaged; building another"),
        ("no manifest", "is damaged; building another"),
        ("other sources", "was built from another version of its sources; building another"),
        ("other levels", "has no kernels for"),
    ],
)
def test_a_library_that_does_not_fit_is_not_used(
    prebuilt: Path, fake_compiler: Path, caplog: pytest.LogCaptureFixture, fault: str, reason: str
) -> None:
    manifest = json.loads((prebuilt / "ops.json").read_text())
    if fault == "truncated":
        (prebuilt / "ops.so").write_text("made")
    elif fault == "no manifest":
        (prebuilt / "ops.json").write_text("{")
    else:
        manifest.update({"sources": "0"} if fault == "other sources" else {"levels": []})
        (prebuilt / "ops.json").write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING):
        assert build.start_build().wait().read_text() == "built\n"
    assert len(caplog.records) == 1 and reason in caplog.text


@pytest.mark.usefixtures("unloaded")
def test_a_library_that_cannot_be_loaded_is_replaced(
    prebuilt: Path, fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is whole, but no shared library; nor is what the fake compiler makes instead."""
    with caplog.at_level(logging.WARNING):
        assert build.load() is False
    assert "can't load" in caplog.text and "several times slower" in caplog.text
    assert (prebuilt / "ops.so").exists() and calls(fake_compiler) > 0


def test_the_log_says_how_far_a_build_is(
    fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = len(compile.sources())
    with caplog.at_level(logging.INFO):
        build.start_build().wait()
    lines = [r.getMessage() for r in caplog.records if "building the C++ ops" in r.getMessage()]
    assert len(lines) == 5 and lines[-1] == f"building the C++ ops, {count} of {count} files"


def test_torchs_own_headers_declare_the_same_functions(tmp_path: Path) -> None:
    toolchain = compile.find_toolchain()
    if toolchain is None:
        pytest.skip("no C++ compiler here")
    headers = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")
    source = tmp_path / "both.cpp"
    source.write_text("".join(f"#include <{name}>\n" for name in (*headers, "torch_abi.h")))
    include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{compile.SOURCES}"]
    assert compile.run_all([[*toolchain.compiler, *flags, str(source)]], tmp_path, None) is None


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_state", {})


@pytest.mark.usefixtures("unloaded")
def test_the_compilers_error_is_told_once(
    fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (fake_compiler / "broken").touch()
    with caplog.at_level(logging.WARNING):
        assert build.load() is False and build.load() is False
    assert len(caplog.records) == 1
    assert "x.cpp:1: fatal error: no header" in caplog.text and not build.is_loaded()


def test_a_compiler_that_says_nothing(fake_compiler: Path) -> None:
    """On a full disk, its message does not reach the file for it."""
    (fake_compiler / "unlinked").touch()
    with pytest.raises(build.BuildError, match=r"exit code 1, without a message; .* MiB free"):
        build.start_build().wait()


@pytest.mark.usefixtures("unloaded")
def test_no_compiler_means_references(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with caplog.at_level(logging.WARNING):
        assert build.load() is False
    assert "install the package g++" in caplog.text and "several times slower" in caplog.text


def test_a_cache_of_someone_else_is_refused(
    fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 987654)
    with pytest.raises(build.BuildError, match="set LLMC_CACHE_DIR"):
        build.start_build().wait()
