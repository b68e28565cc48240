"""Runs the other ranks of a tensor-parallel engine as threads of this process: the same runners,
orders and collectives, without the seconds that a process needs to import torch."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from llmc.compiler.program import Program
from llmc.runner.ranks import Ranks, receive
from llmc.startup import tensor_parallel
from llmc.startup.compile import CompiledModel, LoadedModel, load_model
from llmc.startup.rank_process import RankWorker
from llmc.startup.resolve import ModelSource
from llmc.startup.tensor_parallel import RankProcesses, open_group

TIMEOUT_S = 60.0
CPU = torch.device("cpu")


class RankThreads(RankProcesses):
    """Orders are sent through sockets, as to processes."""

    def __init__(self, size: int) -> None:
        self._theirs: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.errors: list[Exception] = []
        super().__init__(size)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._channels.append(ours)
        self._theirs.append(theirs)

    def send(self, source: ModelSource, program: Program) -> None:
        compiled = CompiledModel(source=source, program=program, key="", built=None)
        for rank, channel in enumerate(self._theirs, start=1):
            model = load_model(compiled, rank)  # here, as modules are built in one thread at a time
            self._threads.append(
                threading.Thread(target=self._follow, args=(model, rank, channel), daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def join(self, device: torch.device) -> Ranks:
        group = open_group(self._folder, 0, self.size, device, TIMEOUT_S)
        return Ranks(group=group, tell=self.tell, why=lambda: "; ".join(map(str, self.errors)))

    def stop(self) -> None:
        """Wait for the threads; raises an exception from any of them."""
        self.end()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        if self.errors:
            raise self.errors[0]

    def _follow(self, model: LoadedModel, rank: int, channel: socket.socket) -> None:
        try:
            group = open_group(self._folder, rank, self.size, CPU, TIMEOUT_S)
            worker = RankWorker(model, Ranks(group=group))
            while (order := receive(channel)) is not None:
                worker.execute(order)
        except Exception as error:
            self.errors.append(error)
        finally:
            channel.close()


@contextmanager
def rank_threads() -> Iterator[None]:
    """Inside, engines with several ranks run the other ranks as threads."""
    with (
        mock.patch.object(tensor_parallel, "RankProcesses", RankThreads),
        mock.patch.object(tensor_parallel, "share_threads"),
    ):
        yield
