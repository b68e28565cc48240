"""One row of tables per running request: its tokens, its blocks, its sampling parameters.

All tables are views of one buffer of 32-bit words on the device, which lives as long as the runner.
The host never writes it directly: `Segments` collects a plan's changes as runs of words, which are
sent in the step's delta. One additional row at the end, always neutral, is used by the dummies that
pad a bucket.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmc.engine.plan import NewRow, RowMask, RowWork
from llmc.kernels.step_inputs import BAD_WORD_TOKENS, ROW_TABLES, StepTensor
from llmc.passes.logits_processors import RowTable
from llmc.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS

MAX_BANNED = 64  # stop tokens that min_tokens can ban
MAX_BIAS = MAX_LOGIT_BIAS + MAX_BANNED
_ALWAYS = 2**31 - 1
_ALIGN = 4  # words: every table is aligned to 16 bytes

Words = npt.NDArray[np.int32]


class Segments:
    """Runs of words and their target offsets in the rows' memory."""

    def __init__(self) -> None:
        self.targets: list[int] = []
        self.runs: list[Sequence[int] | Words] = []
        self.num_words = 0

    def add(self, target: int, words: Sequence[int] | Words) -> None:
        self.targets.append(target)
        self.runs.append(words)
        self.num_words += len(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The location of a table in the memory, in words."""

    first: int
    row_words: int

    def at(self, row: int, column: int = 0) -> int:
        return self.first + row * self.row_words + column


class RowTables:
    """The tables of all rows.

    `tables` are the step inputs of the same names. `block_table` is int32 [rows, max_blocks *
    num_groups]: the first block of each group of layers (`CacheLayout`), then the second of each,
    and so on. `extra` are the tables of users' logits processors.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        extra: Mapping[str, RowTable] = MappingProxyType({}),
        num_groups: int = 1,
    ) -> None:
        self.padding_row = num_rows
        self.num_groups = num_groups
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.device = device
        rows = num_rows + 1
        # compiled steps don't accept a width of 1
        self.max_blocks = max(2, -(-max_model_len // block_size))
        sizes = {
            "rows": rows,
            "context": max_model_len + 1,  # the token drawn after a full context is written too
            "biases": MAX_BIAS,
            "mask words": (vocab_size + 31) // 32,
            "bad word tokens": MAX_BAD_WORDS * BAD_WORD_TOKENS,
        }
        own = ROW_TABLES.items()
        columns = {name: table.shape(sizes)[1] for name, table in own if len(table.dims) > 1}
        columns |= {name: table.columns for name, table in extra.items() if table.shape}
        tables: dict[str, StepTensor | RowTable] = {**ROW_TABLES, **extra}
        dtypes = {name: table.dtype for name, table in tables.items()}
        neutral = {name: table.neutral for name, table in tables.items()}
        dtypes["block_table"] = torch.int32
        columns["block_table"] = self.max_blocks * num_groups
        self._places: dict[str, _Place] = {}
        size = 0
        for name, dtype in dtypes.items():
            row_words = columns.get(name, 1) * dtype.itemsize // 4
            self._places[name] = _Place(first=size, row_words=row_words)
            size += -(-rows * row_words // _ALIGN) * _ALIGN
        if size >= 2**31:
            raise ValueError(
                f"{num_rows} rows of {max_model_len} tokens need {size} words, over the limit"
            )
        self.memory = torch.zeros(size, dtype=torch.int32, device=device)
        self.tables: dict[str, Tensor] = {}
        for name, dtype in dtypes.items():
            table = self._view(name, rows, dtype)
            self.tables[name] = table if name in columns else table[:, 0]
            self.tables[name].fill_(neutral.get(name, 0))
        self.block_table = self.tables.pop("block_table")
        self.num_blocks = [0] * rows  # of all groups together
        self.logprobs: list[int | None] = [None] * rows
        self.prompt_logprobs: list[int | None] = [None] * rows
        self._has_bias = [False] * rows
        self._has_bad_words = [False] * rows
        self._neutral_state = {name: self._row_words(name, rows - 1) for name in extra}
        self._state_of: list[Collection[str]] = [()] * rows

    def _row_words(self, name: str, row: int) -> Words:
        place = self._places[name]
        words: Words = self.memory[place.at(row) : place.at(row) + place.row_words].cpu().numpy()
        return words.copy()

    def _view(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        place = self._places[name]
        words = self.memory[place.first : place.first + rows * place.row_words]
        return words.view(dtype).view(rows, -1)

    def _check_row(self, row: int, num_tokens: int) -> None:
        """Check bounds on the host: kernels don't, and would write outside the tables."""
        if not 0 <= row < self.padding_row or num_tokens > self.max_model_len:
            raise ValueError(
                f"row {row} with {num_tokens} tokens is outside the {self.padding_row} rows of "
                f"{self.max_model_len} tokens"
            )

    def release(self, row: int) -> None:
        """Release a row. Its tables keep their contents, as only rows in a step are read."""
        self.num_blocks[row] = 0
        self.logprobs[row] = None

    def fill(self, new: NewRow, out: Segments, *, is_masked: bool = False) -> None:
        """Write a request's tokens and sampling parameters into its row.

        `is_masked`: the same plan has a mask for the row, which replaces allowed_token_ids.
        """
        row, params = new.row, new.sampling
        self._check_row(row, len(new.token_ids))
        allowed = None if is_masked else params.allowed_token_ids
        self.num_blocks[row] = 0
        self.logprobs[row] = new.num_candidates or params.logprobs
        self.prompt_logprobs[row] = params.prompt_logprobs
        out.add(self._places["history"].at(row), np.fromiter(new.token_ids, np.int32))
        looks_back = params.repeat_last_n != 0
        scalars = {
            "prompt_len": new.num_prompt_tokens,
            "position_offset": new.position_offset,
            "repetition_penalty": params.repetition_penalty if looks_back else 1.0,
            "presence_penalty": params.presence_penalty if looks_back else 0.0,
            "frequency_penalty": params.frequency_penalty if looks_back else 0.0,
            "repeat_last_n": max(params.repeat_last_n, 0),
            "temperature": params.temperature,
            "top_k": max(params.top_k, 0),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": new.seed,
            "adapter": new.adapter_slot,
        }
        if not is_masked:
            scalars["has_mask"] = int(allowed is not None)
        for name, value in scalars.items():
            out.add(self._places[name].at(row), _words(value, self.tables[name].dtype))
        self._fill_bias(new, out)
        self._fill_bad_words(new, out)
        self._fill_state(new, out)
        if allowed is not None:
            words = self._mask_words(allowed)
            out.add(self._places["mask"].at(row), words)

    def _fill_bias(self, new: NewRow, out: Segments) -> None:
        """Write logit_bias, which always applies, and stop tokens, banned until min_tokens."""
        bias = [(t, float(b), _ALWAYS) for t, b in (new.sampling.logit_bias or {}).items()]
        if new.sampling.min_tokens > 0:
            banned = list(new.stop_token_ids)[:MAX_BANNED]
            bias += [(t, float("-inf"), new.sampling.min_tokens) for t in banned]
        row = new.row
        if not bias and not self._has_bias[row]:
            return
        self._has_bias[row] = bool(bias)
        tokens = np.full(MAX_BIAS, -1, np.int32)
        values = np.zeros(MAX_BIAS, np.float32)
        until = np.zeros(MAX_BIAS, np.int32)
        if bias:
            n = len(bias)
            tokens[:n], values[:n], until[:n] = zip(*bias, strict=True)
        out.add(self._places["bias_token"].at(row), tokens)
        out.add(self._places["bias_value"].at(row), values.view(np.int32))
        out.add(self._places["bias_until"].at(row), until)

    def _fill_bad_words(self, new: NewRow, out: Segments) -> None:
        words = new.sampling.bad_words_token_ids or ()
        if not words and not self._has_bad_words[new.row]:
            return
        self._has_bad_words[new.row] = bool(words)
        table = np.full((MAX_BAD_WORDS, BAD_WORD_TOKENS), -1, np.int32)
        for i, word in enumerate(words):
            table[i, BAD_WORD_TOKENS - len(word) :] = word
        out.add(self._places["bad_words"].at(new.row), table.ravel())

    def _fill_state(self, new: NewRow, out: Segments) -> None:
        """Write the state of users' processors; reset what an earlier request left to neutral."""
        for name in {*new.row_state, *self._state_of[new.row]}:
            given = new.row_state.get(name)
            words = self._neutral_state[name] if given is None else np.frombuffer(given, np.int32)
            out.add(self._places[name].at(new.row), words)
        self._state_of[new.row] = tuple(new.row_state)

    def _mask_words(self, allowed: Sequence[int]) -> Words:
        bits = np.zeros(self.tables["mask"].shape[1] * 32, dtype=np.uint8)
        bits[np.asarray(allowed, dtype=np.int64)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def set_mask(self, mask: RowMask, out: Segments) -> None:
        """Replace or remove the row's mask of tokens that can be drawn."""
        out.add(self._places["has_mask"].at(mask.row), (int(mask.words is not None),))
        if mask.words is not None:
            words = np.frombuffer(mask.words, "<i4")
            width = self.tables["mask"].shape[1]
            if len(words) != width:
                raise ValueError(f"a mask has {len(words)} words, but the vocabulary needs {width}")
            out.add(self._places["mask"].at(mask.row), words)

    def enter_tokens(self, work: RowWork, out: Segments) -> None:
        """Write the tokens that come with the work into the row's history."""
        tokens = work.draft_token_ids or work.entered_token_ids
        if tokens:
            first = work.start + work.num_tokens - len(tokens)
            out.add(self._places["history"].at(work.row, first), tokens)

    def append_blocks(self, work: RowWork, out: Segments) -> None:
        """Append the row's new blocks to its block table, or to the part of it that is kept."""
        self._check_row(work.row, work.start + work.num_tokens)
        if work.new_blocks:
            count = self.num_blocks[work.row]
            if work.kept_blocks is not None:
                count = min(count, work.kept_blocks)
            most = self.max_blocks * self.num_groups
            if count + len(work.new_blocks) > most:
                raise ValueError(
                    f"row {work.row} has {count} blocks and gets {len(work.new_blocks)} more, but "
                    f"the maximum is {most}"
                )
            out.add(self._places["block_table"].at(work.row, count), work.new_blocks)
            self.num_blocks[work.row] = count + len(work.new_blocks)


_FORMATS = {torch.int32: "<i", torch.float32: "<f", torch.int64: "<q"}


def _words(value: float, dtype: torch.dtype) -> tuple[int, ...]:
    """The words that represent a number in a table of `dtype`."""
    data = struct.pack(_FORMATS[dtype], value)
    return struct.unpack(f"<{len(data) // 4}i", data)
