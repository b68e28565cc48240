"""The table: every row in order, and its formatting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.ablations import lora, memory, model, processes, serving, text
from bench.ablations.row import Row

ROWS: tuple[Row, ...] = (
    *text.ROWS,
    *model.ROWS,
    *memory.ROWS,
    *serving.ROWS,
    *lora.ROWS,
    *processes.ROWS,
)


def choose(names: Sequence[str] | None) -> tuple[Row, ...]:
    known = {row.name: row for row in ROWS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no row {unknown[0]!r}; the rows are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else ROWS


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| technique | with | without | ratio | unit | measured |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        on, off = row["on"], row["off"]
        lines.append(
            f"| {row['what']} | {number(on['median'])} ({on['is']}) "
            f"| {number(off['median'])} ({off['is']}) | {row['ratio']:.2f} | {row['unit']} "
            f"| {row['model']}; {row['note']}; `{row['command']}` |"
        )
    return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
