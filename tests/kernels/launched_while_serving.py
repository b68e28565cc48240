"""After warm-up, a GPU compiles no kernel for any traffic.

The launches are Triton's own (support/fake_triton.py); nothing runs, so the tokens mean nothing.
Run by test_warm_up.py, in a process of its own.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_triton
import pytest
import tiny_engine
import torch
import triton
from fake_graphs import FakeGraphs
from oracle import AlwaysOn
from tiers import tiered
from tiny_configs import save_random, tiny_config
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import PTXASError

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.spec_decode.ngram import NgramSpeculation
from llmc.kernels.registry import OPS
from llmc.kernels.triton import launch as launch_module
from llmc.kernels.triton.act_mul import act_mul_kernel
from llmc.kernels.triton.launch import Launch
from llmc.passes.options import PipelineOptions
from llmc.runner.device import Download, HostDevice
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig
from llmc.startup import bind, profile
from llmc.startup import compile as compile_module

COMPILED = fake_triton.install()
CONTEXT = 1201  # blocks per request are not a multiple of four
ROWS = 20
LONG = 300  # tokens of a prompt that other kernels compute
MODELS = {
    "dense": "llama", "normed twice": "gemma3_text", "latent": "deepseek_v3",
    "routed": "qwen3_moe", "recurrent": "mamba2",
}  # fmt: skip
_numbers = itertools.count()


class Results(HostDevice):
    """Every step draws token 1: what the kernels would have written is not there."""

    def __init__(self) -> None:
        super().__init__(FakeGraphs())

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return super().download([torch.ones_like(tensor) for tensor in tensors])


def start(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> tiny_engine.Running:
    options = {"max_position_embeddings": 2 * CONTEXT}
    path = save_random(tiny_config(MODELS[kind], **options), folder / kind)
    patch.setattr(
        compile_module,
        "PipelineOptions",
        lambda **given: PipelineOptions(**{**given, "device_type": "cuda"}),
    )
    patch.setattr(profile, "verify_packing", lambda *args, **options: None)
    patch.setattr(bind, "open_device", lambda device, **options: Results())
    patch.setattr(
        bind,
        "ModelRunner",
        lambda *args, **given: ModelRunner(*args, **given | {"use_graphs": True}),
    )
    running = tiny_engine.start(
        path, dtype="bfloat16", max_model_len=CONTEXT, max_num_seqs=ROWS,
        max_num_batched_tokens=1024, kv_cache_memory=2**26, enable_prefix_caching=False,
    )  # fmt: skip
    runner = running.started.runner
    bind.warm_up(runner)
    while runner.capture_next() is not None:
        pass
    return running


def add(core: EngineCore, length: int, tokens: int, **params: Any) -> None:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
    prompt = [1 + i % 50 for i in range(length)]
    core.add(AddRequest(request_id=str(next(_numbers)), prompt_token_ids=prompt, sampling=sampling))


def drain(core: EngineCore) -> None:
    while core.has_work:
        assert all(update.error is None for update in core.step())
    while core.use_idle_time():
        pass


@pytest.mark.parametrize("kind", tiered(MODELS, "dense", "latent"))
def test_nothing_is_compiled_while_serving(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(kind, tmp_path, monkeypatch)
    core = running.started.engine
    before = len(COMPILED)
    assert {"draw_kernel", "record_tokens_kernel"} <= {made.split()[0] for made in COMPILED}
    for length in (1, 2, 3, 17, 127, 128, 129, LONG, CONTEXT - 8):
        add(core, length, 3)
        drain(core)
    for i in range(3 * ROWS):
        add(core, (1, 5, 33, 150, LONG)[i % 5], 1 + i % 7, temperature=0.5, top_k=i % 3, seed=i)
    drain(core)
    for decodes in (1, 2, 3):  # long prompts begin at any request of a step
        for _ in range(decodes):
            add(core, 4, 12)
        for _ in range(3):
            core.step()
        add(core, LONG, 3)
        add(core, LONG, 3)
        drain(core)
    add(core, 6, 3, logprobs=5, repetition_penalty=1.2, min_tokens=2, logit_bias={3: 1.0})
    add(core, 40, 3, prompt_logprobs=0)
    drain(core)
    if not running.states:  # which can't be rolled back
        drafting = running.engine(
            max_num_seqs=ROWS, max_num_batched_tokens=1024, enable_prefix_caching=False,
            speculation=NgramSpeculation(SpeculativeConfig(method="ngram"), AlwaysOn()),
        )  # fmt: skip
        for _ in range(2):
            for i in range(2 * ROWS):
                add(drafting, (5, 33)[i % 2], 3 + i % 17)
            drain(drafting)
        assert drafting.stats().num_accepted_tokens > 50
    assert len(COMPILED) == before, "\n".join(COMPILED[before:])


def test_a_kernel_that_fails_to_compile_leaves_the_answer_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What Triton's own launch raises is recognized."""
    op = OPS["act_mul"]
    x = torch.randn(3, 16)
    for error in (
        CompilationError("", None, "no such instruction"),
        PTXASError("ptxas fatal"),
        RuntimeError("PassManager::run failed"),
    ):
        asked: list[Any] = []

        def fail(source: Any, error: Exception = error, asked: list[Any] = asked, **_: Any) -> None:
            asked.append(source)
            raise error

        act_mul_kernel.device_caches.clear()
        monkeypatch.setattr(triton.compiler, "compile", fail)
        monkeypatch.setattr(launch_module, "_uncompilable", {})
        for _ in range(2):
            assert torch.equal(op.run(x, "silu"), op.reference(x, "silu"))
        assert len(asked) == 1
    act_mul_kernel.device_caches.clear()
    assert len([r for r in caplog.records if "reference implementation" in r.message]) == 1


def test_kernels_are_compiled_several_at_a_time_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one, queue = triton.compiler.compile, Launch._queue
    meeting, lock = threading.Barrier(2, timeout=60), threading.Lock()
    threads: list[str] = []
    compiled_before: list[int] = []

    def counted(source: Any, **options: Any) -> Any:
        with lock:
            name = threading.current_thread().name
            is_new = name not in threads
            threads.append(name)
            waits = is_new and len(set(threads)) <= 2
        if waits and name != threading.main_thread().name:  # the first two wait for each other
            meeting.wait()
        return compile_one(source, **options)

    def recorded(launch: Launch) -> None:
        compiled_before.append(len(threads))
        queue(launch)

    runner = start("dense", tmp_path, monkeypatch).started.runner
    for kernel in _kernels():
        kernel.device_caches.clear()
    monkeypatch.setattr(triton.compiler, "compile", counted)
    monkeypatch.setattr(Launch, "_queue", recorded)
    bind.warm_up(runner)
    assert threading.main_thread().name not in threads and not meeting.broken
    assert len(compiled_before) > 100, "all kernels ran"
    assert compiled_before[0] == len(threads) > 20, "after the last was compiled"


def _kernels() -> set[Any]:
    """Those of all modules that define launches."""
    return {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("llmc.kernels.triton")
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    }
