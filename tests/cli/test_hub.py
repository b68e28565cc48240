"""`llmc pull`, `ls` and `rm` against a hub on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FILES, GGUF_FILES, GGUF_MODEL, MODEL, PICKLED_MODEL, Hub, fake_hub

from llmc.cli.hub import _ago, _size
from llmc.startup.hub import HubName

FIND = """
import sys
from llmc.startup.adapter_files import find_adapter

for _ in range(int(sys.argv[2])):
    found = find_adapter(sys.argv[1])
print(found)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fake_hub() as hub:
        yield hub


def llmc(
    hub: Hub, home: Path, *words: str, stdin: str = "", offline: bool = False
) -> subprocess.CompletedProcess[str]:
    return python(hub, home, "-m", "llmc", *words, stdin=stdin, offline=offline)


def python(
    hub: Hub, home: Path, *words: str, stdin: str = "", offline: bool = False
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {
        **kept,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, env=env, input=stdin, capture_output=True, text=True, timeout=60)


def test_a_model_is_pulled_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    pulled = llmc(hub, tmp_path, "pull", MODEL)
    assert pulled.returncode == 0, pulled.stderr
    [file] = tmp_path.rglob("snapshots/*/model.safetensors")
    assert file.read_bytes() == FILES["model.safetensors"]
    listed = llmc(hub, tmp_path, "ls").stdout
    assert MODEL in listed and "24.4 MiB" in listed and "just now" in listed
    refused = llmc(hub, tmp_path, "rm", MODEL)
    assert refused.returncode == 2 and "--yes" in refused.stderr
    assert llmc(hub, tmp_path, "rm", MODEL, "--yes").returncode == 0
    assert not list(tmp_path.rglob("model.safetensors"))
    assert "llmc pull owner/name" in llmc(hub, tmp_path, "ls").stderr


def test_a_download_that_broke_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_at = 15_000_000  # the hub keeps what came in pieces of 10 MB
    broken = llmc(hub, tmp_path, "pull", MODEL)
    if broken.returncode:  # else huggingface_hub went on by itself
        assert "could not be downloaded" in broken.stderr
    hub.breaks_at = None
    assert llmc(hub, tmp_path, "pull", MODEL).returncode == 0
    assert hub.ranges, "it went on from where it was"
    [file] = tmp_path.rglob("snapshots/*/model.safetensors")
    assert file.read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (GGUF_MODEL, ["tiny-Q4_K_M.gguf"]),
        (f"{GGUF_MODEL}:q8_0", ["tiny-Q8_0.gguf"]),
        (f"hf.co/{GGUF_MODEL}:UD-Q4_K_M", ["tiny-UD-Q4_K_M.gguf"]),
        (
            f"{GGUF_MODEL}:BF16",
            ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"],
        ),
        (
            f"{GGUF_MODEL}/BF16/tiny-BF16-00001-of-00002.gguf",
            ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"],
        ),
        (
            f"https://huggingface.co/{GGUF_MODEL}/blob/main/BF16/tiny-BF16-00001-of-00002.gguf",
            ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_one_gguf_model_of_a_repository_is_pulled(
    name: str, files: list[str], hub: Hub, tmp_path: Path
) -> None:
    pulled = llmc(hub, tmp_path, "pull", name)
    assert pulled.returncode == 0, pulled.stderr
    assert files[0] in pulled.stderr.replace("\n", "")
    found = {path.relative_to(folder).as_posix(): path for folder in tmp_path.rglob("snapshots/*")
             for path in folder.rglob("*.gguf")}  # fmt: skip
    assert sorted(found) == files
    assert all(found[file].read_bytes() == GGUF_FILES[file] for file in files)
    again = llmc(hub, tmp_path, "pull", name, offline=True)
    assert again.returncode == 0, again.stderr


def test_pickled_weights_are_pulled_where_there_are_no_others(hub: Hub, tmp_path: Path) -> None:
    for offline in (False, True):
        pulled = llmc(hub, tmp_path, "pull", PICKLED_MODEL, offline=offline)
        assert pulled.returncode == 0, pulled.stderr
    [folder] = tmp_path.rglob("snapshots/*")
    assert sorted(file.name for file in folder.glob("*.*")) == [
        "config.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ]


@pytest.mark.parametrize(
    ("name", "found", "files"),
    [
        ("owner/poems", ".", ["adapter_config.json", "adapter_model.safetensors"]),
        ("owner/poems-old", ".", ["adapter_config.json", "adapter_model.bin"]),
        ("owner/poems-GGUF", "poems-f16.gguf", ["poems-f16.gguf"]),
        ("https://hf.co/owner/poems-GGUF/blob/main/poems-f16.gguf", "poems-f16.gguf", None),
    ],
)
def test_an_adapter_is_downloaded(
    name: str, found: str, files: list[str] | None, hub: Hub, tmp_path: Path
) -> None:
    for offline in (False, True):
        told = python(hub, tmp_path, "-c", FIND, name, "1", offline=offline)
        assert told.returncode == 0, told.stderr
        [folder] = tmp_path.rglob("snapshots/*")
        assert Path(told.stdout.strip()) == folder / found
        assert sorted(file.name for file in folder.iterdir()) == (files or [found])


def test_the_hub_is_asked_for_an_adapter_once(hub: Hub, tmp_path: Path) -> None:
    asked = []
    for times in (1, 3):
        hub.num_asked = 0
        assert not python(hub, tmp_path / str(times), "-c", FIND, "owner/poems", str(times)).stderr
        asked.append(hub.num_asked)
    assert asked[0] == asked[1] > 0


def test_an_adapter_that_is_not_there_is_told_before_the_model_is_loaded(
    hub: Hub, tmp_path: Path
) -> None:
    for name, why in ((MODEL, "has no LoRA adapter"), ("owner/none", "could not be downloaded")):
        told = llmc(hub, tmp_path, "serve", "--lora-modules", f"a={name}")
        assert told.returncode == 2 and not told.stdout
        assert f"--lora-modules a={name}" in told.stderr and why in told.stderr, told.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{GGUF_MODEL}:Q2_K", f"{GGUF_MODEL} has no GGUF model Q2_K; name one as .*tiny-Q8_0"),
        (f"{GGUF_MODEL}/other.gguf", "has no GGUF model other.gguf"),
        (f"{GGUF_MODEL}:F32", "has 1 of the 2 parts of tiny-F32-00001-of-00002.gguf"),
        (f"{MODEL}:Q4_0", f"{MODEL} has no GGUF model"),
    ],
)
def test_a_gguf_model_that_is_not_there_is_told(
    name: str, why: str, hub: Hub, tmp_path: Path
) -> None:
    told = llmc(hub, tmp_path, "pull", name)
    assert told.returncode == 2
    assert re.search(why, " ".join(told.stderr.split())), told.stderr


def test_what_is_not_there_is_told(hub: Hub, tmp_path: Path) -> None:
    missing = llmc(hub, tmp_path, "pull", "owner/none")
    assert missing.returncode != 0 and "owner/none" in missing.stderr
    assert "owner/name" in llmc(hub, tmp_path, "pull", "./here").stderr
    assert "not in the cache: a/b" in llmc(hub, tmp_path, "rm", "a/b").stderr


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/owner/name", "owner/name"),
        ("http://www.huggingface.co/owner/name/", "owner/name"),
        ("https://hf.co/owner/name/tree/main", "owner/name"),
        ("https://huggingface.co/owner/name?library=transformers", "owner/name"),
        ("https://huggingface.co/owner/name/blob/main/x.gguf", "owner/name/x.gguf"),
        ("https://huggingface.co/o/n/resolve/main/a/x.gguf?download=true", "o/n/a/x.gguf"),
        ("hf.co/owner/name:Q8_0", "owner/name:Q8_0"),
        ("https://huggingface.co/owner/name/tree/other", None),  # that is `--revision`
        ("https://huggingface.co/owner/name/blob/main/config.json", None),
        ("https://huggingface.co/owner", None),
        ("https://example.com/owner/name", None),
    ],
)
def test_the_address_of_a_page_is_a_name(address: str, name: str | None) -> None:
    found = HubName.parse(address)
    assert (None if found is None else str(found)) == name


def test_sizes_and_ages() -> None:
    assert (_size(3 * 2**30), _size(2**20)) == ("3.0 GiB", "1.0 MiB")
    assert [_ago(s) for s in (1, 60, 7200, 90000)] == [
        "just now",
        "1 minute ago",
        "2 hours ago",
        "1 day ago",
    ]
