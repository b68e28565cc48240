"""llmc against transformers on CPU: decode, prefill and a mixed load, one run, in turn.

    python -m bench.vs_transformers [--rounds 3] [--config bench/configs/qwen3-0.6b.json]
                                    [--threads 2] [--output-json FILE]

Both run the same random bfloat16 weights' shape in one process with the same number of threads;
rounds alternate between them and medians are reported, with every sample in the JSON. Opponent's
settings: `generate` with its default (dynamic) cache and SDPA attention; `generate_batch` with
its continuous batching in its default settings. The machine's read bandwidth is measured in the
same run, and decode is also given as a share of it: bytes of all weights a step, over the step.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from llmc import LLM, SamplingParams
from llmc.load_test.machine import (
    describe_machine,
    measure_read_bandwidth,
    package_versions,
)
from llmc.load_test.report import context, write_json

DECODE_TOKENS = 32
PREFILL_TOKENS = 1024
MIXED_REQUESTS = 32


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(args.config, Path(directory) / "config.json")
        result = run(Path(directory), args.rounds, args.opt_level)
    print_table(result)
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        facts["command"] = f"python -m bench.vs_transformers --rounds {args.rounds}"
        write_json(args.output_json, {**facts, "threads": args.threads, **result})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=Path("bench/configs/qwen3-0.6b.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--opt-level", type=int, default=None)
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def run(model: Path, rounds: int, opt_level: int | None) -> dict[str, Any]:
    """All three measurements; times in seconds, bandwidth in bytes a second."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    llm = LLM(
        str(model), load_format="dummy", max_model_len=2048, max_num_seqs=32, opt_level=opt_level
    )
    config = AutoConfig.from_pretrained(model)
    peer = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    gen = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [gen.randrange(config.vocab_size - 1000) for _ in range(tokens)]

    pairs = {
        "decode": (_llmc_decode(llm, prompt(16)), _peer_decode(peer, prompt(16))),
        "prefill": (
            lambda: _llmc_seconds(llm, [prompt(PREFILL_TOKENS)], [1]),
            lambda: _peer_seconds(peer, prompt(PREFILL_TOKENS), 1),
        ),
        "mixed": _mixed(llm, peer, prompt, gen),
    }
    result: dict[str, Any] = {"bandwidth_bytes_per_s": [], "rounds": rounds}
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in pairs}
    for ours, theirs in pairs.values():  # warm-up, not counted
        ours()
        theirs()
    for _ in range(rounds):
        result["bandwidth_bytes_per_s"].append(measure_read_bandwidth("cpu", repeats=3))
        for name, (ours, theirs) in pairs.items():
            samples[name][0].append(ours())
            samples[name][1].append(theirs())
    for name, (ours_s, theirs_s) in samples.items():
        ratios = [b / a for a, b in zip(ours_s, theirs_s, strict=True)]
        result[name] = {
            "llmc_s": ours_s,
            "transformers_s": theirs_s,
            "ratio_median": statistics.median(ratios),
        }
    step = statistics.median(samples["decode"][0])
    bandwidth = statistics.median(result["bandwidth_bytes_per_s"])
    result["weight_bytes"] = llm.info.weight_bytes
    result["decode"]["share_of_read_bandwidth"] = llm.info.weight_bytes / step / bandwidth
    return result


def _llmc_seconds(llm: LLM, prompts: Sequence[list[int]], outputs: Sequence[int]) -> float:
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in outputs
    ]
    start = time.perf_counter()
    llm.generate([list(p) for p in prompts], params, progress=False)
    return time.perf_counter() - start


def _peer_seconds(peer: Any, prompt: list[int], tokens: int) -> float:
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    with torch.inference_mode():
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def _llmc_decode(llm: LLM, prompt: list[int]) -> Callable[[], float]:
    """Seconds of one decode step: a long answer less a short one, over the steps between."""

    def measure() -> float:
        short = _llmc_seconds(llm, [prompt], [1])
        return (_llmc_seconds(llm, [prompt], [1 + DECODE_TOKENS]) - short) / DECODE_TOKENS

    return measure


def _peer_decode(peer: Any, prompt: list[int]) -> Callable[[], float]:
    def measure() -> float:
        short = _peer_seconds(peer, prompt, 1)
        return (_peer_seconds(peer, prompt, 1 + DECODE_TOKENS) - short) / DECODE_TOKENS

    return measure


def _mixed(
    llm: LLM, peer: Any, prompt: Callable[[int], list[int]], gen: random.Random
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Prompts of 32 to 256 tokens, outputs of 16 to 128: the same for both."""
    prompts = [prompt(gen.randint(32, 256)) for _ in range(MIXED_REQUESTS)]
    outputs = [gen.randint(16, 128) for _ in range(MIXED_REQUESTS)]

    def theirs() -> float:
        from transformers import GenerationConfig

        # one length a call is what generate_batch takes, so its manager gets requests singly
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        manager = peer.init_continuous_batching(generation_config=config)
        manager.start()
        try:
            for ids, tokens in zip(prompts, outputs, strict=True):
                manager.add_request(ids, max_new_tokens=tokens)
            done = 0
            while done < len(prompts):
                answer = manager.get_result(timeout=600)
                if answer is not None and answer.is_finished():
                    done += 1
        finally:
            manager.stop(block=True)
        return time.perf_counter() - start

    return (lambda: _llmc_seconds(llm, prompts, outputs)), theirs


def print_table(result: dict[str, Any]) -> None:
    print(f"read bandwidth {statistics.median(result['bandwidth_bytes_per_s']) / 1e9:.1f} GB/s")
    for name, unit in (("decode", "s a token"), ("prefill", "s"), ("mixed", "s")):
        row = result[name]
        ours, theirs = (statistics.median(row[k]) for k in ("llmc_s", "transformers_s"))
        print(
            f"{name:8} llmc {ours:.4f} {unit}, transformers {theirs:.4f} {unit}, "
            f"ratio {row['ratio_median']:.2f}"
        )
    share = result["decode"]["share_of_read_bandwidth"]
    print(f"decode at batch 1 reaches {share:.0%} of the read bandwidth")


if __name__ == "__main__":
    main()
