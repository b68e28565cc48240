"""Benchmarks: `python -m bench.NAME` from the repository's root. Results are kept in results/.

The root must not stay on the path, because its folders `kernels/`, `passes/` and `cli/` would hide
packages of the same names. llmc need not be installed.
"""

import sys
from pathlib import Path
from types import TracebackType

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != _ROOT]


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Name a package that is not installed in a sentence, as the command line does."""
    from llmc.cli.errors import describe, report

    if isinstance(error, ModuleNotFoundError) and describe(error)[2] == 2:
        report(error, debug=False)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[0] == "-m":  # run as a command, not imported
    from bench.tree import make_importable

    make_importable()
    sys.excepthook = _report
