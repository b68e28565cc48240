"""Compares the speed of an encoder's embeddings with transformers: `python -m bench.embeddings`.

A random model of BERT-base's sizes (or --type's), texts of 8 to 256 tokens. transformers gets them
sorted by length in padded batches of 32 with SDPA, its fastest mode; both compute in float32 with
the same number of threads. Rounds alternate; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from llmc import LLM

_BATCH = 32


def ours(llm: LLM, texts: list[list[int]]) -> torch.Tensor:
    outputs = llm.encode(texts, use_tqdm=False)
    return torch.tensor([o.outputs.data for o in outputs if o.outputs is not None])


def theirs(model: Any, texts: list[list[int]], pad: int) -> torch.Tensor:
    found: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), _BATCH):
        chosen = order[start : start + _BATCH]
        width = max(len(texts[i]) for i in chosen)
        ids = torch.tensor([texts[i] + [pad] * (width - len(texts[i])) for i in chosen])
        mask = torch.tensor([[j < len(texts[i]) for j in range(width)] for i in chosen]).long()
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        for i, mean in zip(chosen, means, strict=True):
            found[i] = mean
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", default="bert")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config: Any = AutoConfig.for_model(args.type)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    lengths = torch.randint(8, 257, (args.texts,)).tolist()
    texts = [torch.randint(1000, 20000, (n,)).tolist() for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(folder, dtype="float32") as llm:
            sides = {
                "llmc": lambda: ours(llm, texts),
                "transformers": lambda: theirs(model, texts, config.pad_token_id or 0),
            }
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            vectors = {name: run() for name, run in sides.items()}  # warm up
            for _ in range(args.rounds):
                for name, run in sides.items():
                    start = time.perf_counter()
                    run()
                    seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    error = (vectors["llmc"] - vectors["transformers"]).norm() / vectors["transformers"].norm()
    found = {
        "type": args.type,
        "texts": args.texts,
        "tokens": sum(lengths),
        "threads": torch.get_num_threads(),
        "tokens_per_second": {name: round(sum(lengths) / s) for name, s in medians.items()},
        "ratio": round(medians["transformers"] / medians["llmc"], 2),
        "relative_error": float(f"{error:.1e}"),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
