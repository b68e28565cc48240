"""Row of processes: `llmc serve` as one process and as two, with clients on the same machine."""

from __future__ import annotations

import argparse

from bench.ablations.row import Figures, Row, in_turn
from bench.ablations.subject import SMALL, Bench
from bench.serve_processes import measure as measure_server


def _processes(bench: Bench) -> Figures:
    clients = bench.size(8, 2)
    load = argparse.Namespace(
        model=None,
        load_format="auto",
        clients=(clients,),
        requests_per_client=bench.size(4, 1),
        input_len=64,
        output_len=bench.size(64, 8),
    )

    def run(mode: str) -> float:
        return float(measure_server(mode, load)[clients]["output_throughput"])

    note = f"{clients} clients that stream; a fresh server a sample"
    return in_turn(
        lambda: run("two"), lambda: run("one"), min(bench.rounds, 2), note=note, warm=False
    )


ROWS = (
    Row(
        name="processes",
        what="a separate engine process",
        on="two processes",
        off="one",
        unit="tokens/s",
        model=SMALL,
        better="higher",
        measure=_processes,
    ),
)
