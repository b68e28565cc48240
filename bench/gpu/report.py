"""The report of a run: the parts that ran, the main results, and the targets that were missed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.gpu.targets import Verdict, judge


def text(result: Mapping[str, Any]) -> str:
    parts = result["parts"]
    lines = ["", f"{'part':12} {'state':9} {'seconds':>7}  failed measurements"]
    for name, part in parts.items():
        failed = ", ".join(failures(part)) or "-"
        lines.append(f"{name:12} {part['status']:9} {part['seconds']:7.1f}  {failed[:150]}")
    lines += ["", *figures(parts), "", *table(parts)]
    if result.get("tiny"):
        lines.append("in miniature, on a CPU: these numbers are meaningless")
    return "\n".join(lines)


def failures(part: Mapping[str, Any]) -> Iterator[str]:
    if part.get("error"):
        yield str(part["error"]).strip().splitlines()[-1][:120]
    for name, value in part.get("data", {}).items():
        if isinstance(value, Mapping) and set(value) == {"error", "where"}:
            yield f"{name} ({str(value['error']).splitlines()[0][:80]})"


def figures(parts: Mapping[str, Any]) -> Iterator[str]:
    """One line per available step time and comparison."""
    for name, part in parts.items():
        data = part.get("data", {})
        for batch, row in _mapping(data, "decode").items():
            if isinstance(row, Mapping):
                yield (
                    f"{name:10} batch {batch:>3}: {row['step_ms']:8.3f} ms per step "
                    f"({row['share_of_read']:.0%} of read), device {row['device_ms']:.3f} ms, "
                    f"host {row['host_us']:.0f} us, idle {row['idle_share']:.0%}"
                )
        mixed = _mapping(data, "mixed")
        if "output_tokens_per_s" in mixed:
            yield f"{name:10} mixed load: {mixed['output_tokens_per_s']:.0f} output tokens/s"
        for kind in ("batch", "single"):
            row = _mapping(data, kind)
            if "ratio" in row:
                yield (
                    f"{name:10} {row['workload']}: {row['ratio']:.2f} times transformers "
                    f"({row['attention_of_transformers']})"
                )
    for variant, row in parts.get("ablate", {}).get("data", {}).items():
        decode = _mapping({"row": row}, "row").get("decode")
        if isinstance(decode, Mapping):
            steps = ", ".join(f"batch {b}: {r['step_ms']:.3f} ms" for b, r in decode.items())
            yield f"ablation   {variant:24} {steps}"
    yield from gains(parts)


def gains(parts: Mapping[str, Any]) -> Iterator[str]:
    """What measured launch options change: steps or calls, then each figure of a model."""
    tuned = _mapping(parts.get("tune", {}).get("data", {}), "searches")
    steps: dict[str, tuple[float, float]] = {}  # lines that are for the same step repeat its time
    for line in tuned.get("lines", ()):
        for case, before in line["measured"].get("before_s", {}).items():
            steps[case] = before, line["measured"]["after_s"][case]
    for case, (before, after) in steps.items():
        yield f"tune       {case}: {before * 1e6:.1f} -> {after * 1e6:.1f} us"
    for name, part in parts.items():
        model, _, kind = name.partition("-")
        if kind != "tuned" or "data" not in part:
            continue
        if "unchanged" in part["data"]:
            yield f"{name:10} {part['data']['unchanged']}"
        before, after = parts.get(model, {}).get("data", {}), part["data"]
        for figure, unit in (("decode", "step_ms"), ("prefill", "ms")):
            for size, row in _mapping(after, figure).items():
                old = _mapping(_mapping(before, figure), size).get(unit)
                if old is not None:
                    times = f"{old:.3f} -> {row[unit]:.3f} ms ({row[unit] / old - 1:+.1%})"
                    yield f"{name:10} {figure} {size}: {times}"


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) and "where" not in found else {}


def table(parts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'measured':>9}  {'floor':>7} {'aim':>7}  {'':12} target"
    for verdict in judge(parts):
        target = verdict.target
        floor, aim = (_number(v, verdict) for v in (target.floor, target.aim))
        value = "-" if verdict.value is None else _number(verdict.value, verdict)
        yield f"{value:>9}  {floor:>7} {aim:>7}  {verdict.word:12} {target.text}"


def _number(value: float, verdict: Verdict) -> str:
    unit = verdict.target.unit
    return f"{value:.1%}" if unit == "%" else f"{value:.3g}{' ' if unit else ''}{unit}"
