"""An engine process for tests: a real EngineCore over a runner that repeats the prompt.

Started as the engine process of llmc is, in a quarter of a second: no torch, no model, no
tokenizer. `python -P scripted_process.py DELAY_S [FAILURE] REPORT_FD`. A prompt that begins with
HANG, HANG_IN_C or DIE does that to the engine.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import psutil

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import StepPlan, StepResult, TokenLogprobs
from llmc.errors import CheckpointError, EngineDeadError
from llmc.processes import engine_main, wire
from llmc.startup.start import ModelInfo, Phase

HANG_IN_C, HANG, DIE = 397, 398, 399
VOCAB_WIDTH = 400
NUM_BLOCKS = 256
BLOCK_SIZE = 16
CONTEXT = 2048


def command(delay_s: float = 0.0, failure: str = "") -> Sequence[str]:
    return [sys.executable, "-P", __file__, str(delay_s), failure]


def model_info() -> ModelInfo:
    """Sizes that matter to nobody here are 0."""
    required = [f.name for f in fields(ModelInfo) if f.default is MISSING]
    known = {
        "name": "scripted",
        "path": Path("scripted"),
        "tokenizer_path": None,
        "max_model_len": CONTEXT,
        "vocab_size": VOCAB_WIDTH,
        "eos_token_ids": (1,),
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "pool_tokens": NUM_BLOCKS * BLOCK_SIZE,
        "blocks_per_request": NUM_BLOCKS,
        "is_default": False,
        "generation_defaults": {"temperature": 0.5},
    }
    return ModelInfo(**{**dict.fromkeys(required, 0), **known})


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Gone, or dead and not yet waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class OverStep:
    """A step that runs when its result is asked for."""

    def __init__(self, result: Callable[[], StepResult]) -> None:
        self.result = result


class RepeatingRunner:
    max_in_flight = 1
    num_runtime_compiles = 0

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._rows: dict[int, tuple[list[int], int, int | None]] = {}

    def submit(self, plan: StepPlan) -> OverStep:
        return OverStep(functools.partial(self._execute, plan))

    def _execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self._delay_s)
        for new in plan.new_rows:
            wanted = new.sampling.logprobs
            self._rows[new.row] = (list(new.token_ids), new.num_prompt_tokens, wanted)
        rows = [work.row for work in plan.work if work.sample]
        token_ids = [self._draw(row) for row in rows]
        logprobs = [self._logprobs(row, token) for row, token in zip(rows, token_ids, strict=True)]
        return StepResult(token_ids=token_ids, logprobs=logprobs)

    def _logprobs(self, row: int, token: int) -> TokenLogprobs | None:
        wanted = self._rows[row][2]
        if wanted is None:
            return None
        return TokenLogprobs(
            token_id=token,
            logprob=-0.5,
            rank=1,
            top_token_ids=list(range(wanted)),
            top_logprobs=[-0.5 - i for i in range(wanted)],
        )

    def _draw(self, row: int) -> int:
        tokens, num_prompt, _ = self._rows[row]
        if tokens[0] == HANG_IN_C:
            ctypes.PyDLL(None).sleep(3600)  # PyDLL: no other thread may run meanwhile
        if tokens[0] == HANG:
            time.sleep(3600)
        if tokens[0] == DIE:
            raise EngineDeadError("the device is lost")
        tokens.append(tokens[(len(tokens) - num_prompt) % num_prompt])
        return tokens[-1]


class ScriptedStart:
    """In place of start.start_engine."""

    upgrade = None

    def __init__(self, delay_s: float, failure: str) -> None:
        self._delay_s = delay_s
        self._failure = failure

    def __call__(self, config: EngineConfig, on_phase: Any) -> Any:
        on_phase(Phase(name="read config", seconds=0.25, detail="scripted"))
        match self._failure:
            case "model":
                raise CheckpointError("'nothing' has no config.json")
            case "memory":
                raise MemoryError
            case "bug":
                raise RuntimeError("out of\ncudas")
        self.info = model_info()
        self.engine = EngineCore(
            RepeatingRunner(self._delay_s),
            EngineLimits(
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=CONTEXT,
                vocab_size=VOCAB_WIDTH,
            ),
            EngineFeatures(
                eos_token_ids=(1,),
            ),
        )
        return self


if __name__ == "__main__":
    delay, reason = float(sys.argv[1]), sys.argv[2]
    if reason == "version":
        wire.VERSION = "0.0.1-other"
    if reason == "exit":
        sys.exit(7)
    engine_main.leave(engine_main.main(ScriptedStart(delay, reason)))
