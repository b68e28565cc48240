"""Files in the cache are whole, or as they were."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from llmc import cache_dir
from llmc.cache_dir import new_folder, write_atomically
from llmc.errors import ConfigError


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_changes_nothing(place: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "facts.json"
    write_atomically(path, "old")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch(f"os.{place}", side_effect=full), pytest.raises(OSError, match="No space"):
        write_atomically(path, "text", is_durable=True)
    assert [(one.name, one.read_text()) for one in path.parent.iterdir()] == [("facts.json", "old")]
    write_atomically(path, "text", is_durable=True)
    assert [(one.name, one.read_text()) for one in path.parent.iterdir()] == [(path.name, "text")]


WRITER = """
import pathlib, sys, time
from llmc.cache_dir import new_folder
with new_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "part").write_text("part")
    print("ready", flush=True)
    time.sleep(600)
"""


def age(path: Path) -> None:
    long_ago = time.time() - 2 * cache_dir.STALE_S
    os.utime(path, (long_ago, long_ago))


def test_a_new_folder_is_renamed_or_removed(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as folder:
        (folder / "part").write_text("part")
        folder.rename(tmp_path / "a" / "made")
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["made"]
    with pytest.raises(ValueError, match="broken"), new_folder(tmp_path / "a"):
        raise ValueError("broken")
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["made"]


def test_what_killed_processes_have_left_is_removed_later(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        [left] = tmp_path.iterdir()
        age(left)
        with new_folder(tmp_path):
            assert left.is_dir(), "its writer is alive"
        os.kill(writer.pid, signal.SIGKILL)
    with new_folder(tmp_path):
        assert not left.exists()


def test_what_earlier_versions_have_left_is_removed_later(tmp_path: Path) -> None:
    names = ("tmpab12_xyz", ".new-file", "tmp-kept", "0123abcd")
    for name in names:
        (tmp_path / name).mkdir()
        age(tmp_path / name)
    (tmp_path / ".new-young").mkdir()
    with new_folder(tmp_path) as folder:
        left = {one.name for one in tmp_path.iterdir()} - {folder.name}
    assert left == {"tmp-kept", "0123abcd", ".new-young"}


def test_a_home_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(ConfigError, match="LLMC_CACHE_DIR=~no-such-user/cache: .*home directory"):
        cache_dir.cache_dir()
