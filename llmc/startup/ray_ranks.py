"""Tensor parallelism on Ray: the other ranks are actors in a placement group, on any of its nodes.

    rank 0 listens, and passes its address and a secret to each actor
    actor: connects, sends the secret and its rank; from there on it runs rank_process.py

Ray places ranks and reports how one exited. Ranks communicate over their own connections, as on a
single machine: orders over a channel to each rank, collectives over gloo or NCCL.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any

import torch

from llmc.config import EngineConfig
from llmc.errors import ConfigError, EngineDeadError
from llmc.kernels.collectives import Group
from llmc.runner.ranks import read_exactly
from llmc.startup.resolve import pick_device
from llmc.startup.tensor_parallel import (
    PROGRAM,
    TIMEOUT_S,
    RankOrder,
    RankProcesses,
    group_of,
    tcp_store,
)

PLACEMENT_TIMEOUT_S = 300.0  # a cluster may start nodes first
START_TIMEOUT_S = 120.0  # from a placed actor to its connection
_HELLO = struct.Struct("!32sHI")  # secret, rank, pid
_HELLO_TIMEOUT_S = 5.0


class RayRanks(RankProcesses):
    """The other ranks, as Ray actors. They end with this object, or with this process.

    If this process is an actor in a placement group (a Serve replica with
    `placement_group_bundles`), rank i runs in its bundle i. Otherwise a group is created and packed
    on as few nodes as possible. ConfigError if ranks can't be placed.
    """

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"Ray is not installed ({error}): pip install 'llmc-engine[ray]'"
            ) from None
        if not ray.is_initialized():
            ray.init(logging_level="warning")  # RAY_ADDRESS names a cluster
        self._is_cuda = pick_device(config.device).type == "cuda"
        self._address = ray.util.get_node_ip_address()
        size = config.tensor_parallel_size
        self._store = tcp_store(self._address, 0, size, TIMEOUT_S, is_master=True)
        super().__init__(size)

    def _start_all(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, first, is_ours = self._place()
        bundles = group.bundle_specs
        secret = secrets.token_bytes(32)
        actor = ray.remote(max_restarts=0)(_RankActor)
        with socket.create_server((self._address, 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(1, self.size):
                index = first + rank - 1
                handle = actor.options(
                    num_cpus=bundles[index].get("CPU", 0),
                    num_gpus=bundles[index].get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=index
                    ),
                ).remote()
                done = handle.run.remote(self._address, port, secret, rank)
                self._processes.append(_RayRank(handle, done, group if is_ours else None))
            self._take_channels(listener, secret)

    def _place(self) -> tuple[Any, int, bool]:
        """(placement group, bundle of rank 1, whether the group is ours)."""
        import ray

        group = ray.util.get_current_placement_group()
        if group is not None:
            if group.bundle_count < self.size:
                raise ConfigError(
                    f"tensor_parallel_size {self.size} needs a bundle for each rank, but the "
                    f"placement group has {group.bundle_count}; add more placement_group_bundles"
                )
            return group, 1, False
        is_actor = ray.get_runtime_context().get_actor_id() is not None
        if self._is_cuda and not is_actor:
            raise ConfigError(
                "on GPUs rank 0 has to be a Ray actor too, since Ray assigns the GPUs: serve the "
                "model with llmc.integrations.ray (docs/ray.md), or leave out "
                "distributed_executor_backend"
            )
        cores = os.environ.get("OMP_NUM_THREADS", "")
        num_cores = int(cores) if cores.isdigit() and int(cores) else 1
        torch.set_num_threads(num_cores)
        bundle = {"CPU": float(num_cores), **({"GPU": 1.0} if self._is_cuda else {})}
        others = [bundle] * (self.size - 1)
        own = [] if is_actor else [{**bundle, f"node:{self._address}": 0.001}]
        group = ray.util.placement_group([*own, *others], strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            ray.util.remove_placement_group(group)
            raise ConfigError(
                f"Ray has not placed {len(group.bundle_specs)} bundles of {bundle} in "
                f"{PLACEMENT_TIMEOUT_S:g} s; it has {ray.available_resources()} free"
            )
        return group, len(own), True

    def _take_channels(self, listener: socket.socket, secret: bytes) -> None:
        """Wait until all ranks have connected. Connections without the secret are closed."""
        found: dict[int, socket.socket] = {}
        try:
            self._accept(listener, secret, found)
        finally:  # keep the channels also on failure: they are closed with this object
            self._channels.extend(found[rank] for rank in sorted(found))

    def _accept(
        self, listener: socket.socket, secret: bytes, found: dict[int, socket.socket]
    ) -> None:
        listener.settimeout(0.5)
        until = time.monotonic() + START_TIMEOUT_S
        while len(found) < self.size - 1:
            if why := self.first_ended():
                raise EngineDeadError(f"{why} before it connected")
            if time.monotonic() > until:
                raise EngineDeadError(
                    f"{self.size - 1 - len(found)} ranks did not connect to {self._address} in "
                    f"{START_TIMEOUT_S:g} s; check that the cluster's nodes can reach each other"
                )
            try:
                channel, _ = listener.accept()
            except TimeoutError:
                continue
            rank, pid = _greeted(channel, secret)
            if not 0 < rank < self.size or rank in found:
                channel.close()
                continue
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found[rank] = channel
            self._processes[rank - 1].pid = pid

    def _send(self, channel: socket.socket, order: RankOrder) -> None:
        """Send the program too, since the rank may not have access to this machine's files."""
        folder = Path(self._folder) / "programs" / PROGRAM
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        order = dataclasses.replace(
            order,
            threads=0,
            store=(self._address, self._store.port),
            files={name: len(data) for name, data in files.items()},
        )
        self._write(channel, order.line() + b"".join(files.values()))

    def _open_group(self, device: torch.device) -> Group:
        return group_of(self._store, 0, self.size, device, TIMEOUT_S, self._address)


class _RayRank:
    """One actor. `group`: the placement group to remove with it."""

    def __init__(self, handle: Any, done: Any, group: Any) -> None:
        self._handle = handle
        self._done = done
        self._group = group
        self.pid = 0  # until it has connected

    def ended(self) -> str | None:
        import ray

        ready, _ = ray.wait([self._done], timeout=0)
        if not ready:
            return None
        try:
            return f"exit code {ray.get(self._done)}"
        except ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def end(self, timeout_s: float) -> None:
        import ray

        if not ray.is_initialized():  # then Ray has already ended it
            return
        ray.wait([self._done], timeout=timeout_s)
        ray.kill(self._handle)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


class _RankActor:
    """Runs a rank in a Ray worker."""

    def run(self, host: str, port: int, secret: bytes, rank: int) -> int:
        channel = socket.create_connection((host, port), timeout=START_TIMEOUT_S)
        channel.settimeout(None)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.sendall(_HELLO.pack(secret, rank, os.getpid()))
        from llmc.startup.rank_process import run

        return run(channel)


def _greeted(channel: socket.socket, secret: bytes) -> tuple[int, int]:
    """(rank, pid) of the peer that connected; rank 0 if it is not one of ours."""
    channel.settimeout(_HELLO_TIMEOUT_S)
    try:
        data = read_exactly(channel, _HELLO.size)
    except OSError:
        return 0, 0
    if data is None:
        return 0, 0
    said, rank, pid = _HELLO.unpack(data)
    channel.settimeout(None)
    return (rank, pid) if hmac.compare_digest(said, secret) else (0, 0)
