"""One row of tables per running request: its tokens, its blocks, its sampling parameters.

The tables live on the device for the life of the runner. A plan brings deltas; everything a step
needs is read off the rows, so what the host sends does not grow with the context. One extra row
at the end, always neutral, stands for the padding of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llmc.engine.plan import NewRow, RowWork
from llmc.passes.append_sampler import PER_ROW, TABLES
from llmc.sampling_params import MAX_LOGIT_BIAS

MAX_BANNED = 64  # stop tokens that min_tokens can hold back
_ALWAYS = 2**31 - 1


class RowTables:
    """`tables` holds the step inputs of the same names; `block_table` [rows, max_blocks] int32."""

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.padding_row = num_rows
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        columns = {
            "history": max_model_len + 1,  # the last draw of a full context is written too
            "bias_token": MAX_LOGIT_BIAS + MAX_BANNED,
            "bias_value": MAX_LOGIT_BIAS + MAX_BANNED,
            "bias_until": MAX_LOGIT_BIAS + MAX_BANNED,
            "mask": (vocab_size + 31) // 32,
        }
        rows = num_rows + 1
        self.tables: dict[str, Tensor] = {}
        for name, (wide, dtype) in TABLES.items():
            shape = (rows, columns[name]) if wide else (rows,)
            self.tables[name] = torch.zeros(shape, dtype=dtype, device=device)
        for name, dtype in PER_ROW.items():
            self.tables[name] = torch.zeros(rows, dtype=dtype, device=device)
        max_blocks = max(2, -(-max_model_len // block_size))  # compiled steps take no width of 1
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.num_blocks = [0] * rows
        self.logprobs: list[int | None] = [None] * rows
        for row in range(rows):
            self._neutral(row)

    def _neutral(self, row: int) -> None:
        tables = self.tables
        for name in ("repetition_penalty", "top_p"):
            tables[name][row] = 1.0
        for name in ("presence_penalty", "frequency_penalty", "temperature", "min_p"):
            tables[name][row] = 0.0
        tables["top_k"][row] = 0
        tables["bias_token"][row] = -1
        tables["has_mask"][row] = False

    def release(self, row: int) -> None:
        self._neutral(row)
        self.num_blocks[row] = 0
        self.logprobs[row] = None

    def fill(self, new: NewRow) -> None:
        """Enter a request: its tokens and its sampling parameters."""
        row, params, tables = new.row, new.sampling, self.tables
        tables["history"][row, : len(new.token_ids)] = torch.tensor(
            new.token_ids, dtype=torch.int32
        )
        tables["prompt_len"][row] = new.num_prompt_tokens
        tables["temperature"][row] = params.temperature
        tables["top_k"][row] = max(params.top_k, 0)
        tables["top_p"][row] = params.top_p
        tables["min_p"][row] = params.min_p
        tables["seed"][row] = new.seed
        tables["repetition_penalty"][row] = params.repetition_penalty
        tables["presence_penalty"][row] = params.presence_penalty
        tables["frequency_penalty"][row] = params.frequency_penalty
        self._fill_bias(new)
        self._fill_mask(row, params.allowed_token_ids)
        self.num_blocks[row] = 0
        self.logprobs[row] = params.logprobs

    def _fill_bias(self, new: NewRow) -> None:
        """logit_bias for as long as it runs; stop tokens banned until min_tokens are out."""
        bias = [(t, float(b), _ALWAYS) for t, b in (new.sampling.logit_bias or {}).items()]
        if new.sampling.min_tokens > 0:
            banned = list(new.stop_token_ids)[:MAX_BANNED]
            bias += [(t, float("-inf"), new.sampling.min_tokens) for t in banned]
        row, tables = new.row, self.tables
        tables["bias_token"][row] = -1
        if bias:
            tokens, values, until = zip(*bias, strict=True)
            n = len(bias)
            tables["bias_token"][row, :n] = torch.tensor(tokens, dtype=torch.int32)
            tables["bias_value"][row, :n] = torch.tensor(values, dtype=torch.float32)
            tables["bias_until"][row, :n] = torch.tensor(until, dtype=torch.int32)

    def _fill_mask(self, row: int, allowed: Sequence[int] | None) -> None:
        self.tables["has_mask"][row] = allowed is not None
        if allowed is not None:
            bits = np.zeros(self.tables["mask"].shape[1] * 32, dtype=np.uint8)
            bits[np.asarray(allowed, dtype=np.int64)] = 1
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self.tables["mask"][row] = torch.from_numpy(words.copy()).to(self.device)

    def append_blocks(self, work: Sequence[RowWork]) -> None:
        """Add each row's new blocks to its block table, all in one write."""
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for item in work:
            if item.new_blocks:
                count = self.num_blocks[item.row]
                rows += [item.row] * len(item.new_blocks)
                columns += range(count, count + len(item.new_blocks))
                blocks += item.new_blocks
                self.num_blocks[item.row] = count + len(item.new_blocks)
        if rows:
            index = torch.tensor([rows, columns, blocks], device=self.device)
            self.block_table[index[0], index[1]] = index[2].int()
