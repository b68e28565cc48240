"""Names flags where errors name fields: Python's callers see `max_num_seqs`, users of the command
`--max-num-seqs`.

The names are those of the parameters of `llmc serve`, which has all flags that errors name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping

from llmc.cli import serve
from llmc.cli.options import FLAG_OF_FIELD, flags_of


def _flag_names() -> Mapping[str, str]:
    """Flags by field. Of the server's, only those whose field is not an ordinary word."""
    parameters = inspect.signature(serve.command).parameters.values()
    server = {
        p.name: flags_of(p)[0].split("/")[0]
        for p in parameters
        if "_" in p.name and p.name not in FLAG_OF_FIELD and flags_of(p)
    }
    return FLAG_OF_FIELD | server


def _any_of(names: Iterable[str]) -> str:
    return "(?:" + "|".join(sorted(names, key=len, reverse=True)) + ")"


_FLAGS = _flag_names()
# A quotation, or a field and possibly its flag in parentheses. A path and the name of a file or
# key (model.safetensors, tokenizer.chat_template) are no fields.
_FIELD = re.compile(
    rf"""(?<!\w)(?:'[^']*'|"[^"]*"|`[^`]*`)"""
    rf"""|(?P<field>^{_any_of(_FLAGS)}|(?<![\w./-])"""
    rf"""{_any_of(name for name in _FLAGS if "_" in name)})(?!\.?[\w/-])"""
    r"(?: \((?P<flag>--[^()]*)\))?"
)


def name_flags(message: str) -> str:
    """Replace the names of fields in an error's message with their flags.

    Not in quotations, which are the user's values. A field whose name is also an ordinary word
    (model, seed) is replaced only at the start.
    """
    return _FIELD.sub(
        lambda found: found[0] if not found["field"] else found["flag"] or _FLAGS[found["field"]],
        message,
    )
