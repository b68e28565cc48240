"""The `llmc` command, and `python -P -m llmc.cli`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    _open_closed_streams()
    # Python's handler would print a traceback from the middle of an import.
    held = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if held:  # not ignored, as in a shell's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from llmc.cli.main import run

    if held:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _open_closed_streams() -> None:
    """Open what is closed of standard input, output and error, as some supervisors start programs.
    Otherwise a file or socket would get its number, and be written to as if it were that."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


if __name__ == "__main__":
    main()
