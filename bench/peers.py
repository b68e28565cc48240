"""Compares llmc with other engines on one GGUF file: decode, prefill and a mixed load on CPU.

    pip install -e ".[peers]"   # a prebuilt llama.cpp
    python -m bench.peers [--peer llama.cpp,transformers] [--type BF16] [--rounds 5] [--threads 2]
                          [--only decode,prefill-128] [--output-json FILE] [MODEL.gguf]

MODEL defaults to the default model. `--peer llmc-8-bits` adds llmc with `activation_bits=8`, and
`--peer llama.cpp-native` llama.cpp compiled for this CPU (`pip install llama-cpp-python`), which
serves one request at a time and so has no mixed load. xllamacpp has no instructions beyond AVX2.
`--type` first rewrites the file's matrices in another type. Every engine has a separate process,
gets the same token ids, and generates greedily to the same lengths. Rounds alternate between the
engines, each in a different order; medians are printed, and every sample is in the JSON. The
machine's read bandwidth is measured in the same run. Decode is reported as a share of it, counting
the bytes of the file's tensors per token. `decode-4096` decodes behind a prompt of 4096 tokens,
which engines with a prompt cache do not compute again. Where $LLMC_CPU_TARGET forces a level, torch
has no more instructions either, in llmc and in transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from bench.peer_engines import ENGINES, EngineProcess, Job
from bench.rewrite_gguf import rewrite
from bench.torch_level import limit_torch
from llmc.load_test.machine import describe_machine, measure_read_bandwidth, package_versions
from llmc.load_test.report import context, write_json
from llmc.startup.default_model import default_model_path
from llmc.weights.gguf.reader import GgufHeader, read_header

DECODE_TOKENS = 64
LONG_CONTEXT = 4096
PREFILLS = (128, 1024)
MIXED_REQUESTS = 32
LONG_DECODE = f"decode-{LONG_CONTEXT}"
KINDS = ("decode", LONG_DECODE, *(f"prefill-{length}" for length in PREFILLS), "mixed")


def jobs(vocab_size: int) -> dict[str, Job]:
    """Jobs by name. Ids are random: the engines do not depend on their meaning."""
    gen = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [gen.randrange(vocab_size // 2) for _ in range(length)]

    prefills = {
        f"prefill-{length}": Job(prompts=[prompt(length)], num_tokens=[1]) for length in PREFILLS
    }
    mixed = Job(
        prompts=[prompt(gen.randint(32, 256)) for _ in range(MIXED_REQUESTS)],
        num_tokens=[gen.randint(16, 64) for _ in range(MIXED_REQUESTS)],
    )
    decodes = {}
    for kind, length in (("decode", 16), (LONG_DECODE, LONG_CONTEXT)):
        start, reuses = prompt(length), kind == LONG_DECODE
        for name, count in (("one token", 1), ("answer", 1 + DECODE_TOKENS)):
            job = Job(prompts=[start], num_tokens=[count], reuses_prompt=reuses)
            decodes[f"{kind}: {name}"] = job
    return {
        **decodes,
        **prefills,
        "mixed": mixed,
    }


def measure(
    path: Path, names: list[str], kinds: list[str], rounds: int, threads: int
) -> dict[str, Any]:
    """Seconds by engine and measurement, one number per round; `decode` is per token."""
    header = read_header(path)
    todo = jobs(header.tensors["token_embd.weight"].shape[0])
    result: dict[str, Any] = {
        "file": path.name,
        "weight_bytes": _bytes_per_token(header),
        "bandwidth_bytes_per_s": [],
    }
    with contextlib.ExitStack() as stack:
        engines = []
        for name in names:
            engine = EngineProcess(name, path, threads)
            stack.callback(engine.close)
            engines.append(engine)
            for kind in kinds:  # not counted
                _seconds(engine, kind, todo)
        result["settings"] = {engine.name: engine.settings for engine in engines}
        samples: dict[str, dict[str, list[float]]] = {
            name: {kind: [] for kind in kinds} for name in names
        }
        for number in range(rounds):
            result["bandwidth_bytes_per_s"].append(measure_read_bandwidth("cpu", repeats=3))
            turn = number % len(engines)
            for kind in kinds:
                for engine in engines[turn:] + engines[:turn]:
                    samples[engine.name][kind].append(_seconds(engine, kind, todo))
    return {**result, "seconds": samples}


def _bytes_per_token(header: GgufHeader) -> int:
    """Bytes of the weights that one token reads: of routed experts, those of as many as it has."""
    name = header.architecture
    count, used = (header.metadata.get(f"{name}.expert_{key}") for key in ("count", "used_count"))
    is_routed = bool(count and used)
    return sum(
        t.num_bytes * used // count if is_routed and "_exps." in tensor else t.num_bytes
        for tensor, t in header.tensors.items()
    )


def _seconds(engine: EngineProcess, kind: str, todo: Mapping[str, Job]) -> float:
    if kind in todo:
        return engine.seconds(todo[kind])
    one = todo[f"{kind}: one token"]
    if one.reuses_prompt:
        engine.seconds(one)  # now its KV cache is kept
    short = engine.seconds(one)
    return (engine.seconds(todo[f"{kind}: answer"]) - short) / DECODE_TOKENS


def print_table(result: Mapping[str, Any]) -> None:
    bandwidth = statistics.median(result["bandwidth_bytes_per_s"])
    print(f"{result['file']}: {result['weight_bytes'] / 1e6:.0f} MB of weights, ", end="")
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    for name, settings in result["settings"].items():
        print(f"  {name}: {settings}")
    medians = {
        name: {kind: statistics.median(values) for kind, values in kinds.items()}
        for name, kinds in result["seconds"].items()
    }
    ours = medians["llmc"]
    for kind in ours:
        told = []
        for name, times in medians.items():
            ratio = "" if name == "llmc" else f" ({times[kind] / ours[kind]:.2f} x llmc's)"
            told.append(f"{name} {times[kind] * 1e3:.1f} ms{ratio}")
        print(f"{kind:13} " + ", ".join(told))
    if "decode" in ours:
        share = result["weight_bytes"] / ours["decode"] / bandwidth
        print(f"decode reads the file's weights at {share:.0%} of the bandwidth")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--peer", default="llama.cpp,transformers", help="engines, comma-separated")
    parser.add_argument("--type", choices=[kind.name for kind in GGMLQuantizationType])
    parser.add_argument("--only", default=",".join(KINDS), help="measurements, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    peers = args.peer.split(",")
    unknown = [name for name in peers if name not in ENGINES]
    if unknown:
        parser.error(f"--peer has {', '.join(unknown)}; known are {', '.join(ENGINES)}")
    kinds = args.only.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"--only has {', '.join(unknown)}; known are {', '.join(KINDS)}")
    if "llama.cpp-native" in peers and "mixed" in kinds:
        parser.error("llama.cpp-native serves one request at a time: leave mixed out of --only")
    limit_torch()  # the engines' processes inherit it
    model = (args.model or default_model_path()).resolve()  # engines run in another directory
    with tempfile.TemporaryDirectory() as folder:
        if args.type is not None:
            target = Path(folder) / f"{model.stem}.rewritten-{args.type}.gguf"
            model = rewrite(model, target, GGMLQuantizationType[args.type])
        result = measure(model, ["llmc", *peers], kinds, args.rounds, args.threads)
    print_table(result)
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        write_json(args.output_json, {**facts, "threads": args.threads, **result})


if __name__ == "__main__":
    main()
