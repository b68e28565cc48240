"""A soak test: minutes of random requests, many of which disconnect early, and some invalid ones.

    python -m bench.soak [--minutes 20] [--seed N] [--end process,http] [--output-json FILE]

    round:  cases drawn from the seed -> each answered alone -> storm of clients -> all settled

Half of the time is spent on AsyncLLM in this process, half on `llmc serve` in its own. The pool is
small, so that requests preempt each other and are swapped. n > 1, priorities, salts, shared
prefixes, structured outputs and speculation are mixed in, as far as this build supports them. It
fails at the first error: an answer that differs from that of the same request alone, one without a
finish reason, a leaked block, row, task, thread or file descriptor, growing memory, a compilation
during a step, a 5xx. The printed seed reproduces the cases.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.soak_cases import Case, draw_case
from bench.soak_ends import Answer, End, Holdings, SoakError, in_process, over_http
from llmc.load_test.report import write_json

ENDS = {"process": in_process, "http": over_http}
CASES = 20  # per round
STORM_S = 12.0
CLIENTS = 16
BAD_SHARE, LEAVE_SHARE = 0.05, 0.15
MEMORY_SLACK = 32 * 2**20  # allocators keep the peak memory of a storm
LAZY_THREADS = 4  # pools start their threads when they first have work
KEPT_OPEN = 8  # connections that the client may keep alive; a leak would be one per request


@dataclass(kw_only=True)
class Report:
    """The results for one end."""

    end: str
    seed: int
    did: Counter[str] = field(default_factory=Counter)
    rounds: list[Holdings] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    print(f"seed {args.seed}", flush=True)
    seconds = args.minutes * 60 / len(args.ends)
    reports = []
    for name in args.ends:
        report = Report(end=name, seed=args.seed)
        reports.append(report)
        asyncio.run(run(report, seconds))
        print(f"{name}: {len(report.rounds)} rounds, {dict(report.did)}")
        print(f"{name}: held at the end {report.rounds[-1]}", flush=True)
    if args.output_json:
        write_json(args.output_json, {"reports": [asdict(report) for report in reports]})


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--end", dest="ends", type=_ends, default=tuple(ENDS))
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args(argv)


def _ends(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in ENDS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ENDS)}")
    return names


async def run(report: Report, seconds: float) -> None:
    """Run rounds until the time is up, at least two."""
    async with ENDS[report.end]({}) as end:
        deadline = time.monotonic() + seconds
        while len(report.rounds) < 2 or time.monotonic() < deadline:
            rng = random.Random(f"{report.seed}/{report.end}/{len(report.rounds)}")
            cases = [draw_case(rng) for _ in range(CASES)]
            alone = [await end.ask(case) for case in cases]
            storm_s = min(STORM_S, seconds / 5)
            clients = [
                Client(end, cases, alone, random.Random(rng.random()), report.did)
                for _ in range(CLIENTS)
            ]
            await asyncio.gather(*(client.run(storm_s) for client in clients))
            report.rounds.append(await end.settle())
            check_growth(report.rounds)


@dataclass
class Client:
    """Sends one request after another, at random times."""

    end: End
    cases: Sequence[Case]
    alone: Sequence[Answer]
    rng: random.Random
    did: Counter[str]

    async def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await asyncio.sleep(self.rng.expovariate(1 / 0.02))
            what = self.rng.random()
            if what < BAD_SHARE:
                await self.end.misbehave(self.rng)
                self.did["refused"] += 1
            elif what < BAD_SHARE + LEAVE_SHARE:
                await self.leave(self.rng.choice(self.cases))
            else:
                await self.compare(self.rng.randrange(len(self.cases)))

    async def leave(self, case: Case) -> None:
        """Disconnect after a moment; it is fine if the answer arrived before that."""
        task = asyncio.create_task(self.end.ask(case))
        await asyncio.wait([task], timeout=self.rng.expovariate(1 / 0.05))
        task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            self.did["left"] += 1
        elif isinstance(result, BaseException):
            raise result
        else:
            self.did["answered before leaving"] += 1

    async def compare(self, index: int) -> None:
        answer = await self.end.ask(self.cases[index])
        if answer != self.alone[index]:
            raise SoakError(
                f"{self.cases[index]} was answered\n  {answer}\nand alone\n  {self.alone[index]}"
            )
        for choice in answer:
            self.did[f"answered: {choice.finish_reason}"] += 1


def check_growth(rounds: Sequence[Holdings]) -> None:
    """Check that nothing grows after the first round, which warms everything up."""
    first, last = rounds[0], rounds[-1]
    for name, slack in (("fds", KEPT_OPEN), ("tasks", 0), ("threads", LAZY_THREADS)):
        before, after = getattr(first, name), getattr(last, name)
        if after > before + slack:
            raise SoakError(f"{after} {name} in use after {len(rounds)} rounds, {before} before")
    third = len(rounds) // 3
    if third < 1:
        return
    early = statistics.median(one.rss for one in rounds[third : 2 * third])
    late = statistics.median(one.rss for one in rounds[2 * third :])
    if late > early * 1.02 + MEMORY_SLACK:
        raise SoakError(f"memory grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB")


if __name__ == "__main__":
    try:
        main()
    except SoakError as error:
        sys.exit(f"error: {error}")
