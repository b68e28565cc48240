"""Measures every technique with and without, alternating, in one run.

    python -m bench.ablations [--row NAME,NAME] [--rounds 3] [--threads N] [--opt-level N]
                              [--output-json FILE] [--output-md FILE] [--tiny]

A ratio is how many times better the figure is with the technique, using medians over the rounds; a
ratio below 1 is a cost. All samples are in the JSON. `--tiny` checks in seconds that everything
works.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from bench.ablations.subject import Bench
from bench.ablations.table import choose, markdown, number
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.report import context, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--row", type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--opt-level", type=int)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--output-md", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    try:
        rows = choose(args.row)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(args.threads)
    measured: list[dict[str, Any]] = []
    with Bench(
        is_tiny=args.tiny, rounds=1 if args.tiny else args.rounds, opt_level=args.opt_level
    ) as bench:
        for row in rows:
            start = time.perf_counter()
            found = row.as_json(row.measure(bench), 0.0)
            found["seconds"] = time.perf_counter() - start
            measured.append(found)
            on, off = number(found["on"]["median"]), number(found["off"]["median"])
            print(
                f"{row.name:14} {on:>8} {off:>8} {row.unit:11} {found['ratio']:7.2f}x "
                f"in {found['seconds']:.0f} s",
                flush=True,
            )
    text = markdown(measured)
    print(f"\n{text}")
    if args.output_md:
        args.output_md.write_text(text + "\n")
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        write_json(args.output_json, {**facts, "threads": args.threads, "rows": measured})


if __name__ == "__main__":
    main()
