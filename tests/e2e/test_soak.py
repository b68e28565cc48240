"""`python -m bench.soak`: a short one among the tests, and that it notices what it looks for."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

if any(find_spec(name) is None for name in ("starlette", "httpx", "zmq")):
    pytest.skip("the server's dependencies are not installed", allow_module_level=True)

from bench_package import ROOT

from bench.soak import Client, check_growth
from bench.soak_cases import Case, draw_case
from bench.soak_ends import Answer, Choice, Holdings, SoakError, ended

MIB = 2**20
HELD = Holdings(fds=10, threads=5, tasks=1, rss=300 * MIB, counts={})
CASE = Case(prompt=(5,), fields={"n": 1}, salt=None, priority=0)
GOOD = (Choice(token_ids=(7,), text="x", finish_reason="length"),)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_short_soak() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--minutes", "0.4"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # two processes, and clients
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    for what in ("seed ", "process: held at the end", "http: held at the end", "'left'"):
        assert what in done.stdout, done.stdout
    assert "'preemptions': 0," not in done.stdout, "the pool is too large to say anything"
    assert "Traceback" not in done.stderr, done.stderr[-5000:]


def test_cases_repeat_with_their_seed() -> None:
    first, again, other = ([draw_case(random.Random(seed)) for _ in range(3)] for seed in "112")
    assert first == again != other


class Wrong:
    """An end that always answers the same."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def ask(self, case: Case) -> Answer:
        return ended(self._answer, case)

    async def misbehave(self, rng: random.Random) -> None:
        raise SoakError("it was taken")

    async def settle(self) -> Holdings:
        return HELD


def client(end: Wrong) -> Client:
    return Client(end, [CASE], [GOOD], random.Random(0), Counter())


def test_another_answer_than_alone_is_noticed() -> None:
    fine = client(Wrong(GOOD))
    asyncio.run(fine.compare(0))
    assert fine.did == {"answered: length": 1}
    with pytest.raises(SoakError, match="and alone"):
        asyncio.run(client(Wrong((replace(GOOD[0], token_ids=(8,)),))).compare(0))
    for broken in ((), (replace(GOOD[0], finish_reason="error"),)):
        with pytest.raises(SoakError, match="ended with"):
            asyncio.run(client(Wrong(broken)).compare(0))


def test_what_goes_wrong_while_leaving_is_not_lost() -> None:
    with pytest.raises(SoakError, match="ended with"):
        asyncio.run(client(Wrong(())).leave(CASE))


@pytest.mark.parametrize("name", ["fds", "tasks", "threads", "rss"])
def test_growth_is_noticed(name: str) -> None:
    check_growth([HELD] * 6)
    grown = replace(HELD, **{name: getattr(HELD, name) + (40 * MIB if name == "rss" else 9)})
    with pytest.raises(SoakError, match="memory grew" if name == "rss" else f"{name} in use"):
        check_growth([HELD] * 4 + [grown] * 2)
