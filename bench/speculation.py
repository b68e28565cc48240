"""Compares speculative and plain decoding: on the same runner, alternating, medians of the ratios.

    python -m bench.speculation [--model default|dummy|both] [--method ngram|draft_model|both]
                                [--rounds 5] [--rows 1,4] [--threads N] [--draft-layers 4]
                                [--config bench/configs/qwen3-0.6b.json] [--output-json FILE]

`copy`: the prompt is a cycle of tokens, and the answer continues it. This does not depend on the
model: banned pairs leave only one path through eight tokens, which the prompt repeats several
times. `random`: a random prompt, answered at temperature 1, which can't be predicted. Both get the
same requests with the same seeds, and their tokens are compared. With bfloat16 a step of several
tokens may round differently from one of a single token, so random answers can differ; these are
counted.

A draft model has the config's shape with fewer layers and other random weights, or is the default
model in int8. The banned pairs apply to it too, so `copy` is drafted correctly.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.load_test.machine import describe_machine, package_versions
from llmc.load_test.report import context, write_json
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import METHODS
from llmc.startup.default_model import default_model
from llmc.startup.start import Started, start_engine

NUM_OUTPUT = 128
NUM_PROMPT = 64
CYCLE = range(100, 108)
MAX_LEN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    seconds: float
    tokens: list[list[int]]


def main() -> None:
    args = _arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows = [int(word) for word in args.rows.split(",")]
    methods = METHODS if args.method == "both" else (args.method,)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.model in ("default", "both"):
            draft = {"model": default_model().name, "quantization": "int8"}
            results["default"] = measure_all("default", {}, methods, draft, rows, args.rounds)
        if args.model in ("dummy", "both"):
            target, small = (Path(folder) / name for name in ("target", "draft"))
            _save_config(args.config, target)
            _save_config(args.config, small, num_hidden_layers=args.draft_layers)
            options = {"model": str(target), "load_format": "dummy"}
            name, draft = args.config.stem, {"model": str(small)}
            results[name] = measure_all(name, options, methods, draft, rows, args.rounds)
    if args.output_json:
        facts = {**context(), "versions": package_versions(), "machine": describe_machine()}
        facts["threads"] = torch.get_num_threads()
        write_json(args.output_json, {**facts, "rounds": args.rounds, "results": results})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("default", "dummy", "both"), default="both")
    parser.add_argument("--method", choices=(*METHODS, "both"), default="both")
    parser.add_argument("--draft-layers", type=int, default=4)
    parser.add_argument("--config", type=Path, default=Path("bench/configs/qwen3-0.6b.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def _limits() -> dict[str, Any]:
    return {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    }


def _save_config(config: Path, folder: Path, **changes: int) -> None:
    """Write a directory with only the config; layer kinds need not be listed."""
    fields = json.loads(config.read_text())
    if changes:
        fields.pop("layer_types", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))


def measure_all(
    name: str,
    options: Mapping[str, Any],
    methods: Sequence[str],
    draft: Mapping[str, str],
    rows: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    results = {}
    for method in methods:
        drafting = {"method": method, **(draft if method == "draft_model" else {})}
        config = EngineConfig(**_limits(), **options, speculative_config=drafting)
        results[method] = measure(f"{name}, {method}", config, rows, rounds)
    return results


def measure(name: str, config: EngineConfig, rows: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure every load at every number of rows; prints a line for each."""
    started = start_engine(config)
    if started.upgrade is not None:
        started.upgrade.wait(None)
    plain, speculating = _plain_engine(started), started.engine
    results: dict[str, Any] = {}
    for count in rows:
        for load in ("copy", "random"):
            found = _compare(plain, speculating, load, count, rounds, started.info.vocab_size)
            results[f"{load}, {count} rows"] = found
            print(
                f"{name:22} {load:6} {count:3} rows   plain {found['plain_s']:.3f} s, "
                f"speculating {found['speculating_s']:.3f} s, {found['ratio']:.2f} times as fast; "
                f"{found['num_accepted']} of {found['num_drafted']} draft tokens accepted, "
                f"{found['num_differing']} of {count * rounds} answers differ"
            )
    return results


def _plain_engine(started: Started) -> EngineCore:
    """An engine on the other one's runner, never used at the same time. Neither caches prefixes,
    which the other would overwrite."""
    info = started.info
    return EngineCore(
        started.runner,
        EngineLimits(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        ),
        EngineFeatures(enable_prefix_caching=False),
    )


def _compare(
    plain: EngineCore, speculating: EngineCore, load: str, count: int, rounds: int, vocab: int
) -> dict[str, Any]:
    for engine in (plain, speculating):  # not counted
        _run(engine, _requests(load, count, -1, vocab))
    before = speculating.stats()
    pairs = []
    for number in range(rounds):
        requests = _requests(load, count, number, vocab)
        order = (plain, speculating) if number % 2 == 0 else (speculating, plain)
        answers = [_run(engine, requests) for engine in order]
        pairs.append(answers if number % 2 == 0 else answers[::-1])
    after = speculating.stats()
    ratios = [one.seconds / other.seconds for one, other in pairs]
    return {
        "plain_s": statistics.median(one.seconds for one, _ in pairs),
        "speculating_s": statistics.median(other.seconds for _, other in pairs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "num_drafts": after.num_drafts - before.num_drafts,
        "num_drafted": after.num_draft_tokens - before.num_draft_tokens,
        "num_accepted": after.num_accepted_tokens - before.num_accepted_tokens,
        "num_differing": sum(
            a != b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=True)
        ),
    }


def _requests(load: str, count: int, number: int, vocab: int) -> list[AddRequest]:
    rng = random.Random(number)
    made = []
    for index in range(count):
        if load == "copy":
            prompt = [CYCLE[i % len(CYCLE)] for i in range(index, index + NUM_PROMPT)]
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=NUM_OUTPUT,
                ignore_eos=True,
                allowed_token_ids=list(CYCLE),
                bad_words_token_ids=_other_ways(),
            )
        else:
            prompt = [rng.randrange(vocab) for _ in range(NUM_PROMPT)]
            sampling = SamplingParams(
                temperature=1.0, max_tokens=NUM_OUTPUT, ignore_eos=True, seed=rng.randrange(10**6)
            )
        made.append(AddRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    return made


def _other_ways() -> list[list[int]]:
    """The pairs of tokens that are not consecutive in the cycle."""
    size = len(CYCLE)
    return [[CYCLE[i], CYCLE[j]] for i in range(size) for j in range(size) if (j - i) % size != 1]


def _run(engine: EngineCore, requests: Sequence[AddRequest]) -> Answer:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            assert update.error is None, update.error
            tokens[update.request_id] += update.new_token_ids
    return Answer(seconds=time.perf_counter() - began, tokens=list(tokens.values()))


if __name__ == "__main__":
    main()
