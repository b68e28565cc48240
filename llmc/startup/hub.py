"""Models of the Hugging Face hub: how they are named, and which of a repository's GGUF files are
downloaded.

    owner/name              safetensors, else the GGUF file in Q4_K_M or another usual format
    owner/name:Q8_0         the GGUF file in this format, as other engines name it
    owner/name/FILE.gguf    this file, with the other parts of a split model

Each may follow `hf.co/`; the address of a repository's or a file's page is a name, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from llmc.errors import CheckpointError, reason_of
from llmc.weights.gguf.files import PART, SUFFIX, around_number, name_of
from llmc.weights.weight_files import ADAPTER, ADAPTER_CONFIG

_SITES = ("hf.co/", "huggingface.co/")
_PAGE = re.compile(  # of the main branch: another one is chosen by `revision`
    r"https?://(?:www\.)?(?:hf\.co|huggingface\.co)/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/main(?P<file>/[^?#]+)?)?/?(?:[?#].*)?",
    re.ASCII | re.IGNORECASE,
)
_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<format>[\w.-]+)|/(?P<file>(?:[\w.+-]+/)*[\w.+-]+\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_USUAL = ("Q4_K_M", "Q4_0", "Q8_0")  # the first that a repository has
_NO_MODELS = ("mmproj", "imatrix")  # image encoders and importance matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository, and what a name says about the GGUF file in it."""

    repo: str  # owner/name
    format: str | None = None
    file: str | None = None  # its path in the repository

    @property
    def is_gguf(self) -> bool:
        """Whether the name asks for a GGUF file."""
        return self.format is not None or self.file is not None

    def __str__(self) -> str:
        """Without a site or the address of a page."""
        if self.file is not None:
            return f"{self.repo}/{self.file}"
        return self.repo if self.format is None else f"{self.repo}:{self.format}"

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None for what looks like a path, such as `./name` or a file in an existing directory."""
        page = _PAGE.fullmatch(text)
        if page is not None:
            text = page["repo"] + (page["file"] or "")
        for site in _SITES:
            text = text.removeprefix(site)
        found = _NAME.fullmatch(text)
        if found is None or text.startswith("."):
            return None
        if found["file"] and Path(text.partition("/")[0]).is_dir():
            return None
        return cls(repo=found["repo"], format=found["format"], file=found["file"])

    def choose(self, files: Sequence[str]) -> list[str]:
        """The parts of the GGUF model, of a repository's files; none if it has no such files and
        the name does not ask for one. CheckpointError if it has not the one that is meant."""
        models = _models(files)
        if not models and not self.is_gguf:
            return []
        if self.file is not None:
            chosen = next((parts for parts in models.values() if self.file in parts), None)
        else:
            formats = _USUAL if self.format is None else (self.format,)
            found = [named for name in formats if (named := _in_format(models, name))]
            chosen = found[0] if found else None
            if self.format is None and len(models) == 1:
                [chosen] = models.values()
        if chosen is None:
            raise CheckpointError(self._refusal(list(models)))
        part = PART.fullmatch(PurePosixPath(chosen[0]).name)
        if part is not None and len(chosen) != int(part["count"]):
            raise CheckpointError(
                f"{self.repo} has {len(chosen)} of the {int(part['count'])} parts of {chosen[0]}"
            )
        return chosen

    def _refusal(self, models: Sequence[str]) -> str:
        if not models:
            return f"{self.repo} has no GGUF model"
        wanted = self.file or self.format
        what = f"has no GGUF model {wanted}" if wanted else "has several GGUF models"
        names = ", ".join(models[:12]) + (", ..." if len(models) > 12 else "")
        return f"{self.repo} {what}; name one as {self.repo}:FORMAT or by its file: {names}"


@contextmanager
def downloading(name: str) -> Iterator[None]:
    """Inside, what the hub, the disk or the HTTP client raises becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(
            f"{name!r} is not on this machine and could not be downloaded: {reason_of(e)}"
        ) from e


def download_gguf(name: HubName, revision: str | None) -> Path | None:
    """The first or only file of a GGUF model in the hub's cache; missing parts are downloaded.

    None and CheckpointError: as in `HubName.choose`. Raises what huggingface_hub raises, too.
    """
    from huggingface_hub import snapshot_download

    chosen = name.choose(_files(name.repo, revision))
    if not chosen:
        return None
    literal = [file.replace("[", "[[]") for file in chosen]  # patterns are globs
    folder = Path(snapshot_download(name.repo, revision=revision, allow_patterns=literal))
    missing = [file for file in chosen if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(f"{missing[0]} of {name.repo} is not in the hub's cache")
    return folder / chosen[0]


@cache  # the hub is asked once, not for each request with the adapter
def download_adapter(name: HubName) -> Path:
    """A LoRA adapter in the hub's cache: a directory in PEFT's format, or a GGUF file; missing
    files are downloaded. CheckpointError if there is none."""
    from huggingface_hub import snapshot_download

    with downloading(str(name)):
        if not name.is_gguf:
            patterns = [ADAPTER_CONFIG, f"{ADAPTER}.safetensors"]
            folder = Path(snapshot_download(name.repo, allow_patterns=patterns))
            if (folder / ADAPTER_CONFIG).is_file():
                if not (folder / patterns[1]).is_file():
                    snapshot_download(name.repo, allow_patterns=[f"{ADAPTER}.bin"])
                return folder
        file = download_gguf(name, None)
    if file is None:
        raise CheckpointError(f"{name.repo} has no LoRA adapter: no {ADAPTER_CONFIG}, no GGUF file")
    return file


def _files(repo: str, revision: str | None) -> list[str]:
    """The repository's files or, where the hub can't be reached, those that are in its cache."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        found = HfApi().model_info(repo, revision=revision)  # list_repo_files retries for 30 s
        return [file.rfilename for file in found.siblings or ()]
    except Exception as error:  # of the hub or the HTTP client
        try:  # without patterns, it would ask for the whole repository
            cached = snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=[]
            )
        except Exception:
            raise error from None
    folder = Path(cached)
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _models(files: Sequence[str]) -> dict[str, list[str]]:
    """GGUF models by their names, and the files of each in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix.lower() != SUFFIX or any(word in path.name.lower() for word in _NO_MODELS):
            continue
        part = PART.fullmatch(path.name)
        name = name_of(path.name) if part is None else around_number(part)[0].rstrip("-")
        models.setdefault(str(path.with_name(name)), []).append(file)
    return models


def _in_format(models: dict[str, list[str]], name: str) -> list[str] | None:
    """The model whose name has the format's as a whole word; of several the shortest one."""
    word = re.compile(rf"(?:^|[-._/]){re.escape(name)}(?:$|[-./])", re.IGNORECASE)
    found = sorted((model for model in models if word.search(model)), key=len)
    return models[found[0]] if found else None
