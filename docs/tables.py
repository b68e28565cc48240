"""Generate the tables in docs/ from the code: run `python docs/tables.py`.

Each table sits between `<!-- table NAME -->` and `<!-- end -->`. tests/test_docs.py fails when one
is out of date.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from typer.main import get_command

from llmc.cli import main
from llmc.cli.options import ENGINE_OPTIONS
from llmc.config import EngineConfig
from llmc.kernels.step_inputs import IMAGE_INPUTS, ROW_TABLES, STEP_INPUTS, StepTensor

DOCS = Path(__file__).parent
ENGINE_FIELDS = [entry.field for entry in ENGINE_OPTIONS]
_TABLE = re.compile(r"(<!-- table ([\w -]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def commands() -> dict[str, list[Any]]:
    """`llmc`, `llmc serve`, `llmc bench latency` ... -> its typer options, except --help."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, list[Any]]]:
        if name == "llmc" or not hasattr(command, "commands"):
            options = [p for p in command.params if p.param_type_name == "option"]
            yield name, [p for p in options if not p.hidden and p.name not in _COMPLETION]
        for child, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {child}")

    return dict(walk(get_command(main.app), "llmc"))


_COMPLETION = ("install_completion", "show_completion")


def takes_engine_flags(options: Iterable[Any]) -> bool:
    return set(ENGINE_FIELDS) <= {option.name for option in options}


def spellings(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def environment(option: Any) -> list[str]:
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _value(option: Any) -> str:
    if option.is_flag:
        return ""
    if option.metavar.startswith("["):
        return _code(option.metavar.strip("[]").split("|"))
    return str(option.metavar) + (" ..." if option.multiple else "")


def _default(value: Any) -> str:
    if value is None or (isinstance(value, list | tuple) and not value):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _row(option: Any, default: Any, *extra: str) -> list[str]:
    text = " ".join((option.help or "").split()).replace("|", "\\|")
    names = _code(spellings(option))
    return [names, *extra, _value(option), _default(default), _code(environment(option)), text]


def command_table(name: str) -> str:
    """The flags of one command, without the engine flags, which have a table of their own."""
    options = commands()[name]
    if takes_engine_flags(options):
        options = [option for option in options if option.name not in ENGINE_FIELDS]
    if not options:
        return "No flags.\n"
    head = ("flag", "value", "default", "environment", "what it does")
    return _table(head, [_row(option, option.default) for option in options])


def engine_table() -> str:
    shared = {option.name: option for option in commands()["llmc serve"]}
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    rows = []
    for name in ENGINE_FIELDS:
        is_plain = isinstance(defaults[name], str | int | float)
        rows.append(_row(shared[name], defaults[name] if is_plain else None, f"`{name}`"))
    return _table(("flag", "Python", "value", "default", "environment", "what it does"), rows)


def step_table(inputs: Mapping[str, StepTensor]) -> str:
    rows = []
    for name, spec in inputs.items():
        notes = ", per group of layers" * spec.grouped + ", on the host" * spec.on_host
        shape, dtype = f"[{', '.join(spec.dims)}]", str(spec.dtype).removeprefix("torch.")
        rows.append([f"`{name}`{notes}", shape, dtype, spec.description])
    return _table(("input", "shape", "dtype", "description"), rows)


def gguf_architectures() -> str:
    """The decoders among the architectures that transformers or rules.json map."""
    from transformers import CONFIG_MAPPING

    from llmc.weights.gguf.rules import architectures, rules

    def read_as(model: str) -> str | None:
        config = CONFIG_MAPPING[model]()
        if getattr(config, "is_encoder_decoder", False):
            return None
        return f"`{type(config.get_text_config()).__name__}`"

    rows = []
    for name, model in architectures().items():
        variants = rules()["architectures"].get(name, {}).get("variants", [])
        models = [model, *(v["as"] for v in variants if "as" in v)]
        found = [config for m in models if (config := read_as(m))]
        if found:
            rows.append([f"`{name}`", ", ".join(found)])
    return _table(("architecture", "read as"), rows)


def ported_flags() -> str:
    from llmc.frontend import ported_options as flags

    rows = [(f"`{old}`", f"`{new}`") for old, new in flags.RENAMED.items()]
    rows += [(f"`{old}`", f"`{' '.join(new)}`") for old, new in flags.WRITTEN.items()]
    stored = ", ".join(f"`{name}`" for name in sorted(flags.STORED))
    rows += [
        ("`--quantization`", f"left out for what a checkpoint is stored in: {stored}"),
        *(
            (f"`--kv-cache-dtype {old}`", f"`--kv-cache-dtype {new}`")
            for old, new in flags.KV_CACHE_NAMES.items()
        ),
        ("`--swap-space 4`", "`--swap-space 4G`"),
        ("`--ctx-size 0`, `-c 0`", "`--max-model-len auto`"),
        ('`--allowed-origins \'["a", "b"]\'`', "`--allowed-origin a --allowed-origin b`"),
    ]
    key = "--override-generation-config"
    rows += [(f"`{old} X`", f"`{key} '{{\"{new}\": X}}'`") for old, new in flags.SAMPLED.items()]
    changed = "--hf-overrides"
    rows += [(f"`{old} X`", f"`{changed}.{new} X`") for old, new in flags.ROTARY.items()]
    rope = f"{changed}.rope_parameters"
    rows.append(("`--rope-scaling KIND` (`none`, `linear`, `yarn`)", f"`{rope}.rope_type KIND`"))
    rows.append(("`--rope-scaling JSON`", f"`{rope} JSON`"))
    neutral = json.dumps(dict(flags.NEUTRAL_SAMPLING))
    rows.append(("`--generation-config vllm`", f"`{key} '{neutral}'`"))
    for old, (values, why) in flags.VALUES.items():
        taken = ", ".join(f"`{value}`" for value in sorted(values))
        rows.append((f"`{old}`", f"left out with {taken}; else refused: {why}"))
    names = ", ".join(f"`{new}` for `{old}`" for old, new in flags.CACHE_TYPE_NAMES.items())
    rows += [
        (f"`{old}`", f"`--kv-cache-dtype` {names}; else refused: {why}")
        for old, why in flags.CACHE_TYPES.items()
    ]
    for table in (flags.NOT_NEEDED, flags.NOT_NEEDED_WITH_VALUE):
        rows += [(f"`{old}`", f"left out: {why}") for old, why in table.items()]
    rows += [(f"`{old}`", f"refused: {why}") for old, why in flags.REFUSED.items()]
    return _table(("flag", "with `llmc serve`"), rows)


def gguf_types() -> str:
    from llmc.weights.gguf.blocks import KEPT, kept_as

    rows = []
    for kind in KEPT:
        to = kept_as(kind, 256)
        assert to is not None
        num_bytes = sum(
            math.prod(to.shape(part, 16, 256)) * dtype.itemsize for part, dtype in to.dtypes.items()
        )
        bits = 8 * num_bytes / (16 * 256)
        rows.append([f"`{kind.name}`", to.format, "yes" if to.minimum else "no", f"{bits:g}"])
    return _table(("type", "kept as", "minimums", "bits per weight in memory"), rows)


def tables() -> Mapping[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {
        "engine": engine_table,
        "step inputs": lambda: step_table(STEP_INPUTS),
        "image inputs": lambda: step_table(IMAGE_INPUTS),
        "row tables": lambda: step_table(ROW_TABLES),
        "ported flags": ported_flags,
        "gguf architectures": gguf_architectures,
        "gguf types": gguf_types,
    }
    for name in commands():
        found[name] = lambda name=name: command_table(name)  # type: ignore[misc]
    return found


def table_names(text: str) -> list[str]:
    return [match[2] for match in _TABLE.finditer(text)]


def written(text: str) -> str:
    """The document with up-to-date tables. KeyError for an unknown table name."""
    known = tables()
    return _TABLE.sub(lambda match: match[1] + known[match[2]]() + match[4], text)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
