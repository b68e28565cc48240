"""Compiles the C++ ops once per machine, keeps the library, and loads it into torch.

The library lives in `<cache>/cpu/<key>/ops.so`, beside a digest of it; the key covers everything
that it depends on, the level of instructions too. A build is made aside and renamed into place, so
any number of processes may build at once. `start_build()` returns at once; `load()` waits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llmc.errors import LlmcError
from llmc.kernels.cpu.compile import Toolchain, compile_library, find_toolchain
from llmc.kernels.cpu.levels import Level, pick_level

_log = logging.getLogger("llmc.kernels.cpu")
_lock = threading.Lock()
_state: dict[str, bool] = {}  # "loaded": what load() returned
_builds: list[Build] = []  # the newest one, if any
_start_lock = threading.Lock()
_STALE_SECONDS = 3600


class BuildError(LlmcError):
    """The C++ ops can't be built here; the message holds the compiler's first error."""


def cache_dir() -> Path:
    """Where everything that is compiled is kept: $LLMC_CACHE_DIR, else ~/.cache/llmc."""
    given = os.environ.get("LLMC_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "llmc"


def cache_root() -> Path:
    """The folder of `cache_dir` for this module, made and checked."""
    root = cache_dir()
    folder = root / "cpu"
    for path in (root, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
        if info.st_uid != os.getuid():
            raise BuildError(
                f"the cache folder {path} belongs to user {info.st_uid}, so code in it can't be "
                "trusted; set LLMC_CACHE_DIR to a folder of your own"
            )
        if info.st_mode & 0o077:
            path.chmod(0o700)
    return folder


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(folder: Path) -> bool:
    """Whether the library is there and is what its builder wrote (a torn one would crash us)."""
    library, digest = folder / "ops.so", folder / "ops.sha256"
    return library.is_file() and digest.is_file() and digest.read_text() == _digest(library)


def _remove_stale(cache: Path) -> None:
    """Delete what builders that died have left."""
    for path in cache.glob("tmp-*"):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _publish(made: Path, folder: Path) -> None:
    """Rename a finished build into place; one that another process put there first serves too."""
    try:
        made.rename(folder)
    except OSError:
        if not _is_whole(folder):
            raise


class Build:
    """A build in progress, or one already in the cache. `level`: None where none fits."""

    def __init__(self, level: Level | None) -> None:
        self.level = level
        self._folder: Path | None = None
        self._error: BuildError | None = None
        self._thread = threading.Thread(target=self._run, name="llmc-cpu-build", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._folder = self._make(find_toolchain(), self.level)
        except BuildError as error:
            self._error = error
        except OSError as error:
            self._error = BuildError(f"the C++ ops could not be built: {error}")

    @staticmethod
    def _make(toolchain: Toolchain | None, level: Level | None) -> Path:
        if level is None:
            raise BuildError("they need the instructions of x86-64-v3 (AVX2) or an aarch64 CPU")
        if toolchain is None:
            raise BuildError("no C++ compiler found; install g++ or clang++, or name one in $CXX")
        cache = cache_root()
        folder = cache / toolchain.key([level])
        if folder.exists():
            if _is_whole(folder):
                return folder
            _log.warning("the library in %s is damaged; building it again", folder)
            shutil.rmtree(folder, ignore_errors=True)
        _remove_stale(cache)
        made = Path(tempfile.mkdtemp(prefix="tmp-", dir=cache))
        try:
            error = compile_library(toolchain, [level], made / "ops.so")
            if error is not None:
                raise BuildError(f"{toolchain.compiler[0]} failed: {error}")
            (made / "ops.sha256").write_text(_digest(made / "ops.so"))
            _publish(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return folder

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The library's path, once it is there. Raises BuildError."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._folder is not None, "a build ends with a folder or an error"
        return self._folder / "ops.so"


def start_build() -> Build:
    """Begin to build, or to find the cached library; compilers run beside this process.

    While a build is under way it is the one that is returned. Raises ConfigError where
    $LLMC_CPU_TARGET is wrong.
    """
    level = pick_level()
    with _start_lock:
        if not _builds or _builds[-1].done:
            _builds[:] = [Build(level)]
        return _builds[-1]


def is_loaded() -> bool:
    """Whether `torch.ops.llmc_cpu` can be called."""
    return _state.get("loaded", False)


def _load_library() -> None:
    from llmc.kernels.cpu.impls import declare_ops

    load_library: Callable[[str], None] = torch.ops.load_library  # untyped in torch
    build = start_build()
    path = build.wait()
    try:
        load_library(str(path))
    except OSError as error:  # whole, yet unfit: such as for a libc that was replaced since
        _log.warning("can't load %s (%s); building it again", path, error)
        shutil.rmtree(path.parent, ignore_errors=True)
        build = start_build()
        path = build.wait()
        load_library(str(path))
    assert build.level is not None, "what was built has a level"
    use_level = ctypes.CDLL(str(path)).llmc_use_level
    use_level.argtypes, use_level.restype = [ctypes.c_char_p], ctypes.c_bool
    if not use_level(build.level.name.encode()):
        raise BuildError(f"{path} has no kernels for {build.level.name}")
    declare_ops()


def load() -> bool:
    """Build if needed and load the C++ ops. False, after one warning, where that is impossible.

    Raises ConfigError where $LLMC_CPU_TARGET is wrong.
    """
    with _lock:
        if "loaded" not in _state:
            try:
                _load_library()
                _state["loaded"] = True
            except (BuildError, OSError) as error:
                _log.warning("CPU ops run from their slow references: %s", error)
                _state["loaded"] = False
        return _state["loaded"]
