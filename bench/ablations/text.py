"""Rows of text and sampling: incremental detokenization, sampling a batch in one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.ablations.row import Figures, Row, in_turn
from bench.ablations.subject import Bench
from llmc.config import EngineConfig
from llmc.kernels.cpu.build import load
from llmc.kernels.process_logits import process_logits
from llmc.kernels.sample import sample
from llmc.startup.model_files import resolve_model
from llmc.text.detokenizer import Detokenizer
from llmc.text.tokenizer import Tokenizer

BIASES = 8
Call = Callable[..., Tensor]


def _detokenize(bench: Bench) -> Figures:
    tokenizer = Tokenizer.load(resolve_model(EngineConfig()).path)
    sentence = tokenizer.encode("The scheduler lets requests in and blocks out, one at a time. ")
    count = bench.size(4000, 200)
    ids = (sentence * count)[:count]

    def incremental() -> float:
        start = time.perf_counter()
        detokenizer = Detokenizer(tokenizer, ())
        text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
        seconds = time.perf_counter() - start
        assert text == tokenizer.decode(ids)
        return seconds / count * 1e6

    def naive() -> float:
        """Decode everything again for each token, and cut off what was already shown."""
        start = time.perf_counter()
        shown = ""
        for end in range(1, count + 1):
            text = tokenizer.decode(ids[:end])
            if not text.endswith("\ufffd"):
                shown += text[len(shown) :]
        seconds = time.perf_counter() - start
        assert shown == tokenizer.decode(ids)
        return seconds / count * 1e6

    return in_turn(incremental, naive, bench.rounds, note=f"{count} tokens of one answer")


def _sampling(bench: Bench) -> Figures:
    load()  # the C++ ops, which an engine would have loaded
    rows, vocab = bench.size(32, 4), bench.size(151_936, 300)
    tables = _tables(rows, vocab, 512)
    logits = torch.randn(rows, vocab) * 3
    pick, length = torch.arange(rows), torch.full((rows,), 400, dtype=torch.int32)

    def draw(first: int, last: int, process: Call, pick_token: Call) -> Tensor:
        own = slice(first, last)
        processed = process(logits[own], pick[own], length[own], *tables["process"])
        columns = (column[own] for column in tables["draw"])
        token: Tensor = pick_token(processed, *columns, length[own].long())
        return token

    def batched() -> float:
        start = time.perf_counter()
        draw(0, rows, process_logits.run, sample.run)
        return (time.perf_counter() - start) * 1e3

    def one_by_one(process: Call, pick_token: Call) -> float:
        start = time.perf_counter()
        for row in range(rows):
            draw(row, row + 1, process, pick_token)
        return (time.perf_counter() - start) * 1e3

    def the_same_op() -> float:
        return one_by_one(process_logits.run, sample.run)

    def plain_torch() -> float:
        return one_by_one(process_logits.reference, sample.reference)

    together = draw(0, rows, process_logits.run, sample.run)
    alone = [draw(row, row + 1, process_logits.run, sample.run) for row in range(rows)]
    assert together.equal(torch.cat(alone)), "a draw depends on its batch"
    same_op = in_turn(batched, the_same_op, bench.rounds).medians[1]
    note = (
        f"{rows} rows, vocabulary of {vocab}, every parameter mixed; the op that is used in the "
        f"step, called once a row: {same_op:.3g} ms, with the same draws"
    )
    return in_turn(batched, plain_torch, bench.rounds, note=note)


def _tables(rows: int, vocab: int, length: int) -> dict[str, Any]:
    """Greedy, seeded, filtered, penalized and biased rows, mixed."""
    pick = torch.arange(rows)
    return {
        "process": (
            torch.randint(0, vocab, (rows, length), dtype=torch.int32),
            torch.full((rows,), 100, dtype=torch.int32),
            torch.tensor([1.0, 1.2])[pick % 2],
            torch.tensor([0.0, 0.4, 0.0])[pick % 3],
            torch.tensor([0.0, 0.0, 0.2])[pick % 3],
            torch.tensor([0, 64], dtype=torch.int32)[pick % 2],
            torch.randint(0, vocab, (rows, BIASES), dtype=torch.int32),
            torch.randn(rows, BIASES),
            torch.full((rows, BIASES), 2**31 - 1, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
            torch.zeros(rows, (vocab + 31) // 32, dtype=torch.int32),
        ),
        "draw": (
            torch.tensor([0.0, 0.7, 1.0, 1.3])[pick % 4],
            torch.tensor([0, 40, 0], dtype=torch.int32)[pick % 3],
            torch.tensor([1.0, 0.9])[pick % 2],
            torch.tensor([0.0, 0.0, 0.05])[pick % 3],
            torch.arange(rows) * 7919,
        ),
    }


ROWS = (
    Row(
        name="detokenize",
        what="incremental detokenization",
        on="a short window decoded for each token",
        off="the whole answer decoded for each token",
        unit="us a token",
        model="default model's tokenizer",
        measure=_detokenize,
    ),
    Row(
        name="sampling",
        what="vectorized sampling",
        on="all rows in one op",
        off="plain torch, request by request",
        unit="ms a step",
        model="none",
        measure=_sampling,
    ),
)
