"""The `llmc` command, and `python -P -m llmc.cli`."""

from __future__ import annotations

import signal


def main() -> None:
    # Python's handler would print a traceback from the middle of an import.
    held = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if held:  # not ignored, as in a shell's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from llmc.cli.main import run

    if held:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
