"""Print a certificate: the verdict, the numbers behind it, and what to do if it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmc.cli.console import plain_table, print_table, stdout_console

if TYPE_CHECKING:
    from llmc.check.certificate import Certificate, LayerResult

_MAX_LAYERS = 12  # of more, only the worst are shown


def show(certificate: Certificate) -> None:
    console = stdout_console()
    verdict = "certified" if certificate.certified else "NOT certified"
    style = "bold green" if certificate.certified else "bold red"
    about = (
        f"{certificate.model}, {certificate.dtype} on {certificate.device}, "
        f"-O{certificate.opt_level}"
    )
    console.print()
    console.print(Text(f"  {verdict}", style=style) + Text(f"  {about}"))
    console.print(Text(f"  compared with {certificate.compared_with}", style="dim"))
    console.print(
        Text(
            f"  {certificate.num_tokens} tokens of {certificate.num_sequences} requests "
            f"in {certificate.num_steps} steps: packed, prompts in chunks, then decoded",
            style="dim",
        )
    )
    if certificate.average == "median":
        console.print(
            Text(
                "  errors of the median token: rounding changes what single tokens choose "
                "(experts or keys)",
                style="dim",
            )
        )
    if certificate.adapters:
        names = ", ".join(adapter.split()[0] for adapter in certificate.adapters)
        console.print(Text(f"  with each of the LoRA adapters {names}, and with none", style="dim"))
    console.print()
    print_table(console, _measurements(certificate))
    if certificate.layers:
        console.print()
        print_table(console, _layers(certificate.layers))
    _passes_and_kernels(console, certificate)
    for text in filter(None, (certificate.cache_note, *certificate.notes)):
        console.print(Text(f"  note: {text}", style="yellow"))
    if not certificate.certified:
        _way_out(console, certificate)
    _where(console, certificate)


def _measurements(certificate: Certificate) -> Table:
    found, limit, noise = certificate.logits, certificate.limit, certificate.noise
    table = plain_table("logits", "llmc", "allowed", "transformers itself")

    def row(name: str, value: str, most: str, own: str, good: bool) -> None:
        table.add_row(name, Text(value, style="green" if good else "bold red"), most, own)

    runs = [(f"in {certificate.dtype}", found)]
    if certificate.compiled is not None:
        runs.append((f"compiled, -O{certificate.opt_level}", certificate.compiled))
    for name, run in runs:
        row(
            f"relative error, {name}",
            f"{run.relative:.1e}",
            f"{limit.relative:.1e}",
            f"{noise.relative:.1e}" if noise else "",
            run.relative <= limit.relative,
        )
    if certificate.float32 is not None and certificate.float32_limit is not None:
        exact, most = certificate.float32, certificate.float32_limit
        row(
            "relative error, in float32",
            f"{exact.relative:.1e}",
            f"{most.relative:.1e}",
            "",
            exact.relative <= most.relative,
        )
    row("largest error", f"{found.max_abs:.1e}", "", f"{noise.max_abs:.1e}" if noise else "", True)
    row(
        "KL divergence, nats a token",
        f"{found.kl:.1e}",
        f"{limit.kl:.1e}",
        f"{noise.kl:.1e}" if noise else "",
        found.kl <= limit.kl,
    )
    ties = f" ({found.num_ties} ties)" if found.num_ties else ""
    row(
        "same best token" + ties,
        f"{found.top1:.1%}",
        f"{limit.top1:.1%}",
        f"{noise.top1:.1%}" if noise else "",
        found.top1 >= limit.top1,
    )
    for changed in certificate.changed:
        row(
            f"with {changed.name}, compared with {changed.beside}",
            f"{changed.logits.relative:.1e}, KL {changed.logits.kl:.1e}",
            f"{changed.limit.relative:.1e}, KL {changed.limit.kl:.1e}",
            "",
            changed.is_good,
        )
    return table


def _layers(layers: tuple[LayerResult, ...]) -> Table:
    table = plain_table("hidden state", "relative error", "allowed", "largest error")
    shown = layers
    if len(layers) > _MAX_LAYERS:
        worst = sorted(layers, key=lambda x: x.relative / x.limit, reverse=True)[:_MAX_LAYERS]
        shown = tuple(sorted(worst, key=lambda x: x.layer))
    for layer in shown:
        table.add_row(
            f"after layer {layer.layer}",
            Text(f"{layer.relative:.1e}", style="green" if layer.is_good else "bold red"),
            f"{layer.limit:.1e}",
            f"{layer.max_abs:.1e}",
        )
    if len(shown) < len(layers):
        table.add_row(Text(f"the worst {len(shown)} of {len(layers)}", style="dim"))
    return table


def _passes_and_kernels(console: Console, certificate: Certificate) -> None:
    off = [name for name, on in certificate.passes.items() if not on]
    passes = f"{len(certificate.passes) - len(off)} passes"
    if off:
        passes += f", without {', '.join(off)}"
    libraries = sorted(set(certificate.kernels.values()))
    kernels = ", ".join(
        f"{sum(v == library for v in certificate.kernels.values())} ops {library}"
        for library in libraries
    )
    console.print()
    console.print(Text(f"  {passes}; {kernels}", style="dim"))


def _way_out(console: Console, certificate: Certificate) -> None:
    console.print()
    for culprit in certificate.culprits:
        console.print(Text(f"  cause: {culprit}", style="bold red"))
    switches = " ".join(certificate.switches)
    if certificate.is_fixable and switches:
        console.print(Text(f"  without it the model is correct; run it with {switches}"))
    elif not certificate.is_fixable:
        console.print(Text("  no flag fixes it: please report this model"))


def _where(console: Console, certificate: Certificate) -> None:
    from llmc.check.check import certificate_path

    path = certificate_path(certificate)
    kept = (
        f"saved in {path}"
        if path
        else "not saved: the source of one of your passes was not found, so it can't be identified"
    )
    console.print(Text(f"  {kept}", style="dim"))
