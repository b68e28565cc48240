"""A tokenizer loaded by what AutoTokenizer found out at an earlier start."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import make_hf_tokenizer
from transformers import AutoTokenizer

from llmc.text import tokenizer_cache
from llmc.text.known_tokenizer import KnownTokenizer, TokenizerFacts
from llmc.text.tokenizer import Tokenizer, preload
from llmc.text.tokenizer_cache import TokenizerCache, described


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_hf_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported AutoTokenizer."""
    monkeypatch.delitem(sys.modules, tokenizer_cache._AUTO, raising=False)


def automatic(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def kept(cache: TokenizerCache, folder: Path) -> KnownTokenizer | None:
    cache.save(folder, automatic(folder))
    return cache.load(folder)


@pytest.mark.usefixtures("fresh")
def test_is_the_one_of_autotokenizer(tmp_path: Path, folder: Path) -> None:
    known = kept(TokenizerCache(tmp_path), folder)
    assert known is not None and known.backend is not None
    again, first = known.load(), automatic(folder)
    assert type(again) is type(first) and described(again) == described(first)
    assert known.backend.to_str() == first.backend_tokenizer.to_str()
    assert known.facts == TokenizerFacts.of(first, renders_alike=True)


@pytest.mark.usefixtures("fresh")
def test_a_second_load_does_without_autotokenizer(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))
    first = Tokenizer.load(folder)
    monkeypatch.delitem(sys.modules, tokenizer_cache._AUTO, raising=False)
    monkeypatch.setattr("llmc.text.tokenizer._load_anew", None)
    second = Tokenizer.load(folder)
    assert second.encode("h\u00e9llo <s> world") == first.encode("h\u00e9llo <s> world")
    assert second.chat_template == first.chat_template


def test_transformers_is_imported_early_only_for_one_that_is_not_cached(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path))

    def imports(folder: Path | None) -> bool:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "transformers", None)
            try:
                preload(folder)
            except ImportError:
                return True
            return False

    assert imports(None) and imports(folder)
    TokenizerCache(tmp_path).save(folder, automatic(folder))
    assert not imports(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    assert imports(folder)


def test_none_where_classes_may_have_been_registered(tmp_path: Path, folder: Path) -> None:
    assert tokenizer_cache._AUTO in sys.modules
    assert kept(TokenizerCache(tmp_path), folder) is None


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_none_for_files_that_changed(tmp_path: Path, folder: Path, file: str) -> None:
    cache = TokenizerCache(tmp_path)
    assert kept(cache, folder) is not None
    path = folder / file
    text = path.read_text(encoding="utf-8") if path.exists() else "{}"
    path.write_text(text + "\n", encoding="utf-8")
    assert cache.load(folder) is None


@pytest.mark.usefixtures("fresh")
def test_weights_do_not_count(tmp_path: Path, folder: Path) -> None:
    cache = TokenizerCache(tmp_path)
    assert kept(cache, folder) is not None
    (folder / "model.safetensors").write_bytes(b"0" * 64)
    assert cache.load(folder) is not None


@pytest.mark.usefixtures("fresh")
def test_files_without_a_tokenizer_json_are_converted_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    letters = {letter: i for i, letter in enumerate("abcdefgh")} | {"ab": 8, "<|endoftext|>": 9}
    (folder / "vocab.json").write_text(json.dumps(letters), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    cache = TokenizerCache(tmp_path)
    first = automatic(folder)
    cache.save(folder, first)
    again = cache.load(folder)
    assert again is not None and described(again.load()) == described(first)
    assert again.backend is not None and again.backend.encode("abhg").ids == [8, 7, 6]
    assert list((tmp_path / "tokenizers").glob("*/tokenizer.json")), "the converted one is kept"


@pytest.mark.usefixtures("fresh")
def test_nothing_is_kept_of_code_in_the_directory(tmp_path: Path, folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**fields, "auto_map": {}}), encoding="utf-8")
    assert kept(TokenizerCache(tmp_path), folder) is None
    assert not (tmp_path / "tokenizers").exists()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "record", ["{", "[]", '{"module": "os", "name": "system", "is_converted": false}']
)
def test_a_damaged_entry_is_made_again(tmp_path: Path, folder: Path, record: str) -> None:
    cache = TokenizerCache(tmp_path)
    assert kept(cache, folder) is not None
    [path] = (tmp_path / "tokenizers").glob("*/class.json")
    path.write_text(record, encoding="utf-8")
    assert cache.load(folder) is None
    assert kept(cache, folder) is not None


@pytest.mark.usefixtures("fresh")
def test_two_processes_may_cache_a_tokenizer_at_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, rename = TokenizerCache(tmp_path), os.rename

    def second(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(tokenizer_cache.os, "rename", second)
    with caplog.at_level(logging.INFO):
        assert kept(cache, folder) is not None
    assert caplog.text == "" and len(list((tmp_path / "tokenizers").iterdir())) == 1


@pytest.mark.usefixtures("fresh")
def test_a_full_disk_costs_only_the_entry(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert kept(TokenizerCache(tmp_path), folder) is None


@pytest.mark.usefixtures("fresh")
def test_a_template_that_does_not_end_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    make_hf_tokenizer(loop).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(tokenizer_cache, "_COMPARE_SECONDS", 0.2)
    known = kept(TokenizerCache(tmp_path), tmp_path / "model")
    assert known is not None and not known.facts.renders_alike
    time.sleep(0.3)  # nothing is raised afterwards
