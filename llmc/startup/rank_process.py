"""A rank other than 0 of a tensor-parallel engine: `python -P -m llmc.startup.rank_process FD`.

    RankOrder (a line on its channel) -> its shard of the weights -> orders, until the channel ends

It only has a runner, no other part of an engine. Rank 0 starts it (tensor_parallel.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import torch

from llmc.cache_dir import cache_dir
from llmc.compiler.cache import ProgramCache
from llmc.compiler.program import lowered
from llmc.errors import EngineDeadError
from llmc.kernels.collectives import Group
from llmc.kernels.cpu.threads import limit_threads
from llmc.parent_watch import die_with_parent, leave_signals_to_parent
from llmc.runner.model_runner import ModelRunner
from llmc.runner.ranks import Kind, Order, Ranks, read_exactly, receive
from llmc.startup.background import compile_in_background, kernels_are_built, start_kernels
from llmc.startup.bind import StepMode, make_runner
from llmc.startup.compile import CompiledModel, LoadedModel, load_model, rewrite_options
from llmc.startup.config_facts import FactsCache
from llmc.startup.resolve import pick_device, resolve
from llmc.startup.sizing import least_free_bytes
from llmc.startup.tensor_parallel import (
    DIES_WITH_PARENT,
    PROGRAM,
    RankOrder,
    group_of,
    open_group,
    read_line,
    tcp_store,
)

log = logging.getLogger(__name__)


def main() -> int:
    leave_signals_to_parent()  # rank 0
    if DIES_WITH_PARENT in sys.argv:
        die_with_parent()  # also in a collective that hangs
    return run(socket.socket(fileno=int(sys.argv[-1])))


def run(channel: socket.socket) -> int:
    """Run the rank at the end of a channel. -> exit code; 0 if rank 0 closed it or exited."""
    line = read_line(channel)
    if line is None:
        return 0
    order = RankOrder.of(line)
    logging.basicConfig(format=f"rank {order.rank}: {logging.BASIC_FORMAT}", level=logging.WARNING)
    logging.getLogger("llmc").setLevel(order.log_level)
    code = _run(channel, order)
    if code == 0 and order.store is None:
        shutil.rmtree(order.folder, ignore_errors=True)  # in case rank 0 was killed
    return code


def _run(channel: socket.socket, order: RankOrder) -> int:
    try:
        if order.store is None:
            model = load_rank(order)
        else:
            with tempfile.TemporaryDirectory(prefix="llmc-rank-") as folder:
                _receive_program(channel, order, Path(folder))
                model = load_rank(dataclasses.replace(order, folder=folder))
    except Exception as error:
        log.debug("startup failed", exc_info=error)
        _report(channel, f"{type(error).__name__}: {error}"[:2000])
        return 1
    _report(channel, None)
    if read_line(channel) is None:  # comes when all ranks have loaded: no timeout until then
        return 0
    worker = RankWorker(model, Ranks(group=_join(order, model.program.device, channel)))
    try:
        while (received := receive(channel)) is not None:
            worker.execute(received)
    except Exception as error:
        if _has_ended(channel):
            return 0  # the collective failed because rank 0 exited
        log.error("failed; exiting", exc_info=error)
        return 1
    return 0


def _receive_program(channel: socket.socket, order: RankOrder, folder: Path) -> None:
    """Write the program's files to where ProgramCache looks for them."""
    entry = folder / "programs" / PROGRAM
    entry.mkdir(parents=True)
    for name, size in order.files.items():
        data = read_exactly(channel, size)
        if data is None:
            raise EngineDeadError("rank 0 exited before it had sent the program")
        (entry / Path(name).name).write_bytes(data)


def _join(order: RankOrder, device: torch.device, channel: socket.socket) -> Group:
    rank, size, timeout_s = order.rank, order.size, order.timeout_s
    if order.store is None:
        return open_group(order.folder, rank, size, device, timeout_s)
    host, port = order.store
    store = tcp_store(host, port, size, timeout_s, is_master=False)
    return group_of(store, rank, size, device, timeout_s, channel.getsockname()[0])


def own_device(order: RankOrder, device: torch.device) -> torch.device:
    """The rank's GPU, by its index: the current device is that of one thread, and other threads
    load weights and compile."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", order.rank if order.store is None else 0)  # Ray shows it only one


def load_rank(order: RankOrder) -> LoadedModel:
    """Load the program that rank 0 compiled, with this rank's shard of the weights."""
    config = order.engine_config()
    device = own_device(order, pick_device(config.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        limit_threads()
        if order.threads:
            torch.set_num_threads(order.threads)
    build = start_kernels(device)
    program = ProgramCache(Path(order.folder)).load(PROGRAM, device)
    if program is None:
        raise EngineDeadError("the program of rank 0 can't be read")
    source = resolve(config, device, facts_cache=FactsCache(cache_dir()))
    processors = rewrite_options(source, ()).processors
    compiled = CompiledModel(
        source=source,
        program=dataclasses.replace(program, processors=processors),
        key="",
        built=None,
    )
    kernels_are_built(build)  # as in stages.load_models
    return load_model(compiled, order.rank)


class RankWorker:
    """Carries out orders of rank 0."""

    def __init__(self, model: LoadedModel, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._build = start_kernels(model.program.device)
        self._runner: ModelRunner | None = None

    def execute(self, order: Order) -> None:
        match order.kind:
            case Kind.LEAST_MEMORY:
                least_free_bytes(self._model.program.device, self._model.source.config, self._ranks)
            case Kind.MAKE_RUNNER:
                self._runner = None  # free its cache first
                self._make(*order.numbers)
            case _:
                assert self._runner is not None, "rank 0 orders a runner before the first step"
                self._runner.follow(order)

    def _make(
        self,
        num_blocks: int,
        max_model_len: int,
        num_snapshots: int,
        max_in_flight: int,
        level: int,
        serves: int,
    ) -> None:
        is_built = kernels_are_built(self._build)
        mode = StepMode(
            level=level, kernels_built=is_built, max_in_flight=max_in_flight, ranks=self._ranks
        )
        made = make_runner(
            self._model,
            lowered(self._model.program),
            mode,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_snapshots=num_snapshots,
            can_swap=bool(serves),
        )
        self._runner = made.runner
        if serves:
            compile_in_background([made], level, cache_dir())


def _report(channel: socket.socket, error: str | None) -> None:
    with contextlib.suppress(BrokenPipeError):  # rank 0 has exited: the channel ends
        channel.sendall(json.dumps({"error": error}).encode() + b"\n")


def _has_ended(channel: socket.socket) -> bool:
    """Whether rank 0 has closed its end; unread data is discarded."""
    channel.settimeout(1.0)
    try:
        while channel.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for background compilation
