"""`llmc collect-env`: print the information for a bug report as plain text."""

from __future__ import annotations

import os


def command() -> None:
    """Print versions, devices and settings, to paste into a bug report."""
    from llmc.load_test.machine import GIB, cxx_compiler, describe_machine, package_versions

    rows = {name: str(value) for name, value in package_versions().items()}
    for name, value in describe_machine().items():
        if name.endswith("_bytes"):
            name, value = name.removesuffix("_bytes"), f"{value / GIB:.1f} GiB"
        rows[name.replace("_", " ")] = str(value)
    rows["c++ compiler"] = cxx_compiler() or "not found (a wheel of llmc needs none)"
    for name in sorted(os.environ):
        if name.startswith("LLMC_"):
            rows[name] = "(set)" if "KEY" in name else os.environ[name]
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
