"""Engines that serve one GGUF file, each in a separate process, behind one interface.

An engine runs `Job`s: a fixed number of greedy tokens, no end token, nothing cached between jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

MAX_MODEL_LEN = 4608
MAX_REQUESTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Requests that arrive at once: prompts as token ids, and how many tokens each gets.

    With `reuses_prompt`, the engine can keep the prompt's KV cache from the run before.
    """

    prompts: Sequence[Sequence[int]]
    num_tokens: Sequence[int]
    reuses_prompt: bool = False


class Engine(ABC):
    @abstractmethod
    def __init__(self, path: Path, threads: int) -> None: ...

    @abstractmethod
    def run(self, job: Job) -> None: ...

    @abstractmethod
    def settings(self) -> str: ...


class Llmc(Engine):
    activation_bits: Literal[8, 16] = 16

    def __init__(self, path: Path, threads: int) -> None:
        import torch

        from llmc import LLM
        from llmc.kernels.cpu.build import load

        torch.set_num_threads(threads)
        load()  # the build does not count
        self._llm = LLM(
            str(path),
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_REQUESTS,
            activation_bits=self.activation_bits,
        )

    def run(self, job: Job) -> None:
        from llmc import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in job.num_tokens
        ]
        if not job.reuses_prompt:
            self._llm.reset_prefix_cache()
        self._llm.generate([list(p) for p in job.prompts], params, progress=False)

    def settings(self) -> str:
        info = self._llm.info
        bits = "defaults" if self.activation_bits == 16 else f"{self.activation_bits} bits"
        return f"{bits}: {info.dtype}, {info.weight_bytes / 2**20:.0f} MiB of weights"


class LlmcOf8Bits(Llmc):
    activation_bits = 8


class LlamaCpp(Engine):
    """llama.cpp's server, in-process, from the package xllamacpp."""

    def __init__(self, path: Path, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_ctx = MAX_MODEL_LEN * 8  # shared by all slots
        params.kv_unified = True
        params.n_parallel = MAX_REQUESTS
        params.n_batch, params.n_ubatch = 2048, 512
        params.cont_batching = True
        params.cache_prompt = False
        params.n_gpu_layers = 0
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def run(self, job: Job) -> None:
        def one(prompt: Sequence[int], num_tokens: int) -> None:
            asked = {
                "prompt": list(prompt),
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": job.reuses_prompt,
            }
            answer: Any = self._server.handle_completions(asked)
            made = answer["usage"]["completion_tokens"]
            if made != num_tokens:
                raise RuntimeError(f"llama.cpp made {made} tokens instead of {num_tokens}")

        with ThreadPoolExecutor(len(job.prompts)) as pool:
            list(pool.map(one, job.prompts, job.num_tokens))

    def settings(self) -> str:
        release = version("xllamacpp")
        return f"{release}, continuous batching, 32 slots, micro-batch 512, fp16 cache"


class NativeLlamaCpp(Engine):
    """llama.cpp from the package llama-cpp-python, whose installation compiles it for this CPU.

    The package xllamacpp has no instructions beyond AVX2. One request at a time.
    """

    def __init__(self, path: Path, threads: int) -> None:
        from llama_cpp import Llama

        self._llama = Llama(
            model_path=str(path),
            n_ctx=MAX_MODEL_LEN,
            n_batch=2048,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            flash_attn=True,  # faster here
            verbose=False,
        )

    def run(self, job: Job) -> None:
        [prompt], [num_tokens] = job.prompts, job.num_tokens
        tokens = list(prompt)
        if job.reuses_prompt and list(self._llama.eval_tokens)[: len(prompt)] == tokens:
            self._llama.n_tokens = len(prompt) - 1
            tokens = tokens[-1:]
        else:
            self._llama.reset()
        for _ in range(num_tokens):
            self._llama.eval(tokens)
            tokens = [self._llama.sample(temp=0)]

    def settings(self) -> str:
        release = version("llama-cpp-python")
        return f"{release}, compiled here, micro-batch 512, flash attention, fp16 cache"


class Transformers(Engine):
    """transformers with weights dequantized to float32, its fastest dtype without AVX-512."""

    def __init__(self, path: Path, threads: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        from llmc.startup.gguf_files import model_directory
        from llmc.weights.tensors import open_tensors

        logging.set_verbosity_error()
        torch.set_num_threads(threads)
        folder = model_directory(path)
        config = AutoConfig.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        state = {name: t.read() for name, t in open_tensors(folder, None, torch.float32).items()}
        self.model.load_state_dict(state, strict=False)  # a tied head is not in the file
        self.model.tie_weights()

    def run(self, job: Job) -> None:
        if len(job.prompts) == 1:
            self._generate(job.prompts[0], job.num_tokens[0])
        else:
            self._generate_batch(job)

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> None:
        import torch

        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    def _generate_batch(self, job: Job) -> None:
        """generate_batch supports one length per call, so its manager gets single requests."""
        from transformers import GenerationConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = self.model.init_continuous_batching(generation_config=config)
        manager.start()
        try:
            for ids, tokens in zip(job.prompts, job.num_tokens, strict=True):
                manager.add_request(list(ids), max_new_tokens=tokens)
            done = 0
            while done < len(job.prompts):
                answer = manager.get_result(timeout=600)
                done += answer is not None and answer.is_finished()
        finally:
            manager.stop(block=True)

    def settings(self) -> str:
        return "float32, SDPA, dynamic cache; generate_batch for several requests"


ENGINES: dict[str, type[Engine]] = {
    "llmc": Llmc,
    "llmc-8-bits": LlmcOf8Bits,
    "llama.cpp": LlamaCpp,
    "llama.cpp-native": NativeLlamaCpp,
    "transformers": Transformers,
}


class EngineProcess:
    """An engine in another process, which waits there between jobs."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peer_engines", name, str(path), str(threads)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.settings = str(self._receive())

    def seconds(self, job: Job) -> float:
        """Run a job; returns its seconds by the engine's own clock."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return float(self._receive())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} died; its error is above")
        return json.loads(line)


def _serve(name: str, path: Path, threads: int) -> None:
    """The process: reads jobs as lines of JSON from stdin, writes seconds as lines to stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # redirect what an engine prints
    engine = ENGINES[name](path, threads)
    print(json.dumps(engine.settings()), file=answers)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        start = time.perf_counter()
        engine.run(job)
        print(time.perf_counter() - start, file=answers)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
