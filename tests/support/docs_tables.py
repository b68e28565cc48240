"""The tables of docs/ that follow from code: `python tests/support/docs_tables.py` writes them.

Each stands in its document between `<!-- table NAME -->` and `<!-- end -->`; tests/test_docs.py
fails when one is stale. What code does not say (a unit, a range in words) is in docs_words.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from docs_words import LIMITS, SAMPLING, UNITS

from llmc.cli import main
from llmc.cli.options import ENGINE_OPTIONS
from llmc.config import EngineConfig
from llmc.sampling_params import SamplingParams
from llmc.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
ENGINE_FIELDS = tuple(entry.field for entry in ENGINE_OPTIONS)
_TABLE = re.compile(r"(<!-- table ([\w -]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One parameter of one command, as typer sees it."""

    name: str  # the Python parameter
    info: Any  # typer's OptionInfo or ArgumentInfo
    type: Any
    default: Any

    @property
    def spellings(self) -> list[str]:
        # Inside Annotated, typer keeps the first spelling where a default would otherwise be.
        declared = [self.info.default, *(self.info.param_decls or ())]
        given = [word for word in declared if isinstance(word, str) and word.startswith("-")]
        words = [part for word in given for part in word.split("/")]
        return words or [self.info.metavar or self.name]

    @property
    def is_option(self) -> bool:
        return isinstance(self.info, typer.models.OptionInfo)


def commands() -> dict[str, list[Flag]]:
    """`serve`, `bench latency` ... -> its flags. The empty name is `llmc` itself."""
    found = {"": flags_of(main.app.registered_callback)}
    for prefix, app in _apps(main.app):
        for command in app.registered_commands:
            found[prefix + str(command.name)] = flags_of(command)
    return found


def _apps(app: typer.Typer, prefix: str = "") -> Iterator[tuple[str, typer.Typer]]:
    yield prefix, app
    for group in app.registered_groups:
        assert group.typer_instance is not None, f"{group.name} has no app"
        yield from _apps(group.typer_instance, f"{prefix}{group.name} ")


def flags_of(command: Any) -> list[Flag]:
    found = []
    for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
        kind, info = get_args(parameter.annotation)
        if not getattr(info, "hidden", False):
            found.append(Flag(name=parameter.name, info=info, type=kind, default=parameter.default))
    return found


def environment(flag: Flag) -> list[str]:
    names = flag.info.envvar
    return [names] if isinstance(names, str) else list(names or ())


def value_of(flag: Flag) -> str:
    """What stands after the flag, with its unit."""
    kinds = set(get_args(flag.type)) or {flag.type}
    if flag.type is bool or bool in kinds:
        return ""
    if UNITS.get(flag.spellings[0]):
        return UNITS[flag.spellings[0]]
    if kinds & {int, float}:
        raise LookupError(f"tests/support/docs_words.py has no unit for {flag.spellings[0]}")
    metavar = flag.info.metavar
    if metavar and metavar.startswith("["):
        return ", ".join(f"`{word}`" for word in metavar.strip("[]").split("|"))
    many = " ..." if any(get_origin(kind) is list for kind in (flag.type, *kinds)) else ""
    return (metavar or ("FILE" if Path in kinds else "TEXT")) + many


def default_of(flag: Flag) -> str:
    if flag.default in (None, inspect.Parameter.empty, [], ()):
        return ""
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    return f"`{flag.default}`"


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def sentence(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def flag_table(name: str) -> str:
    """The flags of one command, without those that all engines share."""
    flags = commands()[name]
    if takes_engine_flags(flags):
        flags = [flag for flag in flags if flag.name not in ENGINE_FIELDS]
    rows = [
        [
            code(flag.spellings),
            value_of(flag),
            default_of(flag),
            code(environment(flag)),
            sentence(flag.info.help),
        ]
        for flag in flags
        if flag.is_option
    ]
    if not rows:
        return "No flags.\n"
    return table(("flag", "value", "default", "environment", "what it does"), rows)


def takes_engine_flags(flags: Iterable[Flag]) -> bool:
    return set(ENGINE_FIELDS) <= {flag.name for flag in flags}


def engine_table() -> str:
    shared = {flag.name: flag for flag in commands()["serve"]}
    defaults = {field.name: field for field in fields(EngineConfig)}
    rows = []
    for name in ENGINE_FIELDS:
        flag = shared[name]
        # Written as the dataclass has it: typer's own defaults are held to it by another test.
        value = defaults[name].default
        shown = "" if value in (None, MISSING) else default_of(flag)
        rows.append(
            [
                code(flag.spellings),
                f"`{name}`",
                value_of(flag),
                shown,
                code(environment(flag)),
                sentence(flag.info.help),
            ]
        )
    head = ("flag", "Python", "value", "default", "environment", "what it does")
    return table(head, rows)


def sampling_table() -> str:
    rows = []
    for field in fields(SamplingParams):
        if field.init:
            words = SAMPLING[field.name]
            rows.append(
                [f"`{field.name}`", f"`{field.default!r}`", words.range, sentence(words.meaning)]
            )
    return table(("field", "default", "range", "meaning"), rows)


def limit_table() -> str:
    known = {field.name: field.default for field in fields(ServerSettings)}
    rows = [
        [f"`{name}`", f"{known[name]:,} {unit}" if unit else str(known[name]), sentence(text)]
        for name, (unit, text) in LIMITS.items()
    ]
    return table(("`ServerSettings` field", "default", "what happens there"), rows)


def gguf_architectures() -> str:
    """Decoders among those that transformers maps."""
    from transformers import CONFIG_MAPPING

    from llmc.weights.gguf.config import architectures

    rows = []
    for name in architectures():
        config = CONFIG_MAPPING[name]()
        if not config.is_encoder_decoder:
            rows.append([f"`{name}`", f"`{type(config.get_text_config()).__name__}`"])
    return table(("architecture", "read as"), rows)


def gguf_types() -> str:
    from llmc.weights.gguf.blocks import GROUP, KEPT, kept_as

    rows = []
    for kind in KEPT:
        to = kept_as(kind, 16, 256)
        assert to is not None
        bits = (4 if to.format == "int4" else 8) + 32 / GROUP * (2 if to.minimum else 1)
        rows.append([f"`{kind.name}`", to.format, "yes" if to.minimum else "no", f"{bits:g}"])
    return table(("type", "held as", "with minimums", "bits a weight in memory"), rows)


def tables() -> Mapping[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {
        "engine": engine_table,
        "sampling": sampling_table,
        "limits": limit_table,
        "gguf architectures": gguf_architectures,
        "gguf types": gguf_types,
    }
    for name in commands():
        found[f"llmc {name}".strip()] = lambda name=name: flag_table(name)  # type: ignore[misc]
    return found


def written(text: str) -> str:
    """The document with its tables as they should be; ValueError for a table of unknown name."""
    known = tables()

    def fill(match: re.Match[str]) -> str:
        if match[2] not in known:
            raise ValueError(f"no table {match[2]!r}; there are {', '.join(known)}")
        return f"{match[1]}{known[match[2]]()}{match[4]}"

    return _TABLE.sub(fill, text)


def table_names(text: str) -> list[str]:
    return [match[2] for match in _TABLE.finditer(text)]


def documents() -> list[Path]:
    return sorted((ROOT / "docs").glob("*.md"))


if __name__ == "__main__":
    for path in documents():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
