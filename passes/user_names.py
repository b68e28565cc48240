"""Names of user code: `package.module:attribute` or `path/to/file.py:attribute`.

Needs no torch, so that a wrong name is reported before torch is imported (`check_paths`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from llmc.errors import ConfigError

# A file that contains one of these may define names that do not appear in its text.
_DYNAMIC = re.compile(r"\bimport \*|\b(?:globals|exec|setattr|__getattr__)\b")


def split_name(name: str, what: str) -> tuple[str, str]:
    """(module or file, attribute); ConfigError if the text is not such a name of a `what`."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise ConfigError(f"{name!r} is not a {what}: write `module:{what}` or `file.py:{what}`")
    return where, attribute


def file_of(where: str) -> Path | None:
    """The named file, or None for a module; ConfigError if the file does not exist."""
    if not where.endswith(".py"):
        return None
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"file {where!r} does not exist")
    return path


def check_user_code(given: Iterable[object], what: str) -> None:
    """Raise ConfigError for names that are wrong, as far as is clear without running the code."""
    for name in given:
        if not isinstance(name, str):
            continue
        where, attribute = split_name(name, what)
        path = file_of(where)
        if path is None:
            package = where.partition(".")[0]
            if not package or importlib.util.find_spec(package) is None:
                raise ConfigError(f"{name!r} can't be imported: there is no module {package!r}")
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"\b{attribute}\b", text) and not _DYNAMIC.search(text):
            raise no_attribute(where, attribute)


def no_attribute(where: str, attribute: str) -> ConfigError:
    return ConfigError(f"{where} has no {attribute!r}")
