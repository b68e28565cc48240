"""Files in the cache are whole, or as they were."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import pytest

from llmc.cache_dir import write_atomically


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
