"""Tokenizers as transformers loaded them, cached for the next start.

To choose a tokenizer's class, AutoTokenizer reads the model's config, which imports torch and the
models' modules. That takes seconds, and the tokenizer needs none of it. So the tokenizer's backend
and facts (`known_tokenizer.py`) are cached under a digest of the directory's small files. The class
is cached too, for callers that need the transformers object.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmc.background_thread import Interruptible
from llmc.cache_dir import new_folder, publish_folder
from llmc.text.known_tokenizer import (
    ChatTemplates,
    KnownTokenizer,
    TokenizerFacts,
    without_truncation,
)
from llmc.text.template import renders_alike
from llmc.text.tokenizer_packages import packages_of

log = logging.getLogger(__name__)

_FORMAT = 2  # version of the files of an entry
_RECORD = "class.json"
_FACTS = "facts.json"
_BACKEND = "backend.json"  # only if it differs from the tokenizer.json that it was loaded from
_AUTO = "transformers.models.auto.tokenization_auto"
_CODE = b'"auto_map"'  # the name of code that lies in the directory
# Files of a checkpoint that no tokenizer reads. Any other file may matter.
_NOT_READ = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
_COMPARE_SECONDS = 5.0  # for rendering a template several times
_MAX_FILE = 256 * 2**20  # bytes; a vocabulary is far smaller
_PACKAGES = ("transformers", "tokenizers")  # and those of tokenizer_packages.json


class TokenizerCache:
    """One directory per tokenizer, under `root`/tokenizers."""

    def __init__(self, root: Path) -> None:
        self._root = root / "tokenizers"

    def load(self, folder: Path) -> KnownTokenizer | None:
        """The tokenizer that AutoTokenizer would load from `folder`; None if it is not cached.

        Also None in a process that has imported AutoTokenizer: classes may be registered there.
        """
        if _AUTO in sys.modules or (entry := self._entry(folder)) is None:
            return None
        try:
            if entry.stat().st_uid != os.getuid():
                return None
            return _read(entry, folder)
        except FileNotFoundError:
            return None
        # A damaged entry. Loaders raise whatever their parsers raise.
        except Exception as e:
            log.warning("%s can't be read (%s) and is re-created", entry, e)
            shutil.rmtree(entry, ignore_errors=True)
            return None

    def has(self, folder: Path) -> bool:
        """Whether there is an entry, which may still be damaged."""
        entry = self._entry(folder)
        return entry is not None and entry.is_dir()

    def save(self, folder: Path, hf: Any) -> None:
        """Cache `hf`, if it can be loaded again from the cache. That is tried first."""
        entry = self._entry(folder)
        if entry is None or entry.exists() or not type(hf).__module__.startswith("transformers."):
            return
        if getattr(hf, "backend_tokenizer", None) is None:
            return  # written in Python, with a state of its own
        with contextlib.ExitStack() as stack:
            try:
                aside = stack.enter_context(new_folder(self._root))
            except OSError as e:
                log.warning("the tokenizer can't be cached: %s", e)
                return
            self._save(folder, hf, entry, aside)

    def _save(self, folder: Path, hf: Any, entry: Path, aside: Path) -> None:
        module, name = type(hf).__module__, type(hf).__qualname__
        is_converted = not (folder / "tokenizer.json").is_file()
        try:
            if is_converted:
                hf.save_pretrained(aside)
            source = aside if is_converted else folder
            again = _load(module, name, source, hf.chat_template)
            if described(again) != described(hf):
                log.info("this tokenizer is not cached: its class alone loads it differently")
                return
            backend = hf.backend_tokenizer.to_str()
            if _backend(source / "tokenizer.json").to_str() != backend:
                (aside / _BACKEND).write_text(backend, encoding="utf-8")
            facts = TokenizerFacts.of(hf, renders_alike=_renders_alike(hf))
            (aside / _FACTS).write_text(facts.to_json(), encoding="utf-8")
            record = {"module": module, "name": name, "is_converted": is_converted}
            (aside / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            if _read(aside, folder).facts != facts:
                log.info("this tokenizer is not cached: its facts are not plain data")
                return
            publish_folder(aside, entry)
        # Not every class can load what it has saved.
        except Exception as e:
            log.info("this tokenizer is not cached: %s", e)

    def _entry(self, folder: Path) -> Path | None:
        """None for a directory with custom code or without a tokenizer."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([_FORMAT, *_versions()]).encode())
        try:
            for name, content in _files(folder):
                if _CODE in content:
                    return None
                digest.update(f"{name}\0{len(content)}\0".encode())
                digest.update(content)
        except (OSError, ValueError):
            return None
        return self._root / digest.hexdigest()


def described(hf: Any) -> dict[str, Any]:
    """Everything that a tokenizer does, as plain data: equal ones are interchangeable."""
    names = ("model_max_length", "padding_side", "truncation_side", "model_input_names")
    more = ("clean_up_tokenization_spaces", "split_special_tokens", "chat_template")
    return {
        "backend": hf.backend_tokenizer.to_str(),
        "special": {k: str(v) for k, v in hf.special_tokens_map.items()},
        "ids": sorted(hf.all_special_ids),
        **{name: getattr(hf, name, None) for name in (*names, *more)},
    }


def _read(entry: Path, folder: Path) -> KnownTokenizer:
    """Raises FileNotFoundError if there is no entry."""
    record = json.loads((entry / _RECORD).read_text(encoding="utf-8"))
    facts = TokenizerFacts.from_json((entry / _FACTS).read_text(encoding="utf-8"))
    source = entry if record["is_converted"] else folder
    module, name = record["module"], record["name"]
    if not module.startswith("transformers."):
        raise ValueError(f"{module} is not part of transformers")
    own = entry / _BACKEND
    return KnownTokenizer(
        backend=_backend(own if own.is_file() else source / "tokenizer.json"),
        facts=facts,
        load=functools.partial(_load, module, name, source, facts.chat_template),
    )


def _backend(path: Path) -> Any:
    from tokenizers import Tokenizer

    return without_truncation(Tokenizer.from_file(str(path)))


def _load(module: str, name: str, folder: Path, chat_template: ChatTemplates) -> Any:
    cls = getattr(importlib.import_module(module), name)
    hf = cls.from_pretrained(str(folder), local_files_only=True)
    hf.chat_template = chat_template  # may come from a file that the class does not read
    without_truncation(hf.backend_tokenizer)
    return hf


def _renders_alike(hf: Any) -> bool:
    """False too if a template runs for too long: it is a program, which may never end."""
    templates = hf.chat_template
    if isinstance(templates, str):
        templates = {"default": templates}
    compare = Interruptible(lambda: all(renders_alike(hf, t) for t in (templates or {}).values()))
    timer = threading.Timer(_COMPARE_SECONDS, compare.end)
    timer.daemon = True
    timer.start()
    try:
        return compare()
    except SystemExit:
        return False
    finally:
        timer.cancel()


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the directory's files, except weights. ValueError for a huge file."""
    for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
        if path.name.lower().endswith(_NOT_READ) or not path.is_file():
            continue
        if path.stat().st_size > _MAX_FILE:
            raise ValueError(f"{path} has more than {_MAX_FILE} bytes")
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def _versions() -> Iterator[str]:
    others = sorted({package for used in packages_of().values() for package in used})
    for package in (*_PACKAGES, *others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{package} {importlib.metadata.version(package)}"
