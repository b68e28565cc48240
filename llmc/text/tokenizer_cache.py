"""What AutoTokenizer found out about a directory, kept for the next start.

To choose a tokenizer's class AutoTokenizer reads the model's config, which imports torch and the
parts of transformers that models are made of: seconds, of which the tokenizer needs nothing. So
the class is kept under a digest of the directory's small files; where the directory holds no
tokenizer.json, also the one that transformers makes of its other files, which may take long.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_RECORD = "class.json"
_AUTO = "transformers.models.auto.tokenization_auto"
_CODE = b'"auto_map"'  # the name of code that lies in the directory
# Files of a checkpoint that no tokenizer reads; what else is in the directory may matter.
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
_MAX_FILE = 256 * 2**20  # bytes; a vocabulary is far smaller
_PACKAGES = (
    "transformers",
    "tokenizers",
    "sentencepiece",
    "tiktoken",
    "protobuf",
)


class TokenizerCache:
    """Directories under `root`/tokenizers, one a tokenizer."""

    def __init__(self, root: Path) -> None:
        self._root = root / "tokenizers"

    def load(self, folder: Path) -> Any | None:
        """The transformers tokenizer that AutoTokenizer gives for `folder`; None if it isn't known.

        Also None in a process that uses AutoTokenizer: classes may have been registered there.
        """
        if _AUTO in sys.modules or (entry := self._entry(folder)) is None:
            return None
        try:
            if entry.stat().st_uid != os.getuid():
                return None
            record = json.loads((entry / _RECORD).read_text(encoding="utf-8"))
            source = entry if record["is_converted"] else folder
            return _load(record["module"], record["name"], source)
        except FileNotFoundError:
            return None
        # A damaged entry: loaders raise whatever their parsers raise.
        except Exception as e:
            log.warning("%s can't be read (%s) and is made again", entry, e)
            shutil.rmtree(entry, ignore_errors=True)
            return None

    def save(self, folder: Path, hf: Any) -> None:
        """Keep what gives `hf` again, if something does. Its entry is tried before it is kept."""
        module, name = type(hf).__module__, type(hf).__qualname__
        entry = self._entry(folder)
        if entry is None or entry.exists() or not module.startswith("transformers."):
            return
        if getattr(hf, "backend_tokenizer", None) is None:
            return  # written in Python, with a state of its own
        is_converted = not (folder / "tokenizer.json").is_file()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(dir=self._root, prefix=".new-"))
        except OSError as e:
            log.warning("the tokenizer can't be cached: %s", e)
            return
        try:
            if is_converted:
                hf.save_pretrained(aside)
            if described(_load(module, name, aside if is_converted else folder)) != described(hf):
                log.info("this tokenizer is not cached: its class alone reads it in another way")
                return
            record = {"module": module, "name": name, "is_converted": is_converted}
            (aside / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            with contextlib.suppress(FileExistsError):  # another process was first
                os.rename(aside, entry)
        # As above: not every class can load what it has saved.
        except Exception as e:
            log.info("this tokenizer is not cached: %s", e)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _entry(self, folder: Path) -> Path | None:
        """None for a directory that has code of its own, or is none of a tokenizer."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps(list(_versions())).encode())
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
    """All that a tokenizer does, as plain data: two that give the same are interchangeable."""
    names = ("model_max_length", "padding_side", "truncation_side", "model_input_names")
    more = ("clean_up_tokenization_spaces", "split_special_tokens", "chat_template")
    return {
        "backend": hf.backend_tokenizer.to_str(),
        "special": {k: str(v) for k, v in hf.special_tokens_map.items()},
        "ids": sorted(hf.all_special_ids),
        **{name: getattr(hf, name, None) for name in (*names, *more)},
    }


def _load(module: str, name: str, folder: Path) -> Any:
    if not module.startswith("transformers."):
        raise ValueError(f"{module} is not of transformers")
    cls = getattr(importlib.import_module(module), name)
    return cls.from_pretrained(str(folder), local_files_only=True)


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the directory's files, weights left out. ValueError for a huge one."""
    for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
        if path.name.endswith(_NOT_READ) or not path.is_file():
            continue
        if path.stat().st_size > _MAX_FILE:
            raise ValueError(f"{path} has more than {_MAX_FILE} bytes")
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{package} {importlib.metadata.version(package)}"
