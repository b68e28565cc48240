"""The requests of a benchmark: random prompts by distribution, or the lines of a dataset file.

The same arguments and seed give the same workload on every machine. Independent of engine and HTTP.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.errors import ConfigError

CountTokens = Callable[[str], int]
_SHORTEST_TEXT, _LONGEST_TEXT = 80, 2000  # characters of a prompt from the documentation
MIN_SHAREGPT_LEN = 4  # shorter turns measure only overhead; other benchmarks skip them too


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request: text or token ids, and how many tokens to generate."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_len: int | None = None  # None: not known until the server reports it
    output_len: int


def random_lengths(
    mean: int, range_ratio: float, count: int, rng: np.random.Generator
) -> list[int]:
    """`count` integers, uniform over [mean * (1 - ratio), mean * (1 + ratio)], at least 1."""
    low = max(1, math.floor(mean * (1 - range_ratio)))
    high = math.ceil(mean * (1 + range_ratio))
    return [int(n) for n in rng.integers(low, high + 1, size=count)]


def random_workload(
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    token_ids: Sequence[int],
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[BenchRequest]:
    """Prompts of random tokens drawn from `token_ids`; the first `prefix_len` are common to all.

    `input_len` comes on top of the prefix.
    """
    rng = np.random.default_rng(seed)
    inputs = random_lengths(input_len, range_ratio, num_prompts, rng)
    outputs = random_lengths(output_len, range_ratio, num_prompts, rng)
    allowed = np.asarray(token_ids)
    prefix = rng.choice(allowed, size=prefix_len).tolist()
    requests = []
    for num_in, num_out in zip(inputs, outputs, strict=True):
        ids = tuple(int(t) for t in (*prefix, *rng.choice(allowed, size=num_in).tolist()))
        requests.append(BenchRequest(token_ids=ids, prompt_len=len(ids), output_len=num_out))
    return requests


def text_workload(
    *, num_prompts: int, output_len: int, range_ratio: float = 0.0, seed: int = 0
) -> list[BenchRequest]:
    """Paragraphs of Python's own documentation, at their natural lengths.

    None is repeated before all have been used. Repeated paragraphs start with the number of the
    round, so that no prompt is another's prefix.
    """
    rng = np.random.default_rng(seed)
    known = _paragraphs()
    outputs = random_lengths(output_len, range_ratio, num_prompts, rng)
    requests = []
    for i, num_out in enumerate(outputs):
        turn, at = divmod(i, len(known))
        if at == 0:
            order = rng.permutation(len(known))
        text = known[order[at]]
        requests.append(
            BenchRequest(text=f"{turn + 1}. {text}" if turn else text, output_len=num_out)
        )
    return requests


@functools.cache
def _paragraphs() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    found = (p for name in sorted(topics) for p in str(topics[name]).split("\n\n"))
    texts = dict.fromkeys(" ".join(p.split()) for p in found)
    return tuple(t for t in texts if _SHORTEST_TEXT <= len(t) <= _LONGEST_TEXT)


def load_dataset(
    path: Path,
    *,
    num_prompts: int | None = None,
    count_tokens: CountTokens | None = None,
    output_len: int | None = None,
    seed: int = 0,
) -> list[BenchRequest]:
    """Requests from a file: ShareGPT JSON, or JSONL with `prompt` and `output_len`.

    ShareGPT conversations are shuffled by `seed` and cut to their first question and answer;
    JSONL keeps its order. `output_len` overrides the lengths in the file. Lengths are counted
    with `count_tokens`; without it, prompt lengths are unknown and answers are assumed to have
    one token per four characters.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the dataset {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the dataset {path} is not UTF-8 text: {error.reason}") from error
    records = list(_records(path, content))
    if any("conversations" in record for record in records):
        np.random.default_rng(seed).shuffle(records)
        found = (_from_sharegpt(r, count_tokens, output_len) for r in records)
        requests = [request for request in found if request is not None]
    else:
        requests = [
            _from_record(path, number, record, count_tokens, output_len)
            for number, record in enumerate(records, 1)
        ]
    if not requests:
        raise ConfigError(f"the dataset {path} has no usable prompt")
    return requests[:num_prompts]


def _records(path: Path, content: str) -> Iterator[dict[str, Any]]:
    if content.lstrip().startswith("["):
        try:
            values = json.loads(content)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the dataset {path} is not valid JSON: {error}") from error
        numbered: Iterator[tuple[int, Any]] = iter(enumerate(values, 1))
    else:
        numbered = _lines(path, content)
    for number, value in numbered:
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, record {number}: expected an object, got {value!r:.60}")
        yield value


def _lines(path: Path, content: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not valid JSON: {error}") from error


def _from_record(
    path: Path,
    number: int,
    record: dict[str, Any],
    count_tokens: CountTokens | None,
    output_len: int | None,
) -> BenchRequest:
    ids, text = record.get("prompt_token_ids"), record.get("prompt")
    if isinstance(text, list):
        ids, text = text, None
    wanted = output_len or record.get("output_len") or record.get("output_tokens")
    if not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(
            f"{path}, record {number}: needs an `output_len` of at least 1 "
            "(or set one for all with --output-len)"
        )
    if ids:
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ConfigError(f"{path}, record {number}: token ids must be integers of at least 0")
        return BenchRequest(token_ids=tuple(ids), prompt_len=len(ids), output_len=wanted)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{path}, record {number}: needs a `prompt` or `prompt_token_ids`")
    length = count_tokens(text) if count_tokens else None
    return BenchRequest(text=text, prompt_len=length, output_len=wanted)


def _from_sharegpt(
    record: dict[str, Any], count_tokens: CountTokens | None, output_len: int | None
) -> BenchRequest | None:
    turns = [turn.get("value") for turn in record.get("conversations", ())]
    if len(turns) < 2 or not turns[0] or not turns[1]:
        return None
    prompt_len = count_tokens(turns[0]) if count_tokens else None
    answer_len = count_tokens(turns[1]) if count_tokens else len(turns[1]) // 4
    wanted = output_len or answer_len
    if wanted < MIN_SHAREGPT_LEN or (prompt_len is not None and prompt_len < MIN_SHAREGPT_LEN):
        return None
    return BenchRequest(text=turns[0], prompt_len=prompt_len, output_len=wanted)
