"""`llmc doctor`: report what llmc uses on this machine, what is missing, and how to fix it."""

from __future__ import annotations

from rich.text import Text

from llmc.cli.console import stdout_console


def command() -> int:
    """Report what llmc uses on this machine, and what is missing.

    The exit code is 1 if something is missing that llmc can't run without.
    """
    from llmc.load_test.required_packages import Finding, examine_packages

    packages = list(examine_packages())
    try:
        from llmc.load_test.doctor import examine

        findings = [*examine(), *packages]
    except ModuleNotFoundError as error:
        if not any(one.is_missing for one in packages):
            raise
        advice = f"this needs the package {error.name}: install what is missing below"
        findings = [Finding(name="machine", value="not examined", advice=advice), *packages]
    console = stdout_console()
    width = max(len(finding.name) for finding in findings)
    for one in findings:
        mark = "ok" if one.is_ok else "missing" if one.is_needed else "note"
        style = {"ok": "green", "missing": "red", "note": "yellow"}[mark]
        line = Text(f"{mark:<8}", style=style)
        line.append(f"{one.name:<{width}}  ", style="dim").append(one.value, style="default")
        console.print(line)
        if one.advice:
            console.print(Text(" " * (width + 10) + "-> " + one.advice))
    num_missing = sum(one.is_missing for one in findings)
    if num_missing:
        console.print(f"{num_missing} missing")
    return 1 if num_missing else 0
