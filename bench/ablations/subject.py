"""Bench: the models of a run, each loaded once, and engines with any settings on top of them.

An engine is a few Python objects around a shared runner, so engines with different settings can
alternate within milliseconds.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.kv.swap import SwapConfig, SwapCost
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import EagerReason, PendingStep, Runner, StepPlan, StepResult
from llmc.llm import LLM
from llmc.sampling_params import SamplingParams
from llmc.startup.model_files import resolve_model
from llmc.startup.start import Started, start_engine
from llmc.text.tokenizer import Tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"
CONTEXT = 2048
TINY_CONTEXT = 512
LARGE, SMALL = "0.6B shape, random weights", "default model"  # names in a row's `model`
CACHE_BYTES = {
    None: 256 << 20,
    "tiny.json": 8 << 20,
    "qwen3-0.6b.json": 1400 << 20,
    "lfm2-tiny.json": 8 << 20,
    "lfm2-350m.json": 128 << 20,
}
Prompt = Sequence[int]


class AtOnce:
    """The same runner, one step at a time and in the caller's thread."""

    max_in_flight = 1

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        return bool(self._runner.use_idle_time(has_work=has_work))

    def start_profile(self) -> None:
        self._runner.start_profile()

    def stop_profile(self, folder: str) -> str:
        return str(self._runner.stop_profile(folder))

    @property
    def num_runtime_compiles(self) -> int:
        return int(self._runner.num_runtime_compiles)

    @property
    def eager_steps(self) -> Mapping[EagerReason, int]:
        return dict(self._runner.eager_steps)

    def submit(self, plan: StepPlan) -> PendingStep:
        done: Future[StepResult] = Future()
        done.set_result(self._runner.execute(plan))
        return done


@dataclass(kw_only=True)
class Served:
    """The times of a request's tokens, in seconds since it was sent."""

    sent_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


class Subject:
    """A started model. `engine` creates a new EngineCore on it."""

    def __init__(
        self, model: str | None, started: Started, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.model = model  # the directory; None for the default model
        self.started = started
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        space = started.runner.swap_space
        self._copy_speed = space.measure() if space is not None else 0.0
        self._rng = random.Random(0)

    @property
    def vocab_size(self) -> int:
        return self.started.info.vocab_size

    @property
    def context(self) -> int:
        return self.started.info.max_model_len

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(3, min(self.vocab_size, 3000)) for _ in range(length)]

    def engine(
        self,
        *,
        async_scheduling: bool = False,
        num_blocks: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        **features: Any,
    ) -> EngineCore:
        """A new engine, without prefix caching by default: rounds must not affect each other."""
        info, runner = self.started.info, self.started.runner
        chosen: Runner = runner if async_scheduling else AtOnce(runner)
        return EngineCore(
            chosen,
            EngineLimits(
                num_blocks=num_blocks or info.num_blocks,
                block_size=info.block_size,
                max_num_seqs=max_num_seqs or self._max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens or self._max_num_batched_tokens,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
            ),
            EngineFeatures(
                **{"enable_prefix_caching": False, **features}, async_scheduling=async_scheduling
            ),
        )

    def swap_config(self) -> SwapConfig:
        """A swap space of the size and cost of `--swap-space`; both are measured."""
        space = self.started.runner.swap_space
        assert space is not None, "subjects are started with one"
        tokens = 128
        seconds = min(self.seconds([self.prompt(tokens)], 1) for _ in range(2))
        cost = SwapCost(
            prefill_seconds_per_token=seconds / tokens,
            block_bytes=space.block_bytes,
            copy_bytes_per_second=self._copy_speed,
        )
        return SwapConfig(space.num_slots, cost)

    def seconds(self, prompts: Sequence[Prompt], max_tokens: int, **options: Any) -> float:
        """Seconds to serve these prompts at once on a new engine."""
        engine = self.engine(**options)
        start = time.perf_counter()
        for prompt in prompts:
            add(engine, prompt, max_tokens)
        serve(engine)
        return time.perf_counter() - start


def add(engine: EngineCore, prompt: Prompt, max_tokens: int, **options: Any) -> str:
    """Add a greedy request that runs to its full length."""
    sampling = options.pop("sampling", {})
    name = options.pop("name", f"r{engine.stats().num_finished}-{random.getrandbits(40)}")
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    )
    engine.add(
        AddRequest(request_id=name, prompt_token_ids=list(prompt), sampling=params, **options)
    )
    return name


def serve(engine: EngineCore, served: dict[str, Served] | None = None) -> None:
    """Step until all requests are done; records the times of those in `served`."""
    while engine.has_work:
        step(engine, served)


def step(engine: EngineCore, served: dict[str, Served] | None = None) -> None:
    updates = engine.step()
    now = time.perf_counter()
    for update in updates:
        if update.error is not None:
            raise RuntimeError(f"a request failed: {update.error}")
        if served is not None and update.request_id in served:
            served[update.request_id].times_s += [now] * len(update.new_token_ids)


class Bench:
    """State shared by all rows: sizes, rounds, and the models, loaded on first use."""

    def __init__(self, *, is_tiny: bool, rounds: int, opt_level: int | None = None) -> None:
        self.is_tiny = is_tiny
        self.rounds = rounds
        self._opt_level = opt_level
        self._stack = ExitStack()
        self._subjects: dict[str, Subject] = {}
        self._llms: dict[Subject, LLM] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full

    @property
    def small(self) -> Subject:
        """The default model."""
        return self._subject("small", None)

    def variant(self, name: str, **options: Any) -> Subject:
        """The default model with other options of EngineConfig; `name` identifies them."""
        return self._subject(name, None, **options)

    def llm(self, subject: Subject) -> LLM:
        """The Python API on a started model. Only one such object may use it at a time."""
        if subject not in self._llms:
            config = EngineConfig(model=subject.model)
            tokenizer = Tokenizer.load(resolve_model(config).path)
            self._llms[subject] = LLM.from_started(subject.started, config, tokenizer)
        return self._llms[subject]

    @property
    def large(self) -> Subject:
        """A 0.6B shape with random weights; in miniature, two tiny layers."""
        return self._subject("large", "tiny.json" if self.is_tiny else "qwen3-0.6b.json")

    @property
    def hybrid(self) -> Subject:
        """A 0.35B shape with recurrent layers and random weights; in miniature two layers."""
        return self._subject("hybrid", "lfm2-tiny.json" if self.is_tiny else "lfm2-350m.json")

    @property
    def large_lora(self) -> Subject:
        """`large` with slots for eight LoRA adapters."""
        config = "tiny.json" if self.is_tiny else "qwen3-0.6b.json"
        return self._subject("large lora", config, enable_lora=True, max_loras=8)

    def folder(self) -> Path:
        """A directory that exists until the end of the run."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    def _subject(self, name: str, config: str | None, **options: Any) -> Subject:
        if name not in self._subjects:
            self._subjects[name] = self._start(config, options)
        return self._subjects[name]

    def _start(self, config: str | None, asked: Mapping[str, Any]) -> Subject:
        model = None
        if config is not None:
            model = str(self.folder())
            shutil.copy(CONFIGS / config, Path(model) / "config.json")
        rows, tokens = 32, 2048
        options: dict[str, Any] = {
            "model": model,
            "load_format": "auto" if model is None else "dummy",
            "max_model_len": TINY_CONTEXT if self.is_tiny else CONTEXT,
            "max_num_seqs": rows,
            "max_num_batched_tokens": tokens,
            "async_scheduling": True,
            "opt_level": self._opt_level,
            "kv_cache_memory": CACHE_BYTES[config],
            "swap_space": CACHE_BYTES[config] // 3,
            **asked,
        }
        started = start_engine(EngineConfig(**options))
        if started.upgrade is not None and not started.upgrade.wait(600):
            raise RuntimeError(f"the compilation failed: {started.upgrade.error}")
        return Subject(model, started, rows, tokens)
