"""`vllm serve` flags on the command line of `llmc serve`: accepted, translated or rejected.

A command line that worked with vLLM should either start, or report all unsupported flags at once.
Flags that request what llmc always does are ignored, with one warning for all of them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import ConfigError
from llmc.frontend.ported_options import (
    CACHE_TYPE_NAMES,
    CACHE_TYPES,
    KV_CACHE_NAMES,
    MAX_GIB,
    NEUTRAL_SAMPLING,
    NOT_NEEDED,
    NOT_NEEDED_WITH_VALUE,
    REFUSED,
    RENAMED,
    ROTARY,
    RUNNERS,
    SAMPLED,
    STORED,
    VALUES,
    WRITTEN,
    listed,
    task_of,
)


class UnknownOptionsError(ConfigError):
    """A command line has unknown flags."""

    hint = "see `llmc serve --help`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """`words` of an llmc command line, and the flags that were ignored, with the reasons."""

    words: list[str]
    left_out: dict[str, str]


def _quantization(value: str, left_out: dict[str, str]) -> list[str]:
    if value not in STORED:
        return ["--quantization", value]
    left_out["--quantization"] = "a quantized checkpoint is served in its stored format"
    return []


def _kv_cache_dtype(value: str, left_out: dict[str, str]) -> list[str]:
    return ["--kv-cache-dtype", KV_CACHE_NAMES.get(value, value)]


def _swap_space(value: str, left_out: dict[str, str]) -> list[str]:
    """vLLM counts GiB, llmc counts bytes: small numbers must be GiB."""
    is_gib = re.fullmatch(r"\d+(\.\d+)?", value) and float(value) < MAX_GIB
    return ["--swap-space", f"{value}G" if is_gib else value]


def _context(value: str, left_out: dict[str, str]) -> list[str]:
    """0 is the model's own context for other servers."""
    return ["--max-model-len", "auto" if value == "0" else value]


def _allowed_origins(value: str, left_out: dict[str, str]) -> list[str]:
    try:
        origins = json.loads(value)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(one, str) for one in origins):
        raise ConfigError(f"--allowed-origins must be a JSON list of strings, got {value!r:.80}")
    return [word for origin in origins for word in ("--allowed-origin", origin)]


def _task(flag: str) -> Callable[[str, dict[str, str]], list[str]]:
    def words(value: str, left_out: dict[str, str]) -> list[str]:
        task = task_of(flag, value)
        if task is None:
            left_out[flag] = "the checkpoint's files specify it"
            return []
        return ["--task", task]

    return words


_TRANSLATED: Mapping[str, Callable[[str, dict[str, str]], list[str]]] = {
    "--quantization": _quantization,
    "-q": _quantization,
    "--kv-cache-dtype": _kv_cache_dtype,
    "--swap-space": _swap_space,
    "--ctx-size": _context,
    "-c": _context,
    "--allowed-origins": _allowed_origins,
    "--runner": _task("--runner"),
    "--convert": _task("--convert"),
}
_SAMPLING = "--override-generation-config"
_CONFIG = "--hf-overrides"
_MERGED = (_SAMPLING, _CONFIG)  # with what other flags add to them
_ROTARY = "--rope-scaling"
_WITH_VALUE = frozenset(
    (*RENAMED, *_TRANSLATED, *CACHE_TYPES, *NOT_NEEDED_WITH_VALUE, *VALUES, *_MERGED, _ROTARY)
)
_MODEL = frozenset(("--model", "--model-path", "-m", "-hf", "-hfr", "--hf-repo"))
_IN_JSON = (
    *("--speculative-config", "--limit-mm-per-prompt", *_MERGED),
    *("--chat-template-kwargs", "--default-chat-template-kwargs"),
)
TYPO = 0.75  # how alike two options must be for one to be a misspelling of the other
_KNOWN = _WITH_VALUE.union(WRITTEN, NOT_NEEDED, REFUSED, SAMPLED, ROTARY)
_ADAPTERS = "--lora-modules"
# These accept several values in a row if the first word is MODEL. Values of _ADAPTERS differ from
# models, and may always stand in a row.
_SEVERAL = ("--served-model-name", "--api-key", _ADAPTERS)


def port(words: Sequence[str], options: Mapping[str, bool] | None = None) -> Ported:
    """Translate `llmc serve` words that may contain vLLM flags into llmc's own flags.

    `options` are llmc's own flags, and whether each takes a value. Without it, unknown flags are
    kept.

    Raises ConfigError naming every unsupported flag, and what to do instead.
    """
    out: list[str] = []
    left_out: dict[str, str] = {}
    refused: dict[str, str] = {}
    unknown: list[str] = []
    objects: dict[str, dict[str, Any]] = {}  # options in JSON that were given key by key
    rest = [word for given in words for word in _split(given, options or {})]
    has_model = bool(rest) and (not rest[0].startswith("-") or not _MODEL.isdisjoint(rest))
    while rest:
        name = rest.pop(0)
        if (name in WRITTEN or name in NOT_NEEDED) and _is_off(rest):
            refused[f"{name} false"] = NOT_NEEDED.get(name, "leave it out")
        elif name in WRITTEN:
            out += WRITTEN[name]
        elif name in NOT_NEEDED:
            left_out[name] = NOT_NEEDED[name]
        elif (flag := name.partition("=")[0]) == _ADAPTERS or (flag in _SEVERAL and has_model):
            out.append(name)
            if flag == name:
                out += rest[:1]  # the first value, whatever it is; typer reports a missing one
                del rest[:1]
            may_follow = _is_no_flag if has_model else _is_adapter
            while rest and may_follow(rest[0]):
                out += [flag, rest.pop(0)]
        elif name in REFUSED:
            refused[name] = REFUSED[name]
            _drop_values(rest)
        elif name.partition(".")[0] in _IN_JSON and "." in name:
            _set(objects, name, rest)
        elif name in SAMPLED:
            _set(objects, f"{_SAMPLING}.{SAMPLED[name]}", rest, flag=name)
        elif name in ROTARY:
            _set(objects, f"{_CONFIG}.{ROTARY[name]}", rest, flag=name)
        elif name not in _WITH_VALUE:
            option = name.partition("=")[0]
            is_short = not option.startswith("--") and option[:2] in (options or ())  # -O3, -qint8
            if options is None or option in options or is_short or not option.startswith("-"):
                out.append(name)
                if options is not None and options.get(name):
                    out += rest[:1]
                    del rest[:1]
            else:
                unknown.append(option)
                _drop_values(rest)
        elif name in NOT_NEEDED_WITH_VALUE:
            left_out[name] = NOT_NEEDED_WITH_VALUE[name]
            if rest and not re.match("-[^0-9]", rest[0]):  # older servers took some as switches
                del rest[0]
        elif not rest:
            raise ConfigError(f"{name} needs a value")
        else:
            value = rest.pop(0)
            if (option := RENAMED.get(name, name)) in _MERGED:
                out += _merged(objects, option, value)
            elif name == _ROTARY:
                _set_rotary(objects, value)
            elif name == "--generation-config" and value == "vllm":
                objects[_SAMPLING] = {**NEUTRAL_SAMPLING, **objects.get(_SAMPLING, {})}
            elif name in _TRANSLATED:
                out += _TRANSLATED[name](value, left_out)
            elif name in RENAMED:
                out += [RENAMED[name], value]
            elif name in CACHE_TYPES and value in CACHE_TYPE_NAMES:
                out += ["--kv-cache-dtype", CACHE_TYPE_NAMES[value]]
            elif name in CACHE_TYPES:
                refused[f"{name} {value}"] = CACHE_TYPES[name]
            elif value in VALUES[name][0]:
                left_out[name] = f"llmc always does {value}"
            else:
                refused[f"{name} {value}"] = VALUES[name][1]
    if unknown and options is not None:
        raise UnknownOptionsError(_say_unknown(unknown, options, refused))
    if refused:
        raise ConfigError(f"llmc serve does not support {listed(refused)}")
    rope = objects.get(_CONFIG, {}).get("rope_parameters")
    if isinstance(rope, dict) and "factor" in rope and not {"type", "rope_type"} & {*rope}:
        raise ConfigError(f"a factor for rotary embeddings needs {_ROTARY} linear or yarn, too")
    out += [f"{name}={json.dumps(value)}" for name, value in objects.items()]
    return Ported(words=out, left_out=left_out)


def left_out_variables(environment: Iterable[str]) -> dict[str, str]:
    """vLLM's environment variables that have no effect, with the reason. Its API key is read."""
    return {
        name: "flags are read from variables named LLMC_..."
        for name in sorted(environment)
        if name.startswith("VLLM_") and name != "VLLM_API_KEY"
    }


def _is_off(rest: list[str]) -> bool:
    """Whether the word after a switch turns it off; a true or false is removed."""
    value = rest[0].lower() if rest else ""
    if value in ("true", "false"):
        del rest[0]
    return value == "false"


def _is_no_flag(word: str) -> bool:
    return not word.startswith("-")


def _is_adapter(word: str) -> bool:
    """Whether a word is NAME=DIR or JSON, and not a model whose path has an equals sign."""
    return re.match("[{[]|[^-=][^=]*=", word) is not None and not os.path.exists(word)


def _drop_values(rest: list[str]) -> None:
    while rest and not rest[0].startswith("-"):
        rest.pop(0)


def _merged(objects: dict[str, dict[str, Any]], option: str, value: str) -> list[str]:
    """A JSON object, added to what other flags set; -> what is no JSON object, as it is."""
    try:
        given = json.loads(value)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        return [option, value]
    objects.setdefault(option, {}).update(given)
    return []


def _set_rotary(objects: dict[str, dict[str, Any]], value: str) -> None:
    """A kind of scaling, or a JSON object with all of its fields."""
    kinds = {"none": "default", "linear": "linear", "yarn": "yarn"}
    try:
        given = json.loads(value)
    except ValueError:
        given = {"rope_type": kinds.get(value)}
    if not isinstance(given, dict) or None in given.values():
        raise ConfigError(
            f"{_ROTARY} must be {', '.join(kinds)} or a JSON object, got {value!r:.80}"
        )
    objects.setdefault(_CONFIG, {}).setdefault("rope_parameters", {}).update(given)


def _set(
    objects: dict[str, dict[str, Any]], name: str, rest: list[str], flag: str | None = None
) -> None:
    """`--option.key value`, vLLM's syntax for one key of a JSON option. `flag`: as the user wrote
    it."""
    path, equals, value = name.partition("=")
    if not equals:
        if not rest:
            raise ConfigError(f"{flag or path} needs a value")
        value = rest.pop(0)
    option, *keys, last = path.split(".")
    inner = objects.setdefault(option, {})
    for key in keys:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {key} has a value already")
    try:
        inner[last] = json.loads(value)
    except ValueError:
        inner[last] = value


def _say_unknown(
    unknown: Sequence[str], options: Mapping[str, bool], refused: Mapping[str, str]
) -> str:
    """One sentence about all unknown flags, and those that are refused."""
    parts = []
    for name in unknown:
        nearest = difflib.get_close_matches(name, options, n=1, cutoff=TYPO)
        parts.append(f"{name} (did you mean {nearest[0]}?)" if nearest else name)
    more = f"; and it does not support {listed(refused)}" if refused else ""
    return f"llmc serve has no option {', '.join(parts)}{more}"


def _split(word: str, options: Mapping[str, bool]) -> list[str]:
    """`--a_b=c` as `--a-b`, `c` if a table has that flag, and as `--a-b=c` if `options` has it:
    vLLM accepts both spellings."""
    name, equals, value = word.partition("=")
    if not name.startswith("-"):
        return [word]
    known, dot, key = name.partition(".")
    known = known.replace("_", "-")
    if dot and known == "-O":  # -O.key, vLLM's short form of its --compilation-config
        known = "-cc"
    if dot and known in _IN_JSON:
        return [known + dot + key + equals + value]
    if known in _SEVERAL:  # with `=` there is one value, which can begin with a dash
        return [known + equals + value]
    if known not in _KNOWN:
        return [known + equals + value] if known in options else [word]
    return [known, value] if equals else [known]


# Flags of `vllm bench`, for `llmc bench`.
_RESULT = "write the result with --output-json FILE"
_BENCH: Mapping[str, str] = {
    "--dataset-name": "prompts are random with --random-input-len, or from --dataset-path FILE",
    "--save-result": _RESULT,
    "--result-dir": _RESULT,
    "--result-filename": _RESULT,
}


def hint(name: str) -> str | None:
    """Advice for a vLLM flag given to a command without that option."""
    if name in _BENCH:
        return _BENCH[name]
    if name in RENAMED:
        return f"the option is called {RENAMED[name]}"
    if name in WRITTEN:
        return f"write {' '.join(WRITTEN[name])}"
    if name in RUNNERS:
        return "the option is called --task"
    if name in ROTARY or name == _ROTARY:
        return f"give {_CONFIG} JSON with fields of config.json"
    if name in SAMPLED:
        return f"give {_SAMPLING} '{{\"{SAMPLED[name]}\": ...}}'"
    if name in VALUES:
        return VALUES[name][1]
    for table in (NOT_NEEDED, NOT_NEEDED_WITH_VALUE):
        if name in table:
            return f"{table[name]}; remove the option"
    return CACHE_TYPES.get(name) or REFUSED.get(name)
