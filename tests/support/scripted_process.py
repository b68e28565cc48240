"""An engine process for tests: a real EngineCore on a runner that repeats the prompt.

It is started like llmc's engine process, in a quarter of a second: no torch, no model, no
tokenizer. `python scripted_process.py DELAY_S [FAILURE] REPORT_FD`. A prompt that starts with
HANG, HANG_IN_C or DIE makes the engine do that.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from scripted_runner import ScriptedRunner

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import NewRow
from llmc.errors import CheckpointError, EngineDeadError
from llmc.model_info import ModelInfo, Phase, PhaseBegins
from llmc.parent_watch import leave
from llmc.processes import engine_main, wire

HANG_IN_C, HANG, DIE = 397, 398, 399
VOCAB_WIDTH = 400
NUM_BLOCKS = 256
BLOCK_SIZE = 16
CONTEXT = 2048


def command(delay_s: float = 0.0, failure: str = "") -> Sequence[str]:
    return [sys.executable, __file__, str(delay_s), failure]


def model_info() -> ModelInfo:
    """Sizes that no test needs are 0."""
    return ModelInfo(
        name="scripted",
        path=Path("scripted"),
        tokenizer_path=None,
        max_model_len=CONTEXT,
        vocab_size=VOCAB_WIDTH,
        eos_token_ids=(1,),
        dtype="float32",
        device="cpu",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        pool_tokens=NUM_BLOCKS * BLOCK_SIZE,
        blocks_per_request=NUM_BLOCKS,
        weight_bytes=0,
        kv_bytes_per_token=64,
        state_bytes_per_request=0,
        is_default=False,
        opt_level=0,
        generation_defaults={"temperature": 0.5},
    )


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def repeat_prompt(new: NewRow, tokens: Sequence[int]) -> int:
    """Repeat the prompt, unless its first token hangs or ends the engine."""
    if tokens[0] == HANG_IN_C:
        ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the GIL: no other thread can run
    if tokens[0] == HANG:
        time.sleep(3600)
    if tokens[0] == DIE:
        raise EngineDeadError("the device is lost")
    return tokens[(len(tokens) - new.num_prompt_tokens) % new.num_prompt_tokens]


class ScriptedStart:
    """Replaces start.start_engine."""

    upgrade = None

    def end_ranks(self) -> None:
        """Do nothing: there are no ranks."""

    def __init__(self, delay_s: float, failure: str) -> None:
        self._delay_s = delay_s
        self._failure = failure

    def __call__(self, config: EngineConfig, on_phase: Any) -> Any:
        on_phase(PhaseBegins(name="read config"))
        on_phase(Phase(name="read config", seconds=0.25, detail="scripted"))
        match self._failure:
            case "model":
                raise CheckpointError("'nothing' has no config.json")
            case "memory":
                raise MemoryError
            case "bug":
                raise RuntimeError("out of\ncudas")
        self.info = model_info()
        runner = ScriptedRunner(repeat_prompt, max_in_flight=1)
        runner.delay_s = self._delay_s
        self.engine = EngineCore(
            runner,
            EngineLimits(
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=CONTEXT,
                vocab_size=VOCAB_WIDTH,
            ),
            EngineFeatures(eos_token_ids=(1,)),
        )
        return self


if __name__ == "__main__":
    delay, reason = float(sys.argv[1]), sys.argv[2]
    if reason == "version":
        wire.VERSION = "0.0.1-other"
    if reason == "exit":
        sys.exit(7)
    leave(engine_main.main(ScriptedStart(delay, reason)))
