"""The inputs of a step, each defined once: name, dimensions, dtype, description.

A step function reads two kinds of input:

- STEP_INPUTS: the packed inputs of T tokens, R requests and S samples, in the order of the
  arguments of `prepare_step`, which fills them.
- ROW_TABLES: tables with one row per running request, which live as long as the runner.

The runner's buffers, the fake values of a captured graph, the compiler's example shapes and the
tables in docs/architecture.md are all derived from these definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

BAD_WORD_TOKENS = 16  # entries per word in the table `bad_words`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensor:
    """One input. `dims` names its sizes (SIZES).

    `grouped`: one per group of layers that share a block table (passes/group_caches.py).
    `on_host`: in host memory, whatever the step's device.
    `neutral`: the value in a table row whose request does not use the feature.
    """

    dims: tuple[str, ...]
    dtype: torch.dtype
    description: str
    grouped: bool = False
    on_host: bool = False
    neutral: float = 0

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(sizes[dim] for dim in self.dims)


# What each dimension counts.
SIZES = {
    "T": "tokens of the step",
    "R": "requests of the step",
    "R + 1": "bounds of the requests",
    "S": "samples: tokens whose logits are computed",
    "blocks": "blocks of the longest context",
    "2 + 2 * prompts": "two, plus two for each fresh prompt of the step",
    "2 + 2 * long prompts": "the same, also counting later chunks of long prompts",
    "rows": "rows of the tables",
    "context": "tokens of the longest context, plus one",
    "biases": "entries of a request's logit bias",
    "mask words": "32-bit words, one bit per token of the vocabulary",
    "image rows": "rows of the step's images",
    "levels * hidden": "hidden size x levels: the embedding, and each layer that images add to",
    "axes": "position components of a token",
    "2": "start and end",
    "bad word tokens": f"{BAD_WORD_TOKENS} entries for each bad word",
}

_INT, _LONG, _FLOAT = torch.int32, torch.int64, torch.float32

STEP_INPUTS: Mapping[str, StepTensor] = {
    "token_ids": StepTensor(
        dims=("T",), dtype=_LONG, description="token ids, packed request by request"
    ),
    "positions": StepTensor(
        dims=("T",),
        dtype=_LONG,
        description="index of each token in its request, plus `position_offset`",
    ),
    "slot_mapping": StepTensor(
        dims=("T",),
        dtype=_LONG,
        description="cache slot of each token: block * block_size + offset; -1: not stored",
        grouped=True,
    ),
    "query_start": StepTensor(
        dims=("R + 1",), dtype=_INT, description="offset of each request's first token, then T"
    ),
    "context_len": StepTensor(
        dims=("R",),
        dtype=_INT,
        description="context length of each request after the step; 0: padding",
    ),
    "block_table": StepTensor(
        dims=("R", "blocks"),
        dtype=_INT,
        description="KV cache blocks of each request",
        grouped=True,
    ),
    "request_row": StepTensor(dims=("R",), dtype=_LONG, description="table row of each request"),
    "logits_index": StepTensor(
        dims=("S",),
        dtype=_LONG,
        description="index of the packed token whose logits each sample uses",
    ),
    "row": StepTensor(dims=("S",), dtype=_LONG, description="table row of each sample's request"),
    "length": StepTensor(
        dims=("S",),
        dtype=_INT,
        description="tokens of the request up to and including that token; 0: do not sample",
    ),
    "prompts": StepTensor(
        dims=("2 + 2 * prompts",),
        dtype=_INT,
        description="on GPUs: which requests are fresh prompts (`kernels/prompts.py`)",
        on_host=True,
    ),
    "long_prompts": StepTensor(
        dims=("2 + 2 * long prompts",),
        dtype=_INT,
        description="the same for latent attention, including later chunks of long prompts",
        on_host=True,
    ),
}

# Additional inputs of a step that reads images (llmc/runner/images.py). `image_rows` has the dtype
# of the hidden states.
IMAGE_INPUTS: Mapping[str, StepTensor] = {
    "image_rows": StepTensor(
        dims=("image rows", "levels * hidden"),
        dtype=_FLOAT,
        description="encoded images, one row per token: its embedding, then what the layers add",
    ),
    "image_row": StepTensor(
        dims=("T",),
        dtype=_LONG,
        description="the image row that replaces a token's embedding; -1: none",
    ),
    "attended_span": StepTensor(
        dims=("2", "T"),
        dtype=_LONG,
        description="start and end of the extra range of its request that a token attends to",
    ),
    "axis_positions": StepTensor(
        dims=("axes", "T"),
        dtype=_LONG,
        description="replaces `positions` where a token has several, such as height and width",
    ),
}

ROW_TABLES: Mapping[str, StepTensor] = {
    "history": StepTensor(
        dims=("rows", "context"),
        dtype=_INT,
        description="tokens of each request: prompt, then output",
    ),
    "prompt_len": StepTensor(dims=("rows",), dtype=_INT, description="number of prompt tokens"),
    "position_offset": StepTensor(
        dims=("rows",),
        dtype=_INT,
        description="added to `positions` for long sequences that use other rotary frequencies",
    ),
    "repetition_penalty": StepTensor(dims=("rows",), dtype=_FLOAT, description="1: off", neutral=1),
    "presence_penalty": StepTensor(dims=("rows",), dtype=_FLOAT, description="0: off"),
    "frequency_penalty": StepTensor(dims=("rows",), dtype=_FLOAT, description="0: off"),
    "repeat_last_n": StepTensor(
        dims=("rows",), dtype=_INT, description="latest tokens that penalties look at; 0: all"
    ),
    "bias_token": StepTensor(
        dims=("rows", "biases"),
        dtype=_INT,
        description="token ids with a logit bias; -1: unused",
        neutral=-1,
    ),
    "bias_value": StepTensor(
        dims=("rows", "biases"), dtype=_FLOAT, description="bias added to their logits"
    ),
    "bias_until": StepTensor(
        dims=("rows", "biases"),
        dtype=_INT,
        description="the bias applies while the output has fewer tokens than this",
    ),
    "has_mask": StepTensor(dims=("rows",), dtype=_INT, description="nonzero: apply `mask`"),
    "mask": StepTensor(
        dims=("rows", "mask words"),
        dtype=_INT,
        description="bit mask of the tokens that may be sampled",
    ),
    "bad_words": StepTensor(
        dims=("rows", "bad word tokens"),
        dtype=_INT,
        description="banned token sequences, right-aligned; -1: unused",
        neutral=-1,
    ),
    "temperature": StepTensor(dims=("rows",), dtype=_FLOAT, description="below 1e-5: greedy"),
    "top_k": StepTensor(dims=("rows",), dtype=_INT, description="0: off"),
    "top_p": StepTensor(dims=("rows",), dtype=_FLOAT, description="1: off", neutral=1),
    "min_p": StepTensor(dims=("rows",), dtype=_FLOAT, description="0: off"),
    "seed": StepTensor(
        dims=("rows",), dtype=_LONG, description="seed of the request's random numbers"
    ),
    "adapter": StepTensor(
        dims=("rows",), dtype=_INT, description="LoRA adapter slot, from 1; 0: none"
    ),
}

GROUPED = tuple(name for name, spec in STEP_INPUTS.items() if spec.grouped)
PREPARED = tuple(name for name, spec in STEP_INPUTS.items() if not spec.on_host)  # by prepare_step


def of_group(name: str, group: int) -> str:
    """The name of a grouped step input. The first group's name has no number."""
    return f"{name}_{group}" if group else name


def base_name(name: str) -> str:
    """The step input behind a name made by `of_group`."""
    return next((base for base in GROUPED if name.startswith(f"{base}_")), name)


def input_named(name: str) -> StepTensor:
    """The definition of a step input or table, of any group. KeyError for an unknown name."""
    return {**STEP_INPUTS, **IMAGE_INPUTS, **ROW_TABLES}[base_name(name)]
