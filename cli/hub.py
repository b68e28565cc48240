"""`llmc pull`, `llmc ls`, `llmc rm`: manage checkpoints in the cache of huggingface_hub.

Interrupted downloads resume, and files that are already cached are not downloaded again.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.console import note, plain_table, print_table, stderr_console, stdout_console
from llmc.cli.options import option
from llmc.config import EngineConfig
from llmc.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

GIB, MIB = 2**30, 2**20


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A hub id: owner/name, or owner/name:Q8_0 for GGUF.",
            show_default=False,
        ),
    ],
    revision: Annotated[
        str | None,
        option("--revision", help="Branch, tag or commit. Default: the main branch."),
    ] = None,
) -> None:
    """Download a model's checkpoint into the hub's cache, or resume a download."""
    from llmc.startup.hub import HubName
    from llmc.startup.model_files import download

    name = HubName.parse(model)
    if name is None:
        raise ConfigError(f"{model!r} is not a hub id; write owner/name")
    path = download(EngineConfig(model=model, revision=revision))
    found = next((repo for repo in _cached() if repo.repo_id == name.repo), None)
    size = "" if found is None else f" ({_size(found.size_on_disk)})"
    note(stderr_console(), f"{model}{size}: {path}")


def ls() -> None:
    """List the models in the hub's cache, with their sizes."""
    repos = sorted(_cached(), key=lambda repo: repo.repo_id.lower())
    console = stdout_console()
    if not repos:
        note(stderr_console(), "No models yet; `llmc pull owner/name` downloads one.")
        return
    table = plain_table("model", "size", "versions", "used")
    for repo in repos:
        used = _ago(time.time() - repo.last_accessed)
        row = repo.repo_id, _size(repo.size_on_disk), str(len(repo.revisions)), used
        table.add_row(*row)
    print_table(console, table)
    total = sum(repo.size_on_disk for repo in repos)
    note(console, f"  {_size(total)} in total")


def rm(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Hub ids, owner/name.", show_default=False),
    ],
    yes: Annotated[bool, option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove models from the hub's cache."""
    from huggingface_hub import scan_cache_dir

    repos = {repo.repo_id: repo for repo in _cached()}
    if unknown := [model for model in models if model not in repos]:
        raise ConfigError(f"not in the cache: {', '.join(unknown)}; see `llmc ls`")
    chosen = [repos[model] for model in dict.fromkeys(models)]
    size = _size(sum(repo.size_on_disk for repo in chosen))
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("can't ask for confirmation without a terminal; add --yes to remove")
        names = ", ".join(repo.repo_id for repo in chosen)
        if not typer.confirm(f"Remove {names} ({size})?"):
            return
    hashes = [revision.commit_hash for repo in chosen for revision in repo.revisions]
    scan_cache_dir().delete_revisions(*hashes).execute()
    note(stderr_console(), f"{size} freed")


def _cached() -> list[CachedRepoInfo]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:  # nothing was downloaded yet
        return []


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _ago(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
