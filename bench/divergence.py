"""Measures how far llmc and llama.cpp deviate from one GGUF file's float32 weights on a fixed text.

    pip install --no-deps xllamacpp     # a prebuilt llama.cpp
    python -m bench.divergence [--tokens 384] [--threads 2] [--output-json FILE] [MODEL.gguf]

MODEL defaults to the default model. The text is a chapter about the language from Python's
documentation (`pydoc_data`). The baseline is transformers' model with every weight of the file
dequantized to float32. The output is each engine's perplexity and its mean divergence (KL, in nats
per token) from the baseline. A distribution is the probabilities of the engine's 20 likeliest
tokens at a position, and of all others combined, which is what both HTTP APIs return. llmc runs
with default settings and with the options in LLMC.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from bench.peer_engines import Transformers
from llmc import LLM, SamplingParams
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.report import context, write_json
from llmc.startup.default_model import default_model_path
from llmc.startup.gguf_files import model_directory
from llmc.text.tokenizer import Tokenizer

TOPIC = "objects"
NEAR = 20

LLMC: dict[str, dict[str, Any]] = {
    "llmc": {},
    "llmc, float32 cache": {"kv_cache_dtype": "float32"},
    "llmc, bfloat16 cache": {"kv_cache_dtype": "bfloat16"},
    "llmc, int8 cache": {"kv_cache_dtype": "int8"},
    "llmc, 8 bits": {"activation_bits": 8},
    "llmc, exact": {"activation_bits": 32},
}

Places = list[dict[int, float]]  # log-probabilities at each position, by token id


def by_llmc(path: Path, ids: Sequence[int], **options: Any) -> Places:
    """llmc's log-probabilities of the likeliest tokens and the actual next token."""
    length = 2 * len(ids)
    with LLM(str(path), device="cpu", max_num_seqs=1, max_model_len=length, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NEAR)
        [output] = llm.generate([list(ids)], params, progress=False)
    known = output.prompt_logprobs
    assert known is not None
    return [{i: p.logprob for i, p in (place or {}).items()} for place in known[1:]]


def by_llama_cpp(path: Path, ids: Sequence[int], threads: int, count: int) -> Places:
    """llama.cpp's, of the `count` likeliest tokens (all: to have the actual next one, which takes
    a second each); one request per position, since it has no prompt logprobs."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx = 2 * len(ids)
    params.n_gpu_layers = 0
    params.verbosity = -1
    server: Any = xllamacpp.Server(params)
    places = []
    for end in range(1, len(ids)):
        asked = {
            "prompt": list(ids[:end]),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": count,
        }
        answer = server.handle_completions({**asked, "cache_prompt": True})
        [first] = answer["choices"][0]["logprobs"]["content"]
        places.append({t["id"]: t["logprob"] for t in first["top_logprobs"]})
    return places


def by_float32(path: Path, ids: Sequence[int], threads: int) -> Tensor:
    """Log-probabilities [T - 1, V]."""
    model: Any = Transformers(path, threads).model
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def divergence(want: Tensor, have: Places) -> float:
    """Mean KL [nats] over positions, over the known tokens and all others combined."""
    total = 0.0
    for row, place in zip(want, have, strict=True):
        tokens = sorted(place, key=place.__getitem__)[-NEAR:]
        p = row[tokens].exp()
        q = torch.tensor([place[token] for token in tokens], dtype=torch.float64).exp()
        rest_p, rest_q = ((1 - x.sum()).clamp(min=1e-12)[None] for x in (p, q))
        p, q = torch.cat((p, rest_p)), torch.cat((q, rest_q))
        total += float((p * (p / q).log()).sum())
    return total / len(have)


def measure(path: Path, count: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    ids = Tokenizer.load(model_directory(path)).encode(topics[TOPIC])[:count]
    want = by_float32(path, ids, threads)
    engines = {
        **{name: by_llmc(path, ids, **options) for name, options in LLMC.items()},
        "llama.cpp": by_llama_cpp(path, ids, threads, want.shape[1]),
    }
    own = want.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "file": path.name,
        "text_sha256": hashlib.sha256(topics[TOPIC].encode()).hexdigest(),
        "python": sys.version.split()[0],
        "num_tokens": len(ids),
        "float32": {"perplexity": math.exp(-float(own.mean()))},
        **{
            name: {
                "perplexity": _perplexity(places, ids),
                "mean_kl": divergence(want, places),
            }
            for name, places in engines.items()
        },
    }


def _perplexity(places: Places, ids: Sequence[int]) -> float:
    known = [place[token] for place, token in zip(places, ids[1:], strict=True)]
    return math.exp(-sum(known) / len(known))


def print_table(result: Mapping[str, Any]) -> None:
    print(f"{result['file']}, {result['num_tokens']} tokens")
    for name in ("float32", *LLMC, "llama.cpp"):
        kl, perplexity = result[name].get("mean_kl"), result[name]["perplexity"]
        print(f"{name:20} perplexity {perplexity:.4f}", end="\n" if kl is None else ", ")
        if kl is not None:
            print(f"KL {kl:.2e} nats per token")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    result = measure(args.model or default_model_path(), args.tokens, args.threads)
    print_table(result)
    if args.output_json:
        versions = {**package_versions(), "xllamacpp": version("xllamacpp")}
        facts = {**context(), "versions": versions, "machine": describe_machine()}
        write_json(args.output_json, {**facts, "threads": args.threads, **result})


if __name__ == "__main__":
    main()
