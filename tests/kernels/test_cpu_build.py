"""The cache of the C++ library: damage is repaired, a missing compiler is survived and told."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from llmc.kernels.cpu import build, compile
from llmc.kernels.cpu.levels import X86_64

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
    library = build.start_build().wait()
    made = calls(fake_compiler)
    assert (
        library.read_text() == "built\n" and made == len(compile.sources()) + 2
    )  # the stub, the library
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


def test_concurrent_builders_agree(fake_compiler: Path) -> None:
    builds = [build.start_build() for _ in range(4)]
    assert len({b.wait() for b in builds}) == 1


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
