"""Ranks as processes: they start, share the work, and end with the engine or bring it down."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch

pytest.importorskip("zmq", reason="the server's dependencies are not installed")
pytest.importorskip("msgspec", reason="the server's dependencies are not installed")

from live_processes import live_processes
from scripted_process import has_ended, wait_for
from tiny_chat import tiny_chat_model
from tiny_models import save_checkpoint

from llmc.compiler.cache import ProgramCache
from llmc.config import EngineConfig
from llmc.engine.plan import BlockCopy, NewRow, RowWork, StepPlan
from llmc.errors import ConfigError, EngineDeadError
from llmc.kernels.prompts import Prompts
from llmc.llm import LLM
from llmc.runner.delta import encode
from llmc.runner.graphs import StepShape
from llmc.runner.ranks import Kind, Order, ReceivedStep, receive, step_order
from llmc.runner.rows import RowTables
from llmc.sampling_params import SamplingParams
from llmc.startup import background, rank_process, tensor_parallel
from llmc.startup.start import start_engine
from llmc.startup.tensor_parallel import RankOrder, RankProcesses
from llmc.structured_outputs import StructuredOutputsParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "opt_level": 0, "max_model_len": 256, "block_size": 8,
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": 2**20,
}  # fmt: skip
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 240, "ignore_eos": True}


def ranks_of(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    return [p for p in found if tensor_parallel.MODULE in p.cmdline()]


@pytest.mark.slow
def test_two_processes_answer_as_one_and_a_killed_rank_ends_the_engine() -> None:
    path = str(tiny_chat_model())
    number = StructuredOutputsParams(regex=r"[0-9]{3} [a-z]{2}")
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2),
        SamplingParams(max_tokens=12, structured_outputs=number, seed=4),
    ]
    texts = ["This License", "You may", "A number:"]

    def answers(llm: LLM) -> list[Any]:
        return [o.outputs[0].token_ids for o in llm.generate(texts, params, progress=False)]

    with LLM(path, **OPTIONS) as one:
        want, weights = answers(one), one.info.weight_bytes
    with LLM(path, tensor_parallel_size=2, **OPTIONS) as two:
        [rank] = ranks_of(os.getpid())
        assert answers(two) == want
        assert two.info.weight_bytes < weights
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 .* exited \(signal 9\)"):
            answers(two)
    wait_for(lambda: not ranks_of(os.getpid()))


@pytest.mark.slow
@pytest.mark.e2e
def test_a_rank_that_hangs_ends_with_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = {**OPTIONS, "tensor_parallel_size": 2, "model": str(tiny_chat_model())}
    with live_processes(command=(), **options) as live:
        [rank] = ranks_of(live.engine_pid)

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                live.client.post("/v1/completions", json=ENDLESS)

        asker = threading.Thread(target=ask)
        asker.start()
        wait_for(lambda: live.llm.stats().num_running == 1)
        rank.suspend()  # the engine waits for it in a collective
    asker.join(10)
    try:
        assert has_ended(rank.pid)
        assert not [*tmp_path.glob("llmc-ranks-*")]
    finally:
        if not has_ended(rank.pid):
            rank.kill()


class SlowRank:
    """A rank that takes until `release` to end."""

    pid = 0

    def __init__(self) -> None:
        self.is_ending, self.release = threading.Event(), threading.Event()

    def ended(self) -> str | None:
        return None

    def end(self, timeout_s: float) -> None:
        self.is_ending.set()
        assert self.release.wait(20)


def test_whoever_ends_the_ranks_second_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would exit the process before the first has removed the folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks, rank = RankProcesses(1), SlowRank()
    ranks._processes.append(rank)
    first, second = threading.Thread(target=ranks.end), threading.Thread(target=ranks.end)
    first.start()
    assert rank.is_ending.wait(20)
    second.start()
    second.join(0.2)
    is_waiting = second.is_alive()
    rank.release.set()
    second.join(20)
    assert is_waiting and not second.is_alive() and not [*tmp_path.iterdir()]
    first.join()


KILLED = """
import os, sys, time
from llmc.startup.tensor_parallel import RankProcesses
ranks = RankProcesses(2)
if holder := os.fork():
    print(ranks.pids[0], holder, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't tell of a parent's death")
def test_a_rank_that_sees_no_end_of_its_channel_ends_with_a_killed_engine() -> None:
    command = [sys.executable, "-P", "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        rank, holder = map(int, engine.stdout.readline().split())
        try:
            wait_for(lambda: catches(rank, signal.SIGQUIT), seconds=60)
            engine.stdin.write(b"\n")
            engine.stdin.flush()
            assert engine.wait(10) == -signal.SIGKILL
            wait_for(lambda: has_ended(rank), seconds=10)
        finally:
            for pid in (holder, rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    [line] = re.findall(r"SigCgt:\s*(\S+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(line, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_rank_that_dies_under_a_server_is_an_error_and_then_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = {**OPTIONS, "tensor_parallel_size": 2, "model": str(tiny_chat_model())}
    with live_processes(command=(), **options) as live:
        answered: list[httpx.Response] = []

        def ask() -> None:
            answered.append(live.client.post("/v1/completions", json=ENDLESS))

        asker = threading.Thread(target=ask)
        asker.start()
        wait_for(lambda: live.llm.stats().num_running == 1)
        [rank] = ranks_of(live.engine_pid)
        os.kill(rank.pid, signal.SIGKILL)
        asker.join(30)
        assert answered[0].status_code == 503
        assert answered[0].json()["error"]["code"] == "engine_dead"
        assert live.status("/health") in (200, 503)  # the port is open
        wait_for(lambda: live.status("/ready") == 200, 60)
        assert live.client.post("/v1/completions", json={**ENDLESS, "max_tokens": 3}).is_success
        [again] = ranks_of(live.engine_pid)
        [folder] = tmp_path.glob("llmc-ranks-*")
        os.kill(live.engine_pid, signal.SIGKILL)  # no rank outlives its engine
        wait_for(lambda: has_ended(again.pid))
        assert not folder.exists()


def test_a_rank_that_can_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint("llama", tmp_path)
    monkeypatch.setattr(tensor_parallel, "MODULE", "llmc.no_such_module")
    with pytest.raises(EngineDeadError, match=r"rank 1 .*(exited|did not start)"):
        start_engine(EngineConfig(model=str(path), tensor_parallel_size=2, **OPTIONS))
    assert not ranks_of(os.getpid())  # other children may be compilers of the C++ ops


@pytest.mark.parametrize(("store", "index"), [(None, 2), (("host", 1), 0)], ids=["here", "ray"])
def test_a_rank_names_its_gpu(
    store: tuple[str, int] | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cuda` alone would be the first GPU in the threads that the rank starts."""
    order = RankOrder(
        config={"model": "m", "device": "cuda"}, folder="", rank=2, size=4, threads=0,
        timeout_s=1.0, log_level=0, store=store,
    )  # fmt: skip
    asked: list[torch.device] = []

    def load(cache: object, key: str, device: torch.device) -> None:
        asked.append(device)

    monkeypatch.setattr(rank_process, "pick_device", torch.device)
    monkeypatch.setattr(rank_process, "start_kernels", asked.append)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(ProgramCache, "load", load)
    with pytest.raises(EngineDeadError, match="can't be read"):
        rank_process.load_rank(order)
    assert asked == [torch.device("cuda", index)] * 3


def test_a_faster_step_is_compiled_for_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def compile_step(*args: Any, **options: Any) -> str:
        return current[-1]

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(background, "lowered", lambda program: None)
    monkeypatch.setattr("llmc.compiler.inductor.compile_step", compile_step)
    runner = SimpleNamespace(rows=SimpleNamespace(tables={}), wants_uncompiled=False)
    for device in ("cuda:2", "cpu"):
        program = SimpleNamespace(device=torch.device(device))
        model: Any = SimpleNamespace(program=program, bound={}, runner=runner)
        step: Any = background._with_inductor(model, level=1, cache_dir=Path())
        assert step == (device if device != "cpu" else "cuda:0")


class Draft:
    """Stands for a pass that is no name."""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"extra_passes": (Draft(),)}, "passes given as objects"),
        ({"logits_processors": (Draft,)}, "logits processors given as objects"),
    ],
)
def test_what_it_can_not_be_had_with_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        start_engine(EngineConfig(model="nowhere", tensor_parallel_size=2, **options))


@pytest.mark.parametrize("size", [0, -1, 65, 2.0, True])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must be"):
        EngineConfig(tensor_parallel_size=size)


def test_orders_hold_what_a_step_needs() -> None:
    import socket

    rows = RowTables(
        num_rows=4, max_model_len=32, block_size=4, vocab_size=50, device=torch.device("cpu")
    )
    new = NewRow(
        row=1, request_id="a", token_ids=[3, 4, 5], num_prompt_tokens=3,
        sampling=SamplingParams(logprobs=2), seed=1, stop_token_ids=(), snapshot=3,
    )  # fmt: skip
    plan = StepPlan(
        step=3,
        new_rows=[new],
        work=[RowWork(row=1, start=0, num_tokens=3, sample=True, new_blocks=[7], snapshot=2)],
        block_copies=[BlockCopy(source=1, target=2)],
        swap_out=[BlockCopy(source=5, target=11), BlockCopy(source=6, target=12)],
        swap_in=[BlockCopy(source=13, target=8)],
    )
    delta = dataclasses.replace(
        encode(rows, plan, 1, 4), prompts=Prompts(first_request=1, first_token=2, lengths=(9, 8))
    )
    shape = StepShape(4, 2, 2)
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(step_order(plan, shape, delta).pack())
            ours.sendall(Order(kind=Kind.DUMMY_RUN, numbers=(3, 1, 1)).pack())
        order, dummy, end = (receive(theirs) for _ in range(3))
    assert order is not None and dummy is not None and end is None
    assert (dummy.kind, list(dummy.numbers)) == (Kind.DUMMY_RUN, [3, 1, 1])
    received = ReceivedStep.of(order)
    assert received.shape == shape
    assert (received.out_slots, received.back_slots) == ([11, 12], [13])
    assert received.delta.words.tolist() == delta.words.tolist()
    read_there_alone = {"words", "num_sampled", "picks", "picked", "wanted", "scored"}
    for field in dataclasses.fields(delta):
        if field.name not in read_there_alone:
            assert getattr(received.delta, field.name) == getattr(delta, field.name), field.name


def test_an_order_without_bounds_is_none() -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(torch.tensor([0, 1 << 40, 0]).numpy().tobytes())
        with pytest.raises(ValueError, match="is corrupt"):
            receive(theirs)
