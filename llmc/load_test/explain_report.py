"""Shows an explained step as text and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmc.load_test.explain import Explanation
from llmc.load_test.observe import OpRow
from llmc.load_test.report import check_can_plot

_COLORS = {
    "linear": "#2563a8",
    "attention": "#c2571a",
    "norm": "#5b8c5a",
    "recurrence": "#8a5ba8",
    "sampler": "#b8901f",
    "collective": "#b03a5b",
    "rest": "#888888",
}


def format_table(explained: Explanation) -> str:
    """The verdict, then a line per op, sorted by time."""
    limits = explained.limits
    share = explained.collectives_s / max(explained.ops_s, 1e-12)
    collectives = f", {share:.0%} of them in collectives" if share else ""
    names = max(len("op"), *(len(row.name) for row in explained.rows))
    lines = [
        f"{explained.title}: {explained.step_s * 1e3:.2f} ms as served, "
        f"{explained.ops_s * 1e3:.2f} ms in its ops{collectives}",
        explained.verdict,
        *_eager(explained),
        f"{'op':{names}}  {'kind':10}  calls        ms  share        MB  % of read     GFLOP  "
        "% of peak  limit",
    ]
    for row in explained.rows:
        seconds, work = max(row.seconds, 1e-12), row.work
        read = work.num_bytes / seconds / limits.bytes_per_s
        peak = work.num_operations / seconds / limits.operations_per_s
        lines.append(
            f"{row.name:{names}}  {row.kind:10}  {row.num_calls:5}  {row.seconds * 1e3:8.3f}  "
            f"{row.seconds / explained.ops_s:5.1%}  {work.num_bytes / 1e6:8.2f}  {read:9.0%}  "
            f"{work.num_operations / 1e9:8.3f}  {peak:9.0%}  {limits.nearer(work)}"
        )
    return "\n".join(lines)


def _eager(explained: Explanation) -> list[str]:
    counts = explained.eager_steps
    reasons = ", ".join(f"{why.replace('_', ' ')}: {n}" for why, n in sorted(counts.items()))
    return [f"steps without a CUDA graph: {reasons}"] if counts else []


def format_limits(explained: Explanation) -> str:
    limits = explained.limits
    return (
        f"limits of this machine, measured: {limits.bytes_per_s / 1e9:.1f} GB/s read, "
        f"{limits.operations_per_s / 1e9:.0f} GFLOP/s in torch's product of matrices"
    )


def write_explain_plot(path: Path, title: str, explained: Sequence[Explanation]) -> None:
    """Write a figure with a panel for each: the time of each op, and the minimum by the limits."""
    check_can_plot()
    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    longest = max(len(each.rows) for each in explained)
    figure = Figure(figsize=(7.5 * len(explained), 1.6 + 0.3 * longest), layout="constrained")
    figure.suptitle(f"{title}\n{format_limits(explained[0])}", fontsize=10)
    for axes, each in zip(
        figure.subplots(1, len(explained), squeeze=False)[0], explained, strict=True
    ):
        rows: list[OpRow] = list(each.rows)[::-1]
        places = range(len(rows))
        colors = [_COLORS[row.kind] for row in rows]
        axes.barh(places, [row.seconds * 1e3 for row in rows], color=colors, alpha=0.45)
        least = [min(row.seconds, each.limits.least_seconds(row.work)) * 1e3 for row in rows]
        axes.barh(places, least, color=colors, height=0.45, label="minimum by the limits")
        axes.set_yticks(list(places), [row.name for row in rows], fontsize=8)
        axes.set_xlabel("ms")
        axes.set_title(f"{each.title}, {each.step_s * 1e3:.2f} ms\n{each.verdict}", fontsize=9)
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=120)
