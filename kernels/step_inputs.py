"""The inputs of a step, each defined once: name, dimensions, dtype and contents.

A step function reads the packed inputs of T tokens, R requests and S samples, which `prepare_step`
fills (STEP_INPUTS, in the order of its arguments), and tables with a row for each running request,
which live as long as the runner (ROW_TABLES). The runner's buffers, the fake values of a captured
graph, the compiler's example shapes and the table in docs/architecture.md are derived from these.
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

    `grouped`: there is one for each group of layers that share a block table
    (passes/group_caches.py). `on_host`: it is in host memory, whatever the step's device.
    `neutral`: the value in a table's row if its request does not use the feature.
    """

    dims: tuple[str, ...]
    dtype: torch.dtype
    about: str
    grouped: bool = False
    on_host: bool = False
    neutral: float = 0

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(sizes[dim] for dim in self.dims)


# What the dimensions count.
SIZES = {
    "T": "tokens of the step",
    "R": "requests of the step",
    "R + 1": "bounds of the requests",
    "S": "samples: tokens whose logits are computed",
    "blocks": "blocks of the longest context",
    "2 + 2 * prompts": "two, and two for each new prompt of the step",
    "2 + 2 * long prompts": "the same, including prompts started in an earlier step",
    "rows": "rows of the tables",
    "context": "tokens of the longest context, plus one",
    "biases": "entries of a request's logit bias",
    "mask words": "32-bit words with one bit per token of the vocabulary",
    "image rows": "rows of the step's images",
    "levels * hidden": "values of the hidden states that are replaced or added to",
    "axes": "positions per token",
    "2": "first and end",
    "bad word tokens": f"{BAD_WORD_TOKENS} entries for each bad word",
}

_INT, _LONG, _FLOAT = torch.int32, torch.int64, torch.float32

STEP_INPUTS: Mapping[str, StepTensor] = {
    "token_ids": StepTensor(dims=("T",), dtype=_LONG, about="the tokens, request after request"),
    "positions": StepTensor(
        dims=("T",), dtype=_LONG, about="their positions in their requests (plus `position_offset`)"
    ),
    "slot_mapping": StepTensor(
        dims=("T",),
        dtype=_LONG,
        about="where keys and values are written: block * block_size + offset; -1: not written",
        grouped=True,
    ),
    "query_start": StepTensor(
        dims=("R + 1",), dtype=_INT, about="where each request's tokens begin, and the end"
    ),
    "context_len": StepTensor(
        dims=("R",), dtype=_INT, about="tokens of each request after the step; 0: padding"
    ),
    "block_table": StepTensor(
        dims=("R", "blocks"), dtype=_INT, about="the blocks of each context", grouped=True
    ),
    "request_row": StepTensor(dims=("R",), dtype=_LONG, about="the row of each request"),
    "logits_index": StepTensor(
        dims=("S",), dtype=_LONG, about="the packed token whose logits each sample uses"
    ),
    "row": StepTensor(dims=("S",), dtype=_LONG, about="the row of each sample's request"),
    "length": StepTensor(
        dims=("S",),
        dtype=_INT,
        about="tokens of its request up to that token; 0: nothing is sampled",
    ),
    "prompts": StepTensor(
        dims=("2 + 2 * prompts",),
        dtype=_INT,
        about="on GPUs, which requests are new prompts (`kernels/prompts.py`)",
        on_host=True,
    ),
    "long_prompts": StepTensor(
        dims=("2 + 2 * long prompts",),
        dtype=_INT,
        about="the same, including prompts started in an earlier step, for latent attention",
        on_host=True,
    ),
}

# Additional inputs of a step that reads images (llmc/runner/images.py). Rows have the dtype of
# hidden states.
IMAGE_INPUTS: Mapping[str, StepTensor] = {
    "image_rows": StepTensor(
        dims=("image rows", "levels * hidden"),
        dtype=_FLOAT,
        about="its images, one row per token: the embedding, then what the first layers add",
    ),
    "image_row": StepTensor(
        dims=("T",), dtype=_LONG, about="the row used as a token's embedding; -1: its own"
    ),
    "seen_span": StepTensor(
        dims=("2", "T"),
        dtype=_LONG,
        about="first and end of the positions that a token sees besides those before it",
    ),
    "axis_positions": StepTensor(
        dims=("axes", "T"),
        dtype=_LONG,
        about="used instead of `positions` if a token has several, such as height and width",
    ),
}

ROW_TABLES: Mapping[str, StepTensor] = {
    "history": StepTensor(
        dims=("rows", "context"), dtype=_INT, about="the tokens of each request, prompt first"
    ),
    "prompt_len": StepTensor(dims=("rows",), dtype=_INT, about="how many of them are the prompt's"),
    "position_offset": StepTensor(
        dims=("rows",),
        dtype=_INT,
        about="added to `positions`, if long sequences use other rotary frequencies",
    ),
    "repetition_penalty": StepTensor(dims=("rows",), dtype=_FLOAT, about="1: off", neutral=1),
    "presence_penalty": StepTensor(dims=("rows",), dtype=_FLOAT, about="0: off"),
    "frequency_penalty": StepTensor(dims=("rows",), dtype=_FLOAT, about="0: off"),
    "bias_token": StepTensor(
        dims=("rows", "biases"), dtype=_INT, about="biased tokens; -1: unused", neutral=-1
    ),
    "bias_value": StepTensor(
        dims=("rows", "biases"), dtype=_FLOAT, about="the value added to their logits"
    ),
    "bias_until": StepTensor(
        dims=("rows", "biases"), dtype=_INT, about="while the output has fewer tokens than this"
    ),
    "has_mask": StepTensor(dims=("rows",), dtype=_INT, about="whether `mask` applies"),
    "mask": StepTensor(
        dims=("rows", "mask words"), dtype=_INT, about="tokens that can be sampled, one bit each"
    ),
    "bad_words": StepTensor(
        dims=("rows", "bad word tokens"),
        dtype=_INT,
        about="banned token sequences, each at the end of its entries; -1: unused",
        neutral=-1,
    ),
    "temperature": StepTensor(dims=("rows",), dtype=_FLOAT, about="below 1e-5: greedy"),
    "top_k": StepTensor(dims=("rows",), dtype=_INT, about="0: off"),
    "top_p": StepTensor(dims=("rows",), dtype=_FLOAT, about="1: off", neutral=1),
    "min_p": StepTensor(dims=("rows",), dtype=_FLOAT, about="0: off"),
    "seed": StepTensor(dims=("rows",), dtype=_LONG, about="the seed of the request's sampling"),
    "adapter": StepTensor(
        dims=("rows",), dtype=_INT, about="the slot of the request's LoRA adapter, from 1; 0: none"
    ),
}

GROUPED = tuple(name for name, spec in STEP_INPUTS.items() if spec.grouped)
PREPARED = tuple(name for name, spec in STEP_INPUTS.items() if not spec.on_host)  # by prepare_step


def of_group(name: str, group: int) -> str:
    """The name of a grouped step input; that of the first group has no number."""
    return f"{name}_{group}" if group else name


def base_name(name: str) -> str:
    """The step input for a name returned by `of_group`."""
    return next((base for base in GROUPED if name.startswith(f"{base}_")), name)


def input_named(name: str) -> StepTensor:
    """The definition of a step input (of any group) or table; KeyError for an unknown name."""
    return {**STEP_INPUTS, **IMAGE_INPUTS, **ROW_TABLES}[base_name(name)]
