"""Finds or compiles the library of C++ ops, and loads it into torch.

A wheel contains one with kernels for every instruction set level. Otherwise it is built once per
machine, for its level, into `<cache>/cpu/<key>/ops.so`; the key covers everything that the library
depends on. A manifest next to the library detects corruption or different sources. A build uses a
temporary folder that is renamed into place. Of several processes, one builds and the others wait.
`start_build()` returns immediately; `load()` waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from llmc.background_thread import BackgroundThread
from llmc.cache_dir import cache_dir
from llmc.errors import LlmcError
from llmc.kernels.cpu.compile import (
    Toolchain,
    compile_library,
    digest,
    find_toolchain,
    sources_digest,
)
from llmc.kernels.cpu.levels import Level, pick_level

_log = logging.getLogger("llmc.kernels.cpu")
_lock = threading.Lock()
_state: dict[str, bool] = {}  # "loaded": the result of load()
_loaded_from: list[Path] = []  # the library, once it is loaded
_builds: list[Build] = []  # the latest one, if any
_start_lock = threading.Lock()
_STALE_SECONDS = 3600
_PROGRESS_LINES = 5  # in the log
PREBUILT = Path(__file__).parent / "prebuilt"  # in a wheel


class BuildError(LlmcError):
    """The C++ ops can't be built here; the message contains the compiler's first error."""


def cache_root() -> Path:
    """This module's folder in `cache_dir`, created and checked."""
    root = cache_dir()
    folder = root / "cpu"
    for path in (root, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
        if info.st_uid != os.getuid():
            raise BuildError(
                f"the cache folder {path} belongs to user {info.st_uid}, so code in it can't be "
                "trusted; set LLMC_CACHE_DIR to a folder that you own"
            )
        if info.st_mode & 0o077:
            path.chmod(0o700)
    return folder


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the library in `folder`; None if it is missing or does not match."""
    library = folder / "ops.so"
    try:
        manifest: dict[str, Any] = json.loads((folder / "ops.json").read_text())
        return manifest if manifest["library"] == digest(library) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find_prebuilt(level: Level) -> Path | None:
    """The folder of the library that came with this package, if it fits."""
    if not (PREBUILT / "ops.so").exists():
        return None
    manifest = _manifest(PREBUILT)
    if manifest is None:
        fault = "is damaged"
    elif manifest.get("sources") != sources_digest():
        fault = "was built from another version of its sources"
    elif level.name not in manifest.get("levels", ()):
        fault = f"has no kernels for {level.name}"
    else:
        return PREBUILT
    _log.warning("%s %s; building another", PREBUILT / "ops.so", fault)
    return None


def is_obtainable() -> bool:
    """Whether the C++ ops came with this package or a compiler is available to build them."""
    if pick_level() is None:
        return False
    return (PREBUILT / "ops.so").exists() or find_toolchain() is not None


def find_library() -> Path | None:
    """The library that `load` would use without building one; None if it would have to."""
    level = pick_level()
    if level is None:
        return None
    folder = _find_prebuilt(level)
    if folder is None and (toolchain := find_toolchain()) is not None:
        built = _build_folder(toolchain, level)
        folder = built if _manifest(built) is not None else None
    return None if folder is None else folder / "ops.so"


def _build_folder(toolchain: Toolchain, level: Level) -> Path:
    return cache_root() / toolchain.key([level])


def _remove_stale(cache: Path) -> None:
    """Delete leftovers of builds that were killed."""
    for path in (*cache.glob("tmp-*"), *cache.glob("objects-*")):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _publish(made: Path, folder: Path) -> None:
    """Rename a finished build into place, unless another process was first with a valid one."""
    try:
        made.rename(folder)
    except OSError:
        if _manifest(folder) is None:
            raise


@contextlib.contextmanager
def _turn(objects: Path) -> Iterator[None]:
    """Create the folder for objects, and wait while another process builds there.

    If that process is killed, its lock ends with it, and this one continues its build.
    """
    objects.mkdir(exist_ok=True)
    descriptor = os.open(objects, os.O_RDONLY)
    try:
        while not _try_lock(descriptor):
            time.sleep(0.1)  # short waits, so that a BackgroundThread can be stopped
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: several processes may build
        _log.debug("no lock: %s", error)
    return True


class Build:
    """A build in progress, or an existing library. `level` is None if this machine has none."""

    def __init__(self, level: Level | None, *, may_be_prebuilt: bool) -> None:
        self.level = level
        self._may_be_prebuilt = may_be_prebuilt
        self._files = (0, 0)
        self._folder: Path | None = None
        self._error: BuildError | None = None
        self._thread = BackgroundThread(self._run, "llmc-cpu-build")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._folder = self._find()
        except BuildError as error:
            self._error = error
        except OSError as error:
            self._error = BuildError(f"they could not be built: {error}")

    def _find(self) -> Path:
        if self.level is None:
            raise BuildError("they require an x86-64-v3 (AVX2) or aarch64 CPU")
        folder = _find_prebuilt(self.level) if self._may_be_prebuilt else None
        return folder or self._make(find_toolchain(), self.level)

    def _make(self, toolchain: Toolchain | None, level: Level) -> Path:
        if toolchain is None:
            raise BuildError(
                "no C++ compiler was found; install the package g++ (gcc-c++ on Fedora and RHEL), "
                "or set $CXX to a compiler"
            )
        folder = _build_folder(toolchain, level)
        cache = folder.parent
        _remove_stale(cache)
        if folder.exists():
            if _manifest(folder) is not None:
                return folder
            _log.warning("the library in %s is damaged; building it again", folder)
            shutil.rmtree(folder, ignore_errors=True)
        objects = cache / f"objects-{folder.name}"
        with _turn(objects):
            if _manifest(folder) is None:  # else it was built meanwhile
                self._compile(toolchain, level, objects, folder)
        shutil.rmtree(objects, ignore_errors=True)
        return folder

    def _compile(self, toolchain: Toolchain, level: Level, objects: Path, folder: Path) -> None:
        made = Path(tempfile.mkdtemp(prefix="tmp-", dir=folder.parent))
        try:
            error = compile_library(
                toolchain, [level], made / "ops.so", self._on_file, objects_folder=objects
            )
            if error is None:
                _publish(made, folder)
            elif _manifest(folder) is None:  # else another process was first and removed objects
                raise BuildError(f"{toolchain.command} failed: {error}")
        except OSError:  # the same, before this process could store an object
            if _manifest(folder) is None:
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _on_file(self, done: int, count: int) -> None:
        self._files = (done, count)
        if done * _PROGRESS_LINES // count > (done - 1) * _PROGRESS_LINES // count:
            _log.info("%s", self.progress)

    @property
    def progress(self) -> str:
        """A human-readable progress message."""
        done, count = self._files
        return f"building the C++ ops, {done} of {count} files" if count else "building the C++ ops"

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the library and return its path. Raises BuildError."""
        while self._thread.is_alive():  # short waits, so that a BackgroundThread can be stopped
            self._thread.join(0.1)
        if self._error is not None:
            raise self._error
        assert self._folder is not None, "a build ends with a folder or an error"
        return self._folder / "ops.so"


def start_build(*, may_be_prebuilt: bool = True) -> Build:
    """Start to find or build the library; compilers run in the background.

    If a build is already in progress, it is returned. Raises ConfigError if $LLMC_CPU_TARGET is
    invalid.
    """
    level = pick_level()
    with _start_lock:
        if not _builds or _builds[-1].done:
            _builds[:] = [Build(level, may_be_prebuilt=may_be_prebuilt)]
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
    except OSError as error:  # intact but unusable, for example after libc was replaced
        _log.warning("can't load %s (%s); building it again", path, error)
        if path.parent != PREBUILT:
            shutil.rmtree(path.parent, ignore_errors=True)
        build = start_build(may_be_prebuilt=False)
        path = build.wait()
        load_library(str(path))
    assert build.level is not None, "a finished build has a level"
    use_level = ctypes.CDLL(str(path)).llmc_use_level
    use_level.argtypes, use_level.restype = [ctypes.c_char_p], ctypes.c_bool
    if not use_level(build.level.name.encode()):
        raise BuildError(f"{path} has no kernels for {build.level.name}")
    _loaded_from.append(path)
    declare_ops()


def library_path() -> Path:
    """The library that `load` loaded."""
    return _loaded_from[0]


@cache
def c_functions() -> ctypes.CDLL:
    """The C functions of that library. Other threads run during a call."""
    return ctypes.CDLL(str(library_path()))


def load() -> bool:
    """Load the C++ ops, building them if needed. Returns False, after one warning, if that fails.

    Raises ConfigError if $LLMC_CPU_TARGET is invalid.
    """
    with _lock:
        if "loaded" not in _state:
            try:
                _load_library()
                _state["loaded"] = True
            except (BuildError, OSError) as error:
                _log.warning(
                    "the C++ ops are not available, so each op uses its Python reference, which is "
                    "several times slower: %s",
                    error,
                )
                _state["loaded"] = False
        return _state["loaded"]
