"""The packed inputs of a step, at addresses that never change.

`prepare_step` fills them from the rows; the step reads views of their first tokens, requests and
samples. A CUDA graph is captured over such views, so each is made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from llmc.kernels.prepare_step import PACKED, prepare_step
from llmc.passes.inputs import GROUPED, of_group
from llmc.runner.rows import RowTables

StepInputs = dict[str, Tensor]  # by contract name

_PREPARED = tuple("block_table" if name == "packed_table" else name for name in PACKED)


class StepBuffers:
    """Room for `max_tokens` tokens, each of which may draw one, of `max_requests` requests."""

    def __init__(self, rows: RowTables, *, max_tokens: int, max_requests: int) -> None:
        self._rows = rows
        self.max_tokens = max_tokens
        self.max_requests = max_requests

        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        long = torch.int64
        self._per_token = {
            "token_ids": words(max_tokens, dtype=long),
            "positions": words(max_tokens, dtype=long),
        }
        self._slot_mapping = words(rows.num_groups, max_tokens, dtype=long)
        self._query_start = words(max_requests + 1)
        self._per_request = {
            "context_len": words(max_requests),
            "request_row": words(max_requests, dtype=long),
        }
        self._block_table = words(rows.num_groups, max_requests, rows.max_blocks)
        self._per_sample = {
            "logits_index": words(max_tokens, dtype=long),
            "row": words(max_tokens, dtype=long),
            "length": words(max_tokens),
        }
        self.view = lru_cache(maxsize=1024)(self._view)

    def _view(self, tokens: int, requests: int, samples: int) -> _View:
        if tokens > self.max_tokens:
            raise ValueError(
                f"a step of {tokens} tokens; the runner has room for {self.max_tokens}"
            )
        whole = {
            **{name: t[:tokens] for name, t in self._per_token.items()},
            "slot_mapping": self._slot_mapping[:, :tokens],
            "query_start": self._query_start[: requests + 1],
            "block_table": self._block_table[:, :requests],
            **{name: t[:requests] for name, t in self._per_request.items()},
            **{name: t[:samples] for name, t in self._per_sample.items()},
        }
        inputs = dict(whole)
        for name in GROUPED:
            inputs |= {of_group(name, g): one for g, one in enumerate(whole[name])}
        return _View(inputs=inputs, prepared=tuple(whole[name] for name in _PREPARED))

    def inputs(self, tokens: int, requests: int, samples: int) -> StepInputs:
        """The inputs of a step of these sizes, as they were last filled."""
        view: _View = self.view(tokens, requests, samples)
        return view.inputs

    def prepare(self, work: Tensor, tokens: int, samples: int) -> StepInputs:
        """`work` [R, 8] int32 on the device -> the step's inputs, filled."""
        view: _View = self.view(tokens, work.shape[0], samples)
        rows = self._rows
        prepare_step.run(
            work, rows.tables["history"], rows.block_table, rows.block_size, *view.prepared
        )
        return view.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The inputs of a step of one size, and the outputs of `prepare_step` behind them."""

    inputs: StepInputs
    prepared: tuple[Tensor, ...]
