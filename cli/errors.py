"""Report a failed command: `error: ...`, possibly `hint: ...`, and an exit code.

2: the user can fix it (a flag, a model, a request); 1: llmc or the machine failed; 130: Ctrl-C.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from llmc.cli import ported_flags
from llmc.cli.flag_names import name_flags
from llmc.errors import EngineDeadError, LlmcError
from llmc.frontend.ported_options import say_left_out

_EXPECTED = {"int": "an integer", "float": "a number", "bool": "1 or 0"}  # by pydantic's kinds
_MISSING_OPTION = re.compile(r"[Nn]o such option:? *'?(-[-\w]*)'?")


def wants_traceback(argv: list[str]) -> bool:
    return "--debug" in argv or os.environ.get("LLMC_DEBUG", "") not in ("", "0", "false")


def report(error: BaseException, *, debug: bool, argv: Sequence[str] = ()) -> int:
    """Print the error on stderr and return the exit code. `argv`: the command-line words."""
    if isinstance(error, BrokenPipeError):
        # The reader of our output is gone (`| head`). Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if type(error).__name__ == "NoArgsIsHelpError":  # a bare `llmc` or `llmc bench`
        sys.stderr.write(error.format_message() + "\n")  # type: ignore[attr-defined]
        return 2
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        _write("interrupted", None)
        return 130
    message, hint, code = describe(error, argv)
    _write("error: " + message, hint)
    return code


def describe(error: BaseException, argv: Sequence[str] = ()) -> tuple[str, str | None, int]:
    """(one-line message, hint or None, exit code) of an error."""
    if hasattr(error, "format_message"):  # typer's errors, whose classes moved between versions
        return _describe_usage(error, argv)
    hint = getattr(error, "hint", None)
    if isinstance(error, LlmcError):
        code = 1 if isinstance(error, EngineDeadError) else 2
        return name_flags(_one_line(str(error))), hint and name_flags(hint), code
    if isinstance(error, ValueError):
        return _one_line(str(error)), hint or "run again with --debug to see the traceback", 2
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return "no folder for temporary files is writable", "set TMPDIR to one that is", 2
    if isinstance(error, OSError) and error.errno is not None:
        name = f": {error.filename}" if error.filename else ""
        hint = "choose another with --port" if error.errno == errno.EADDRINUSE else hint
        return _one_line((error.strerror or str(error)) + name), hint, 2
    if isinstance(error, MemoryError):
        return "out of memory", "lower --max-model-len or --kv-cache-memory", 1
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        limits = "of processes (ulimit -u, or a container's pids) or of memory (ulimit -v)"
        return "no further thread may be started", f"raise the limit {limits}", 1
    if isinstance(error, ModuleNotFoundError) and (package := _missing_package(error)):
        message = f"this needs the Python package {package}, which is not installed"
        return message, "`llmc doctor` lists what is missing, and the commands to install it", 2
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _one_line(what), "this is a bug in llmc; run again with --debug for the traceback", 1


def _missing_package(error: ModuleNotFoundError) -> str | None:
    """The top-level package that was not found; None if only a module of it is missing."""
    package = (error.name or "").partition(".")[0]
    return package if package and find_spec(package) is None else None


def _describe_usage(error: BaseException, argv: Sequence[str]) -> tuple[str, str | None, int]:
    message = _one_line(error.format_message())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "llmc"
    hint = f"see `{path} --help`"
    if (value := _rejected_value(error)) is not None:
        return f"{_given_as(error)} must be {value}", hint, 2
    missing = _MISSING_OPTION.match(message)
    if missing is not None:
        name = _as_written(missing[1], argv)
        message = f"{path} has no option {name}"
        known = list(getattr(error, "possibilities", None) or ())
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=ported_flags.TYPO)
        if known_elsewhere := ported_flags.hint(name):
            hint = known_elsewhere
        elif nearest:
            message += f"; did you mean {nearest[0]}?"
    return message, hint, int(getattr(error, "exit_code", 2))


def _rejected_value(error: BaseException) -> str | None:
    """The expected type and the value, of an error in which typer leaves out the value."""
    reasons: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()  # pydantic's
    if not reasons or not hasattr(error, "param"):
        return None
    kind = _EXPECTED.get(reasons[0]["type"].partition("_")[0], reasons[0]["msg"])
    return f"{kind}, got {reasons[0]['input']!r:.80}"


def _given_as(error: BaseException) -> str:
    """The flag, or the environment variable that was read in its place."""
    parameter, context = error.param, error.ctx  # type: ignore[attr-defined]
    source = context.get_parameter_source(parameter.name)
    names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or ()
    if source is not None and source.name == "ENVIRONMENT":
        return next((name for name in names if os.environ.get(name)), parameter.opts[0])
    return str(parameter.opts[0])


def _as_written(name: str, argv: Sequence[str]) -> str:
    """The option as written: typer reports `-t` for `-tp`, which it reads as short options."""
    words = (word.partition("=")[0] for word in argv)
    return next((word for word in words if word.startswith(name) and word[:2] != "--"), name)


def note_left_out(flags: Mapping[str, str]) -> None:
    """Print one warning for all flags that were ignored."""
    _write(f"warning: {say_left_out(flags)}", None)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _write(message: str, hint: str | None) -> None:
    sys.stderr.write(message + "\n")
    if hint:
        sys.stderr.write(f"hint: {_one_line(hint)}\n")
