"""User passes: installed under an entry point, named `module:pass` or `file.py:pass`, or objects.

They join the pipeline at their place (`Pass.place`) and can be switched off like ours. The cache
identifies them by a digest of their code and options, so an edited pass is run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from llmc.errors import ConfigError
from llmc.passes.base import Pass
from llmc.passes.logits_processors import LogitsProcessor, processors_digest
from llmc.passes.user_code import called, check_names, code_digest, find, plain

GROUP = "llmc.passes"


def user_passes(given: Iterable[object]) -> tuple[Pass, ...]:
    """The installed passes, then the given ones; ConfigError for an object that is not a pass."""
    found = tuple(_as_pass(item, source) for item, source in find(GROUP, given, "pass"))
    check_names([p.name for p in found], "passes")
    return found


def _as_pass(item: object, source: str) -> Pass:
    """Accept a Pass, or a callable that returns one when called without options."""
    if callable(item) and not isinstance(item, Pass):
        item = called(item, source)
    if not isinstance(item, Pass):
        raise ConfigError(
            f"{source} is not a pass: decorate a function with @graph_pass() and call it"
        )
    if item.required:
        raise ConfigError(f"pass {item.name!r} is a user pass, so it can't be required")
    return item


def users_digest(passes: Sequence[Pass], processors: Sequence[LogitsProcessor] = ()) -> str | None:
    """Digest of all user code that a graph was made with; None if it must not be cached."""
    parts = [digest(passes), processors_digest(processors)]
    return None if None in parts else "".join(filter(None, parts))


def digest(passes: Sequence[Pass]) -> str | None:
    """Digest of the passes' code and options; None if their graph must not be cached."""
    parts = []
    for p in passes:
        code = code_digest(p.fn)
        options = plain(dict(p.options))
        if not p.cached or code is None or options is None:
            return None
        parts.append([p.name, p.place, p.changes_model, code, options])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
