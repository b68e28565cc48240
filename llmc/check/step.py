"""Runs a step function over the steps of `tokens.py` and records every token's logits.

As in the runner, `prepare_step` computes the inputs from rows; its other parts are not used.
Caches are initialized with NaN, so that reading an unwritten entry is detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.check.tokens import Chunk, TokenSequence
from llmc.compiler.lower import StepFunction
from llmc.errors import CompileError
from llmc.kernels.prepare_step import work_lines
from llmc.kernels.prompts import Prompts
from llmc.passes.inputs import (
    AdapterInput,
    CacheInput,
    ConstantInput,
    StateInput,
    StepInput,
    WeightInput,
    input_of,
)
from llmc.runner.rows import RowTables
from llmc.runner.step_buffers import StepBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The cache blocks: the same number per sequence and layer group, in scattered order."""

    block_size: int
    blocks_each: int
    num_sequences: int
    num_groups: int
    long_context_from: int = 0  # longer sequences use different positions; 0: none do

    @staticmethod
    def of(
        sequences: Sequence[TokenSequence],
        block_size: int,
        num_groups: int = 1,
        long_context_from: int = 0,
    ) -> Geometry:
        longest = max(len(s.token_ids) for s in sequences)
        # compiled steps do not support a block table of width 1
        blocks = max(2, -(-longest // block_size))
        return Geometry(
            block_size=block_size,
            blocks_each=blocks,
            num_sequences=len(sequences),
            num_groups=num_groups,
            long_context_from=long_context_from,
        )

    def position_offset(self, sequence: TokenSequence) -> int:
        """The offset added to its positions."""
        return self.long_context_from if len(sequence.token_ids) > self.long_context_from else 0

    @property
    def num_blocks(self) -> int:
        return self.blocks_each * self.num_sequences * self.num_groups

    def block_tables(self) -> Tensor:
        """[sequences, blocks, groups]: a sequence's blocks are far apart and in reverse order."""
        order = torch.arange(self.num_blocks - 1, -1, -1, dtype=torch.int32)
        return order.view(self.blocks_each, self.num_sequences, -1).transpose(0, 1).contiguous()


def bind(
    graph: fx.GraphModule, weights: Mapping[str, Tensor], geometry: Geometry, device: torch.device
) -> dict[str, Tensor]:
    """The tensor of every placeholder that is not a step input."""
    bound = dict(weights)
    for node in graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            shape = (geometry.num_blocks, *node.meta["val"].shape[1:])
            cache = torch.empty(shape, dtype=node.meta["val"].dtype, device=device)
            bound[node.name] = _poisoned(cache)
        elif isinstance(role, StateInput):
            shape = (geometry.num_sequences, *node.meta["val"].shape[1:])
            state = torch.empty(shape, dtype=node.meta["val"].dtype, device=device)
            bound[node.name] = _poisoned(state)
        elif isinstance(role, ConstantInput):
            bound[node.name] = role.tensor.to(device)
        elif isinstance(role, AdapterInput):  # empty slots of LoRA adapters
            value = node.meta["val"]
            bound[node.name] = torch.zeros(value.shape, dtype=value.dtype, device=device)
        elif role is not None and not isinstance(role, StepInput | WeightInput):
            raise CompileError(f"steps with a {type(role).__name__} can't be certified yet")
    return bound


def _poisoned(cache: Tensor) -> Tensor:
    return cache.fill_(float("nan")) if cache.is_floating_point() else cache.zero_()


def run_steps(
    step: StepFunction,
    sequences: Sequence[TokenSequence],
    steps: Sequence[Sequence[Chunk]],
    geometry: Geometry,
    vocab_size: int,
    device: torch.device,
    taps: Sequence[Tensor] = (),
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Run the steps; returns logits [T, V] by sequence, hidden states [T, N] by layer and sequence.

    `taps`: the buffers that the step writes its packed hidden states to, one per layer.
    """
    rows = row_tables(sequences, geometry, vocab_size, device)
    buffers = StepBuffers(
        rows,
        max_tokens=max(sum(chunk.count for chunk in chunks) for chunks in steps),
        max_requests=max(len(chunks) for chunks in steps),
    )
    logits: list[list[Tensor]] = [[] for _ in sequences]
    hidden: list[list[list[Tensor]]] = [[[] for _ in sequences] for _ in taps]
    with torch.inference_mode():
        for chunks in steps:
            given = {**rows.tables, **_packed(buffers, chunks, device)}
            missing = [name for name in step.inputs if name not in given]
            if missing:
                raise CompileError(f"a step that reads {missing[0]!r} can't be certified yet")
            _, out = step.call(**{name: given[name] for name in step.inputs})
            _scatter(out, chunks, logits)
            for layer, tap in enumerate(taps):
                _scatter(tap, chunks, hidden[layer])
    return [torch.cat(parts) for parts in logits], [
        [torch.cat(parts) for parts in layer] for layer in hidden
    ]


def _scatter(packed: Tensor, chunks: Sequence[Chunk], parts: list[list[Tensor]]) -> None:
    start = 0
    for chunk in chunks:
        rows = packed[start : start + chunk.count]
        if chunk.start == 0:  # recomputed after a preemption: the last results count
            parts[chunk.sequence].clear()
        parts[chunk.sequence].append(rows.to("cpu", torch.float32, copy=True))
        start += chunk.count


def _packed(
    buffers: StepBuffers, chunks: Sequence[Chunk], device: torch.device
) -> dict[str, Tensor]:
    """The inputs that change every step; logits are requested for every token."""
    work = work_lines([(c.sequence, c.start, c.count, c.count, 0) for c in chunks], 0, 0)
    tokens = sum(chunk.count for chunk in chunks)
    lengths = [(chunk.count, chunk.start + chunk.count) for chunk in chunks]
    hints = {
        "prompts": Prompts.find(lengths, least=2).words(),
        "long_prompts": Prompts.find(lengths, least=2, started=True).words(),
    }
    return {**buffers.prepare(work.to(device), tokens, tokens), **hints}


def row_tables(
    sequences: Sequence[TokenSequence], geometry: Geometry, vocab_size: int, device: torch.device
) -> RowTables:
    """The runner's own tables: one row per sequence, with its tokens and its blocks.

    Sampling parameters are neutral, because only logits are compared.
    """
    rows = RowTables(
        num_rows=len(sequences),
        max_model_len=max(len(s.token_ids) for s in sequences),
        block_size=geometry.block_size,
        vocab_size=vocab_size,
        device=device,
        num_groups=geometry.num_groups,
    )
    rows.block_table[: len(sequences)] = geometry.block_tables().flatten(1).to(device)
    for row, sequence in enumerate(sequences):
        ids = torch.tensor(sequence.token_ids, dtype=torch.int32)
        rows.tables["history"][row, : len(ids)] = ids.to(device)
        rows.tables["prompt_len"][row] = sequence.prompt_len
        rows.tables["adapter"][row] = sequence.adapter
        rows.tables["position_offset"][row] = geometry.position_offset(sequence)
    return rows
