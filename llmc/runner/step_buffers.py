"""The packed inputs of a step, at addresses that never change.

`prepare_step` fills them from the rows; the step reads views of their first tokens, requests and
samples. A CUDA graph is captured over such views, so each is made once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from llmc.kernels.prepare_step import prepare_step
from llmc.runner.rows import RowTables

StepInputs = dict[str, Tensor]  # by contract name, in the order of prepare_step's outputs


class StepBuffers:
    """Room for `max_tokens` tokens, each of which may draw one, of `max_requests` requests."""

    def __init__(self, rows: RowTables, *, max_tokens: int, max_requests: int) -> None:
        self._rows = rows
        self.max_tokens = max_tokens

        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        long = torch.int64
        self._per_token = {
            "token_ids": words(max_tokens, dtype=long),
            "positions": words(max_tokens, dtype=long),
            "slot_mapping": words(max_tokens, dtype=long),
        }
        self._query_start = words(max_requests + 1)
        self._per_request = {
            "context_len": words(max_requests),
            "block_table": words(max_requests, rows.max_blocks),
            "request_row": words(max_requests, dtype=long),
        }
        self._per_sample = {
            "logits_index": words(max_tokens, dtype=long),
            "row": words(max_tokens, dtype=long),
            "length": words(max_tokens),
        }
        self.view = lru_cache(maxsize=1024)(self._view)

    def _view(self, tokens: int, requests: int, samples: int) -> StepInputs:
        if tokens > self.max_tokens:
            raise ValueError(
                f"a step of {tokens} tokens; the runner has room for {self.max_tokens}"
            )
        return {
            **{name: t[:tokens] for name, t in self._per_token.items()},
            "query_start": self._query_start[: requests + 1],
            **{name: t[:requests] for name, t in self._per_request.items()},
            **{name: t[:samples] for name, t in self._per_sample.items()},
        }

    def prepare(self, work: Tensor, tokens: int, samples: int) -> StepInputs:
        """`work` [R, 7] int32 on the device -> the step's inputs, filled."""
        inputs: StepInputs = self.view(tokens, work.shape[0], samples)
        rows = self._rows
        prepare_step.run(
            work, rows.tables["history"], rows.block_table, rows.block_size, *inputs.values()
        )
        return inputs
