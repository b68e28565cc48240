"""An inspection on screen, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmc.cli.console import plain_table, print_table, stdout_console
from llmc.inspect.units import format_bytes, format_count

if TYPE_CHECKING:
    from llmc.inspect.facts import LayerFacts
    from llmc.inspect.fit import Row
    from llmc.inspect.inspect import Inspection, PassFacts
    from llmc.inspect.machine import Machine


def show(inspection: Inspection, machine: Machine) -> None:
    from llmc.inspect.fit import fit

    console = stdout_console()
    machine = _of_rank(inspection, machine)
    _head(console, inspection)
    _section(console, "layers", _layers(inspection))
    rows = fit(inspection.sizes, machine.memory_bytes, machine.bandwidth)
    _section(console, _fit_title(inspection, machine), _fit(rows, machine))
    if machine.bandwidth is not None:
        text = "x8: 8 requests at a time; upper bounds set by reading weights and cache"
        console.print(Text(f"  {text}", style="dim"))
    _section(console, "passes", _passes(inspection))
    _section(console, "kernels", _kernels(inspection))
    if inspection.num_captured < inspection.num_layers:
        text = (
            f"{inspection.num_captured} of {inspection.num_layers} layers were captured, in "
            f"{inspection.capture_seconds:.1f} s; the others are copies of them (--all-layers)"
        )
        console.print(Text(f"\n  {text}", style="dim"))


def _of_rank(inspection: Inspection, machine: Machine) -> Machine:
    """The machine as one rank sees it: CPU ranks share it, GPU ranks have a GPU each."""
    size = inspection.tensor_parallel_size
    if size == 1 or inspection.device != "cpu":
        return machine
    memory, bandwidth = machine.memory_bytes, machine.bandwidth
    return replace(
        machine,
        memory_bytes=None if memory is None else memory // size,
        bandwidth=None if bandwidth is None else bandwidth / size,
    )


def _head(console: Console, inspection: Inspection) -> None:
    sizes = inspection.sizes
    active = ""
    if inspection.num_active_parameters != inspection.num_parameters:
        active = f", {format_count(inspection.num_active_parameters)} active per token"
    console.print()
    console.print(
        Text(f"  {inspection.model}", style="bold") + Text(f"  {inspection.architecture}")
    )
    table = Table.grid(padding=(0, 2))
    cache = (
        [f"{format_bytes(sizes.kv_bytes_per_token)} a token"] if sizes.kv_bytes_per_token else []
    )
    if sizes.state_bytes:
        cache.append(f"{format_bytes(sizes.state_bytes)} of state per request, at any length")
    ranks = []
    if inspection.tensor_parallel_size > 1:
        each = f"{inspection.tensor_parallel_size}, each with these weights and this cache"
        ranks = [("ranks", f"{each}; {inspection.num_collectives} collectives per step")]
    for name, value in (
        ("parameters", f"{format_count(inspection.num_parameters)}{active}"),
        (
            "weights",
            f"{format_bytes(sizes.weight_bytes)} as {inspection.dtype} on {inspection.device}",
        ),
        ("context", f"{inspection.max_model_len:,} tokens, vocabulary {inspection.vocab_size:,}"),
        ("cache", ", ".join(cache)),
        *ranks,
    ):
        table.add_row(Text(name, style="dim"), value)
    print_table(console, table)


def _section(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(f"  {title}", style="bold"))
    print_table(console, table)


def _layers(inspection: Inspection) -> Table:
    """One line for each kind of layer."""
    table = plain_table(
        "layer",
        "attention",
        "experts",
        "heads",
        "KV",
        "head dim",
        "KV/token",
        "weights",
        left=3,
    )
    groups: dict[LayerFacts, list[int]] = {}
    for number, facts in inspection.layers.items():
        groups.setdefault(facts, []).append(number)
    has_state = any(f.state_bytes for f in groups)
    if has_state:
        table.add_column("state/request", justify="right", no_wrap=True)
    for facts, numbers in groups.items():
        cells = [
            ranges(numbers, inspection.num_layers),
            *_layer_cells(facts, is_layer=0 <= numbers[0] < inspection.num_layers),
        ]
        if has_state:
            cells.append(format_bytes(facts.state_bytes) if facts.state_bytes else "")
        table.add_row(*cells)
    return table


def _layer_cells(facts: LayerFacts, *, is_layer: bool) -> list[str]:
    attention = facts.attention[0] if facts.attention else None
    kinds = [*facts.other_ops]
    heads = kv_heads = head = ""
    if attention is not None:
        kinds = [attention.kind, *attention.extras, *kinds]
        heads, kv_heads = str(attention.heads), str(attention.kv_heads)
        head = str(attention.head_dim)
        if attention.v_head_dim != attention.head_dim:
            head += f" / {attention.v_head_dim}"
    experts = facts.experts
    return [
        ", ".join(kinds) or ("none" if is_layer else ""),
        f"{experts.num_chosen} of {experts.num_experts}" if experts else "",
        heads,
        kv_heads,
        head,
        format_bytes(facts.kv_bytes_per_token) if facts.kv_bytes_per_token else "",
        format_bytes(facts.weight_bytes),
    ]


def ranges(numbers: Iterable[int], num_layers: int) -> str:
    """`0-4, 6-10`; -1 is `before`, the number of layers is `after`."""
    found: list[list[int]] = []
    words = {-1: "before", num_layers: "after"}
    parts = []
    for number in numbers:
        if number in words:
            parts.append(words[number])
        elif found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    if len(spans) > 6:
        spans = [*spans[:4], "...", spans[-1]]
    parts[1 if "before" in parts else 0 : 0] = spans
    return ", ".join(parts)


def _fit_title(inspection: Inspection, machine: Machine) -> str:
    said = []
    if machine.memory_bytes is not None:
        whose = "" if machine.memory_is_given else " of this machine"
        said.append(f"in {format_bytes(machine.memory_bytes)}{whose}")
    if machine.bandwidth is not None:
        whose = "" if machine.bandwidth_is_given else ", measured here"
        said.append(f"at {machine.bandwidth / 1e9:,.0f} GB/s{whose}")
    if not said:
        return "what fits: give --memory and --bandwidth"
    where = "on each rank " if inspection.tensor_parallel_size > 1 else ""
    return f"what fits {where}" + ", how fast ".join(said)


def _fit(rows: Sequence[Row], machine: Machine) -> Table:
    from llmc.inspect.fit import BATCHES

    heads = ["context", "per request"]
    if machine.memory_bytes is not None:
        heads.append("at once")
    if machine.bandwidth is not None:
        heads += [f"tokens/s x{n}" for n in BATCHES]
    table = plain_table(*heads)
    for row in rows:
        cells = [f"{row.context:,}", format_bytes(row.request_bytes)]
        if machine.memory_bytes is not None:
            most = row.num_requests
            cells.append("no limit" if most is None else f"{most:,}" if most else "none")
        if machine.bandwidth is not None:
            cells += ["" if s is None else f"{s:,.0f}" for s in row.tokens_per_s]
        table.add_row(*cells)
    return table


def _passes(inspection: Inspection) -> Table:
    table = plain_table("pass", "layers", "ops", "", left=4)
    for found in inspection.passes:
        table.add_row(
            found.name,
            ranges(found.layers, inspection.num_layers),
            f"-{found.removed} +{found.added}" if found.removed or found.added else "",
            Text(_remark(found), style="dim"),
        )
    return table


def _remark(found: PassFacts) -> str:
    if not found.enabled:
        return "off"
    said = ["yours"] if found.is_users else []
    if not found.removed and not found.added and not found.notes:
        said.append("nothing to match")
    return "; ".join([*said, *found.notes])


def _kernels(inspection: Inspection) -> Table:
    table = plain_table("op", "runs in", "calls", left=2)
    for choice in inspection.kernels:
        style = "yellow" if choice.runs == "reference" else ""
        table.add_row(choice.op, Text(choice.runs, style=style), str(choice.count))
    return table


def print_json(inspection: Inspection, machine: Machine) -> None:
    from llmc.inspect.fit import BATCHES, fit

    machine = _of_rank(inspection, machine)
    data: dict[str, Any] = {
        f.name: _plain(getattr(inspection, f.name))
        for f in fields(inspection)
        if f.name != "stages"
    }
    data["machine"] = asdict(machine)
    rows = fit(inspection.sizes, machine.memory_bytes, machine.bandwidth)
    data["fit"] = [{**asdict(row), "batches": BATCHES} for row in rows]
    print(json.dumps(data, indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
