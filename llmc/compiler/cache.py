"""Programs on disk: the captured and rewritten graph of an architecture, for the next start.

The key covers everything that the result depends on: the model's config and code, llmc's own
sources, package versions and options. An entry is written to a temporary directory and renamed. A
damaged entry is deleted and rebuilt. Weights are not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmc.cache_dir import files_digest, new_folder, write_atomically
from llmc.compiler.program import Program, RewriteOptions
from llmc.compiler.serialize import CannotSerialize, dump_graph, load_graph
from llmc.passes.base import PassReport
from llmc.passes.user import users_digest
from llmc.weights.parameters import Parameters

log = logging.getLogger(__name__)

_GRAPH, _CONSTANTS, _DIGEST = "graph.json", "constants.safetensors", "digest"
_NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


class ProgramCache:
    """Entries under `root`/programs, one directory a key."""

    def __init__(self, root: Path) -> None:
        self._root = root / "programs"

    def load(self, key: str, device: torch.device) -> Program | None:
        """None if there is no usable entry. An entry does not include users' logits processors."""
        entry = self._root / key
        if not entry.is_dir() or entry.stat().st_uid != os.getuid():
            return None
        try:
            if (entry / _DIGEST).read_text(encoding="ascii") != _digest_of(entry):
                raise ValueError("its files are damaged")
            data = json.loads((entry / _GRAPH).read_text(encoding="utf-8"))
            constants = load_file(entry / _CONSTANTS)
            parameters = data["parameters"]
            program = Program.of(
                load_graph(data["nodes"], constants, device),
                parameters=Parameters(
                    shapes={k: tuple(v) for k, v in parameters["shapes"].items()},
                    aliases={k: tuple(v) for k, v in parameters["aliases"].items()},
                    is_plain=bool(parameters["is_plain"]),
                    tables={k: float(v) for k, v in parameters["tables"].items()},
                    experts={k: tuple(v) for k, v in parameters["experts"].items()},
                    former_names={k: str(v) for k, v in parameters["former_names"].items()},
                ),
                vocab_size=int(data["vocab_size"]),
                dtype=getattr(torch, data["dtype"]),
                device=device,
                reports=[PassReport(**r) for r in data["reports"]],
            )
            return replace(program, single_sequence=bool(data["single_sequence"]), from_cache=True)
        except (
            OSError,
            SafetensorError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
        ) as e:
            log.warning("a cached program can't be used (%s) and is rebuilt", e)
            shutil.rmtree(entry, ignore_errors=True)
            return None

    def save(self, key: str, program: Program) -> None:
        """Write an entry. A full or read-only disk causes a warning, never an error."""
        try:
            nodes, constants = dump_graph(program.graph.graph)
            data = {
                "nodes": nodes,
                "reports": [asdict(r) for r in program.reports],
                "vocab_size": program.vocab_size,
                "dtype": str(program.dtype).removeprefix("torch."),
                "single_sequence": program.single_sequence,
                "parameters": asdict(program.parameters),
            }
            with new_folder(self._root) as aside:
                save_file(constants, aside / _CONSTANTS)
                (aside / _GRAPH).write_text(json.dumps(data), encoding="utf-8")
                (aside / _DIGEST).write_text(_digest_of(aside), encoding="ascii")
                os.rename(aside, self._root / key)
        except CannotSerialize as e:
            log.info("this program is not cached: %s", e)
        except (OSError, SafetensorError) as e:  # the latter where a tensor can't be written
            if not (self._root / key).is_dir():  # another process was first
                log.warning("compiled programs can't be cached: %s", e)

    def load_figure(self, key: str, name: str) -> int | None:
        """The number that `save_figure` stored; None if there is none or its file is damaged."""
        try:
            figure = json.loads((self._root / key / f"{name}.figure").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return figure if type(figure) is int and figure >= 0 else None

    def save_figure(self, key: str, name: str, figure: int) -> None:
        """Store a number measured on a program next to that program."""
        if not key or not (self._root / key).is_dir():
            return
        with contextlib.suppress(OSError):
            write_atomically(self._root / key / f"{name}.figure", str(figure))


def _digest_of(entry: Path) -> str:
    return files_digest(entry / name for name in (_GRAPH, _CONSTANTS))


def config_digest(config: Any) -> str:
    """Digest of a model's config (without its path and dtype) and of the code of its class."""
    described = {
        "config": {k: v for k, v in config.to_dict().items() if k not in _NOT_ARCHITECTURE},
        "class": f"{type(config).__module__}.{type(config).__qualname__}",
        "code": _code_digest(type(config)),
    }
    return _digest_text(described)


def program_key(
    config: str, dtype: torch.dtype, device: torch.device, options: RewriteOptions
) -> str:
    """128-bit digest of everything that a rewritten graph depends on; "" if users' code has none.

    `config` is the model's `config_digest`.
    """
    users = users_digest(options.extra, options.processors)
    if users is None:
        return ""
    return _digest_text(
        {
            "config": config,
            "dtype": str(dtype),
            "device": str(device),
            "options": asdict(options.pipeline),
            "head": asdict(options.head),
            "switches": dict(options.switches),
            "extra": users,
            "versions": [torch.__version__, package_version("transformers")],
            "sources": sources_digest(),
        }
    )


def package_version(name: str) -> str:
    """Version of an installed package, without importing it; "" if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return ""


def _digest_text(described: Mapping[str, Any]) -> str:
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _code_digest(config_class: type) -> str:
    """Digest of the folder with a custom model's code; "" for transformers, which has a version."""
    if is_of_transformers(config_class):
        return ""
    return files_digest(sorted(Path(inspect.getfile(config_class)).parent.glob("*.py")))


def is_of_transformers(config_class: type) -> bool:
    """Whether the config's class, and so the model's code, is part of transformers."""
    return config_class.__module__.partition(".")[0] == "transformers"


@cache
def sources_digest() -> str:
    """Digest of the code that builds programs: compiler, passes, kernels and weights."""
    import llmc.compiler
    import llmc.kernels
    import llmc.passes
    import llmc.weights

    packages = (llmc.compiler, llmc.passes, llmc.kernels, llmc.weights)
    folders = (Path(folder) for package in packages for folder in package.__path__)
    return files_digest(file for folder in folders for file in sorted(folder.rglob("*.py")))
