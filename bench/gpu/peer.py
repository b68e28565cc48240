"""transformers on the same shape in the same process: `generate` with a static cache, compiled, and
its continuous batching. It alternates with llmc, so that both see the machine in the same state.

`peer-8b` and so on. The result includes the attention that each used: without a flash package its
continuous batching uses SDPA, which its authors measured to be five times slower.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bench.gpu.record import Record
from bench.gpu.settings import Model, Settings
from bench.gpu.subject import Subject, model_folder, running, serve
from llmc.engine.messages import AddRequest
from llmc.sampling_params import SamplingParams

_ROUNDS = 3
_SHORT_OF_TIME_S = 30.0  # a run that takes longer is not repeated


def run(name: str, settings: Settings, record: Record) -> None:
    model = settings.model(name)
    with running(settings, model) as subject:  # as in the model's own part, to reuse its artifacts
        record.measure("start", lambda: subject.startup)
        peer = record.measure("load transformers", partial(Peer, settings, model))
        if peer is None:
            return
        record.measure("batch", partial(compare_batch, subject, peer))
        record.measure("single", partial(compare_single, subject, peer))


class Peer:
    """The transformers model, with random weights created on the device."""

    def __init__(self, settings: Settings, model: Model) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.settings = settings
        with model_folder(model.config) as folder:
            config = AutoConfig.from_pretrained(folder)
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None  # answers run on
        with torch.device(settings.device):
            loaded = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
        self.model: Any = loaded.eval()
        self.model.generation_config.pad_token_id = 0

    def __repr__(self) -> str:
        return f"{type(self.model).__name__}, {self.model.config._attn_implementation}"

    def generate(self, prompt: list[int], tokens: int) -> float:
        """Seconds of one request; on a GPU transformers compiles the step over its static cache."""
        ids = torch.tensor([prompt], device=self.settings.device)
        start = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
        )
        made = out[0, len(prompt) :].tolist()
        if len(made) != tokens:
            raise RuntimeError(f"generate made {len(made)} tokens of {tokens}")
        return time.perf_counter() - start

    @contextmanager
    def batching(self, num_requests: int, prompt: int, tokens: int) -> Any:
        """Start its manager and thread, and capture graphs. Yields a call that times a batch."""
        from transformers import GenerationConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        options: dict[str, Any] = {"generation_config": config}
        package = "transformers.generation"
        if self.settings.tiny:  # it would use most of the machine's memory
            batching = importlib.import_module(f"{package}.configuration_utils")
            options["continuous_batching_config"] = batching.ContinuousBatchingConfig(
                num_blocks=16, max_batch_tokens=64
            )
        hints = importlib.import_module(f"{package}.continuous_batching.utils")
        options["workload_hints"] = hints.WorkloadHints(
            max_prompt_length=prompt, max_generated_length=tokens, num_requests=num_requests
        )
        with torch.no_grad(), self.model.continuous_batching_context_manager(**options) as manager:
            yield partial(_batch_seconds, manager)


def _batch_seconds(manager: Any, prompts: Sequence[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    manager.add_requests(inputs=[list(p) for p in prompts], max_new_tokens=tokens)
    done = 0
    while done < len(prompts):
        answer = manager.get_result(timeout=1)
        if answer is None:
            if not manager.is_running():
                raise RuntimeError("the continuous batching thread has died")
            continue
        if answer.is_finished():
            if answer.error is not None or len(answer.generated_tokens) != tokens:
                made = len(answer.generated_tokens)
                raise RuntimeError(f"{made} tokens of {tokens}; {answer.error}")
            done += 1
    return time.perf_counter() - start


def llmc_seconds(subject: Subject, prompts: Sequence[list[int]], tokens: int) -> float:
    """Seconds for all requests at once, to the last token."""
    core = subject.core(subject.runner)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(AddRequest(request_id=str(i), prompt_token_ids=prompt, sampling=params))
    serve(core, tokens * len(prompts))
    return time.perf_counter() - start


def compare_batch(subject: Subject, peer: Peer) -> dict[str, Any]:
    settings = subject.settings
    count, length, tokens = settings.peer_requests, settings.peer_prompt, settings.peer_tokens
    prompts = subject.prompts(count, length)
    with peer.batching(count, length, tokens) as theirs:
        attention = peer.model.config._attn_implementation
        found = in_turn(
            partial(llmc_seconds, subject, prompts, tokens), partial(theirs, prompts, tokens)
        )
    total = count * tokens
    return {
        "workload": f"{count} requests, {length} in, {tokens} out",
        "attention_of_transformers": attention,
        **found,
        "llmc_tokens_per_s": total / found["llmc_s"],
        "transformers_tokens_per_s": total / found["transformers_s"],
    }


def compare_single(subject: Subject, peer: Peer) -> dict[str, Any]:
    tokens = subject.settings.peer_decode
    (prompt,) = subject.prompts(1, 16)
    found = in_turn(
        partial(llmc_seconds, subject, [prompt], tokens), partial(peer.generate, prompt, tokens)
    )
    return {
        "workload": f"1 request, 16 in, {tokens} out, static cache",
        "attention_of_transformers": peer.model.config._attn_implementation,
        "compiled": hasattr(peer.model, "_compiled_call"),
        **found,
        "llmc_ms_per_token": found["llmc_s"] / tokens * 1e3,
        "transformers_ms_per_token": found["transformers_s"] / tokens * 1e3,
    }


def in_turn(ours: Callable[[], float], theirs: Callable[[], float]) -> dict[str, Any]:
    """Medians of alternating rounds; the first round of each is a warm-up, reported separately."""
    first = {"llmc_s": ours(), "transformers_s": theirs()}
    print(f"  first: llmc {first['llmc_s']:.2f} s, transformers {first['transformers_s']:.2f} s")
    rounds = 1 if first["transformers_s"] > _SHORT_OF_TIME_S else _ROUNDS
    samples: dict[str, list[float]] = {"llmc_s": [], "transformers_s": []}
    for _ in range(rounds):
        samples["llmc_s"].append(ours())
        samples["transformers_s"].append(theirs())
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"  llmc {medians['llmc_s']:.3f} s, transformers {medians['transformers_s']:.3f} s")
    return {
        **medians,
        "ratio": medians["transformers_s"] / medians["llmc_s"],
        "samples": samples,
        "first": first,
    }
