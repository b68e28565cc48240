"""The `llmc` command: parses `serve`, `run-batch`, `chat`, `bench` ... and dispatches.

Neither this module nor the modules it imports load torch, transformers or the web framework
before a command runs, so `--help` and usage errors are instant.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from llmc import __version__
from llmc.cli import (
    bench,
    chat,
    check,
    collect_env,
    doctor,
    errors,
    hub,
    inspect,
    run_batch,
    serve,
)
from llmc.cli.config_file import expand
from llmc.cli.help import EPILOG, HelpCommand
from llmc.cli.ported_flags import left_out_variables, port

app = typer.Typer(
    name="llmc",
    help="Serve any Hugging Face causal language model by compiling its own code.",
    epilog=EPILOG,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", cls=HelpCommand, epilog=EPILOG)(serve.command)
app.command("run-batch", cls=HelpCommand, epilog=EPILOG)(run_batch.command)
app.command("chat", cls=HelpCommand, epilog=EPILOG)(chat.command)
app.add_typer(bench.app, name="bench")
app.command("inspect", cls=HelpCommand, epilog=EPILOG)(inspect.command)
app.command("check", cls=HelpCommand, epilog=EPILOG)(check.command)
app.command("pull", cls=HelpCommand)(hub.pull)
app.command("ls", cls=HelpCommand)(hub.ls)
app.command("rm", cls=HelpCommand)(hub.rm)
app.command("doctor", cls=HelpCommand)(doctor.command)
app.command("collect-env", cls=HelpCommand)(collect_env.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llmc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback of an error (accepted anywhere on the command line).",
            envvar="LLMC_DEBUG",
        ),
    ] = False,
) -> None:
    """Declare the options of `llmc` itself; `main` reads --debug before typer does."""


def _ported(words: list[str], serve: Any) -> list[str]:
    """The words of `llmc serve` with its config file's options, and vLLM's as ours."""
    options = [p for p in serve.params if p.param_type_name == "option"]
    opposites = {name for option in options for name in option.secondary_opts}
    takes_value = {
        name: not option.is_flag
        for option in options
        for name in (*option.opts, *option.secondary_opts)
    }
    ported = port(expand(words, opposites), {**takes_value, "-h": False, "--help": False})
    if left_out := {**ported.left_out, **left_out_variables(os.environ)}:
        errors.note_left_out(left_out)
    return ported.words


def _run(command: Any, words: list[str]) -> Any:
    """Run the command that the first words name, without parsing the options of its groups: none
    are given, and typer would import pydantic for them, which takes a fifth of `--help`."""
    name, settings = "llmc", command.context_settings
    while words and words[0] in (inner := getattr(command, "commands", {})):
        command, name, words = inner[words[0]], f"{name} {words[0]}", words[1:]
    return command.main(words, prog_name=name, standalone_mode=False, **settings)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = sys.argv[1:] if argv is None else argv
    debug = errors.wants_traceback(given)
    # Remove --debug first, so that it is accepted anywhere, even after the command's name.
    words = [word for word in given if word != "--debug"]
    try:
        command: Any = typer.main.get_command(app)
        if words[:1] == ["serve"]:
            words = ["serve", *_ported(words[1:], command.commands["serve"])]
        # Without typer, which imports pydantic to parse any command: that may be what is missing.
        result = doctor.command() if words == ["doctor"] else _run(command, words)
    except (Exception, KeyboardInterrupt) as error:
        return errors.report(error, debug=debug, argv=words)
    return result if isinstance(result, int) else 0


def run() -> None:
    """Run the command line and end the process with its exit code.

    The interpreter's own cleanup is skipped: with torch loaded, it takes half a second to free
    memory that the system takes back at once. Threads are joined and exit handlers run as usual.
    """
    print_any_text()
    code: list[int] = []
    atexit.register(_end, code)  # handlers run in reverse order: this one last
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not ignored, as by nohup
            signal.signal(number, _unwind)
    try:
        code.append(main())
    except _Ended as ended:
        code.append(-ended.number)
    sys.exit(code[0])


class _Ended(SystemExit):
    """A signal that ends the process: raised so that terminals, processes and files are restored,
    ended and removed."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _unwind(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # another one ends the process at once
    raise _Ended(number)


def print_any_text() -> None:
    """Print what the terminal's encoding lacks as `?`: an answer can have any character."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _end(code: list[int]) -> None:
    if not code:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the interpreter reports it
        return
    if code[0] < 0:
        os.kill(os.getpid(), -code[0])  # so that the parent sees which signal it was
    os._exit(code[0])
