"""RowStates: per-request state of users' logits processors, computed when the request arrives.

AddRequest --begin--> bytes by table --NewRow.row_state--> the row's part of each table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llmc.errors import InvalidRequestError
from llmc.passes.logits_processors import LogitsProcessor, RowTable, table_name, tables_of


class RowStates:
    """Implements the engine's RowStates protocol. `tables` are keyed by step input name."""

    def __init__(self, processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
        self._processors = tuple(processors)
        self._vocab_size = vocab_size
        self.tables: dict[str, RowTable] = {}
        for processor in processors:
            self.tables |= tables_of(processor, vocab_size)

    def begin(
        self, args: Mapping[str, Any], prompt_token_ids: Sequence[int]
    ) -> Mapping[str, bytes]:
        state: dict[str, bytes] = {}
        for processor in self._processors:
            mine = {name: args[name] for name in processor.arguments if name in args}
            if not mine:
                continue
            try:
                values = processor.begin(mine, prompt_token_ids, self._vocab_size)
                for name, value in values.items():
                    state[table_name(processor, name)] = self._bytes(processor, name, value)
            except Exception as error:  # user code: any exception refuses the request
                reason = str(error) or type(error).__name__
                raise InvalidRequestError(
                    f"logits processor {processor.name!r} refused the request: {reason}",
                    param="extra_args",
                ) from error
        return state

    def _bytes(self, processor: LogitsProcessor, name: str, value: Any) -> bytes:
        table = self.tables.get(table_name(processor, name))
        if table is None:
            raise ValueError(f"it has no table {name!r}")
        tensor = torch.as_tensor(value).to("cpu", table.dtype)
        return tensor.broadcast_to(table.shape).contiguous().numpy().tobytes()
