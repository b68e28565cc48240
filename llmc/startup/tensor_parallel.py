"""Tensor parallelism: the processes of an engine's other ranks, and the requirements on a model.

    rank 0 (start_engine)                              rank 1 ... (startup/rank_process.py)
      RankProcesses: starts them          -- nothing -->  import torch
      compile, .send(model, program)      -- RankOrder -> load its part of the weights
      load its own part, .join()          <- ready -----
                                          -- all are --->  join the group
      runner                              -- Order ---->  runner

A rank is a process with a channel, which is a private pair of sockets. Collectives go over gloo or
NCCL, on this machine only. A rank exits when its channel is closed. Ranks on Ray (ray_ranks.py) can
be on other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from llmc.compiler.cache import ProgramCache
from llmc.compiler.program import Program
from llmc.config import MAX_RANKS, EngineConfig
from llmc.errors import CompileError, ConfigError, EngineDeadError, reason_of
from llmc.kernels.collectives import Group
from llmc.runner.ranks import Order, Ranks
from llmc.startup.resolve import ModelSource

log = logging.getLogger(__name__)
_dist: Any = dist  # for process groups per engine, which torch leaves untyped

MODULE = "llmc.startup.rank_process"
DIES_WITH_PARENT = "--dies-with-parent"
TIMEOUT_S = 30.0  # for a rank to join a collective; after that it counts as stuck
END_S = 3.0  # for a rank to exit after its channel was closed
PROGRAM = "program"  # the name under which rank 0 saves it for the others


def check_tensor_parallel(config: EngineConfig) -> None:
    """Raise ConfigError for options that it can't be combined with, naming all of them."""
    if config.tensor_parallel_size == 1:
        return
    refused = {
        "passes given as objects (give module:name)": any(
            not isinstance(p, str) for p in config.extra_passes
        ),
        "logits processors given as objects (give module:name)": any(
            not isinstance(p, str) for p in config.logits_processors
        ),
    }
    named = [name for name, is_asked in refused.items() if is_asked]
    if named:
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} can't be combined with "
            f"{', '.join(named)} yet; leave that out, or serve on one rank"
        )


def check_source(source: ModelSource) -> None:
    """Raise ConfigError for a model that can't be served on several ranks on this machine."""
    config = source.config
    if source.pooling is not None:
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} is not supported for pooling "
            f"models yet (task {config.task!r}); serve it on one rank"
        )
    is_here = config.distributed_executor_backend != "ray"
    num_gpus = torch.cuda.device_count() if source.device.type == "cuda" and is_here else MAX_RANKS
    if num_gpus < config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} needs a GPU for each rank, but "
            f"torch finds {num_gpus}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """A rank's configuration. Sent as one line of JSON, the first on its channel."""

    config: Mapping[str, Any]  # fields of EngineConfig
    folder: str  # private: has the program, and the store by which ranks find each other
    rank: int
    size: int
    threads: int  # 0: the rank's default
    timeout_s: float
    log_level: int
    # For a rank that may be on another machine: the address of rank 0's store, and the names and
    # sizes of the program's files, which follow the line.
    store: tuple[str, int] | None = None
    files: Mapping[str, int] = field(default_factory=dict)

    def line(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @staticmethod
    def of(line: bytes) -> RankOrder:
        return RankOrder(**json.loads(line))

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**self.config)


def open_group(folder: str, rank: int, size: int, device: torch.device, timeout_s: float) -> Group:
    """Wait until all ranks on this machine have joined. RuntimeError after `timeout_s`."""
    store = _dist.FileStore(str(Path(folder) / "ranks"), size)
    return group_of(store, rank, size, device, timeout_s, "127.0.0.1")


def group_of(
    store: Any, rank: int, size: int, device: torch.device, timeout_s: float, address: str
) -> Group:
    """The group of the ranks that share a store. gloo uses the network interface of `address`."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    if device.type == "cuda":
        processes = _nccl(store, rank, size, timeout)
    else:
        processes = _gloo(store, rank, size, timeout, address)
    group = Group(processes)
    group.total(torch.zeros(1, device=device))  # a barrier: wait until all are connected
    return group


def tcp_store(host: str, port: int, size: int, timeout_s: float, *, is_master: bool) -> Any:
    """A store for ranks that may be on other machines. Port 0: the master picks a free one."""
    return _dist.TCPStore(
        host,
        port,
        size,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    # torch's record of collectives has no lock in torch 2.11: groups of two threads crash
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    options._threads = 1
    return _dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _dist.ProcessGroupNCCL(store, rank, size, options)


class RankProcess(Protocol):
    """Another rank."""

    pid: int

    def ended(self) -> str | None:
        """How it exited, such as "exit code 1"; None while it runs."""

    def end(self, timeout_s: float) -> None:
        """Wait for it to exit after its channel was closed; kill it after `timeout_s`."""


class _LocalRank:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def end(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankProcesses:
    """The other ranks. They end with this object, or with this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.mkdtemp(prefix="llmc-ranks-")  # mode 0700
        self._processes: list[RankProcess] = []
        self._channels: list[socket.socket] = []
        self._ending = threading.Lock()
        self._end = weakref.finalize(self, _end, self._processes, self._channels, self._folder)
        try:
            self._start_all()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the ranks and remove the folder. A second call waits until the first has done so:
        the thread that makes it may be about to exit the process."""
        with self._ending:
            self._end()

    def _start_all(self) -> None:
        for _ in range(1, self.size):
            self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", MODULE]
            if threading.current_thread() is threading.main_thread():
                command.append(DIES_WITH_PARENT)  # for Linux, the parent would be this thread
            command.append(str(theirs.fileno()))
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._processes.append(_LocalRank(process))
        self._channels.append(ours)

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def send(self, source: ModelSource, program: Program) -> None:
        """Have them load their shards of this program's weights."""
        ProgramCache(Path(self._folder)).save(PROGRAM, program)
        if not (Path(self._folder) / "programs" / PROGRAM).is_dir():
            raise CompileError(
                "the program can't be sent to other ranks, because a pass added a writable tensor "
                "to the graph; leave the pass out, or serve on one rank"
            )
        for rank, channel in enumerate(self._channels, start=1):
            order = RankOrder(
                config=_plain_config(source),
                folder=self._folder,
                rank=rank,
                size=self.size,
                threads=torch.get_num_threads(),
                timeout_s=TIMEOUT_S,
                log_level=logging.getLogger("llmc").getEffectiveLevel(),
            )
            self._send(channel, order)

    def _send(self, channel: socket.socket, order: RankOrder) -> None:
        self._write(channel, order.line())

    def join(self, device: torch.device) -> Ranks:
        """Wait until they have loaded, and create the group. EngineDeadError if one has failed."""
        for rank, channel in enumerate(self._channels, start=1):
            line = read_line(channel)
            if line is None:
                raise EngineDeadError(f"rank {rank} did not start: {self.why() or 'it exited'}")
            error = json.loads(line)["error"]
            if error is not None:
                raise EngineDeadError(f"rank {rank} did not start: {error}")
        for channel in self._channels:
            self._write(channel, b"\n")
        group = self._open_group(device)
        watch = threading.Thread(
            target=_watch, args=(tuple(self._channels), group), name="llmc-ranks", daemon=True
        )
        watch.start()
        return Ranks(group=group, tell=self.tell, why=self.why)

    def _open_group(self, device: torch.device) -> Group:
        return open_group(self._folder, 0, self.size, device, TIMEOUT_S)

    def tell(self, order: Order) -> None:
        packed = order.pack()
        for channel in self._channels:
            self._write(channel, packed)

    def _write(self, channel: socket.socket, data: bytes) -> None:
        try:
            channel.sendall(data)
        except OSError as error:
            why = self.why() or f"its channel broke: {reason_of(error)}"
            raise EngineDeadError(f"{why}; restart the engine") from error

    def why(self) -> str:
        """Which rank has exited, and how. Waits briefly for one that is about to exit."""
        until = time.monotonic() + 1.0
        while not (why := self.first_ended()) and time.monotonic() < until:
            time.sleep(0.02)
        return why

    def first_ended(self) -> str:
        """The lowest rank that has exited, and how; "" while all run."""
        for rank, process in enumerate(self._processes, start=1):
            if (how := process.ended()) is not None:
                return f"rank {rank} (process {process.pid}) exited ({how})"
        return ""


def _watch(channels: Sequence[socket.socket], group: Group) -> None:
    """Wait until a rank exits, then abort the collectives that wait for it. Ranks send nothing once
    they have joined, so a readable channel means that it was closed."""
    while all(channel.fileno() >= 0 for channel in channels):
        try:
            ended = wait(channels, 1.0)
        except (OSError, ValueError):  # closed, because the engine is shutting down
            return
        if ended:
            log.debug("a rank has exited")
            group.abort()
            return


def _end(processes: Sequence[RankProcess], channels: Sequence[socket.socket], folder: str) -> None:
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)
        channel.close()
    until = time.monotonic() + END_S
    for process in processes:
        process.end(max(0.0, until - time.monotonic()))
    shutil.rmtree(folder, ignore_errors=True)


def _plain_config(source: ModelSource) -> dict[str, Any]:
    """The config's fields, without those that only rank 0 uses."""
    config = dataclasses.replace(
        source.config,
        model=str(source.files.path),
        revision=None,
        tokenizer=None,
        chat_template=None,
        chat_template_kwargs=None,
        override_generation_config=None,
        hf_overrides=None,  # the path has them
        speculative_config=None,
    )
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def read_line(channel: socket.socket) -> bytes | None:
    """Read a short line byte by byte, leaving what follows for other readers."""
    line = b""
    while not line.endswith(b"\n"):
        byte = channel.recv(1)
        if not byte:
            return None
        line += byte
    return line


def share_threads(size: int) -> None:
    """Divide this machine's cores among `size` processes, unless OMP_NUM_THREADS is set."""
    if size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
