"""Ranks that are reached over the network, without Ray: the placing is tested on a cluster
(tests/integrations/test_ray_cluster_data.py)."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from typing import Any

import pytest
from tiny_chat import tiny_chat_model

from llmc.config import EngineConfig
from llmc.errors import ConfigError, EngineDeadError
from llmc.llm import LLM
from llmc.sampling_params import SamplingParams
from llmc.startup import ray_ranks
from llmc.startup.ray_ranks import _HELLO, RayRanks, _greeted
from llmc.startup.start import start_engine
from llmc.startup.tensor_parallel import TIMEOUT_S, RankProcesses, _LocalRank, tcp_store

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "opt_level": 0, "max_model_len": 256, "max_num_seqs": 4,
    "kv_cache_memory": 2**20,
}  # fmt: skip
ON_RAY: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
ACTOR = """
import sys
from llmc.startup.ray_ranks import _RankActor
_RankActor().run("127.0.0.1", int(sys.argv[1]), bytes.fromhex(sys.argv[2]), 1)
"""


class _Unplaced(RayRanks):
    """Processes in the place of Ray's actors. Strangers connect before they do."""

    strangers: list[socket.socket]

    def __init__(self, config: EngineConfig) -> None:
        self._address = "127.0.0.1"
        self._store = tcp_store(self._address, 0, 2, TIMEOUT_S, is_master=True)
        RankProcesses.__init__(self, 2)

    def _start_all(self) -> None:
        secret = secrets.token_bytes(32)
        with socket.create_server((self._address, 0)) as listener:
            address = listener.getsockname()
            self.strangers = [socket.create_connection(address) for _ in range(3)]
            self.strangers[0].sendall(_HELLO.pack(secrets.token_bytes(32), 1, 1))
            self.strangers[1].sendall(_HELLO.pack(secret, 7, 1))  # no rank of this engine
            self.strangers[2].close()
            command = [sys.executable, "-P", "-c", ACTOR, str(address[1]), secret.hex()]
            self._processes.append(_LocalRank(subprocess.Popen(command)))
            self._take_channels(listener, secret)


@pytest.mark.slow
def test_a_rank_elsewhere_gets_the_program_and_answers_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[_Unplaced] = []
    monkeypatch.setattr(
        ray_ranks, "RayRanks", lambda config: made.append(_Unplaced(config)) or made[0]
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(["This License", "You may"], params, progress=False)
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(str(tiny_chat_model()), **OPTIONS) as one:
        want = answers(one)
    with LLM(str(tiny_chat_model()), **OPTIONS, **ON_RAY) as two:
        assert answers(two) == want
        assert [sock.recv(1) for sock in made[0].strangers[:2]] == [b"", b""]  # sent away
        for stranger in made[0].strangers:
            stranger.close()
        [rank] = made[0]._processes
        rank.end(0.0)
        with pytest.raises(EngineDeadError, match=r"rank 1 .* exited \(signal 9\)"):
            answers(two)


@pytest.mark.parametrize("said", [b"", b"short", _HELLO.pack(bytes(32), 1, 5)])
def test_who_does_not_know_the_secret_is_nobody(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ranks, "_HELLO_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        assert _greeted(ours, b"s" * 32)[0] == 0
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(_HELLO.pack(b"s" * 32, 1, 5))
        assert _greeted(ours, b"s" * 32) == (1, 5)
        assert ours.gettimeout() is None


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmc-engine\[ray\]'"):
        start_engine(EngineConfig(model=str(tiny_chat_model()), **ON_RAY))


def test_another_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="distributed executor backend 'mpi'; choose one of mp, "):
        EngineConfig(distributed_executor_backend="mpi")
