"""Log-probabilities of drawn tokens and of prompt tokens. They are computed on the device and
downloaded with the step's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llmc.engine.plan import StepResult, TokenLogprobs
from llmc.kernels.token_logprobs import token_logprobs
from llmc.runner.delta import Delta


def chosen_tokens(
    tokens: Tensor, inputs: dict[str, Tensor], tables: Mapping[str, Tensor]
) -> Tensor:
    """[S] int64: the drawn token of each sample or, where it is only scored, the next token."""
    row, length, index = inputs["row"], inputs["length"], inputs["logits_index"]
    # A sample's place in its request, counted from the request's end. `positions` differ from it in
    # long sequences and behind images.
    start = inputs["query_start"].long()
    request = torch.searchsorted(start[1:-1].contiguous(), index, right=True)  # padding: the last
    after = inputs["context_len"][request] - start[request + 1] + index + 1
    history = tables["history"]
    # only drawn samples need the bounds: dummies, and the end of a full context
    follows = history[row, after.clamp(0, history.shape[1] - 1)].long()
    return torch.where(length == 0, follows, tokens)


def gather_logprobs(logits: Tensor, tokens: Tensor, picks: Tensor, most: int) -> list[Tensor]:
    """Gather log-probabilities from unprocessed logits [S, V] at samples `picks` [P].

    -> the chosen tokens [P] int64, then the results of `token_logprobs` for them and the `most`
    most likely tokens; all on the same device.
    """
    chosen = tokens.index_select(0, picks)
    found: tuple[Tensor, ...] = token_logprobs.run(logits.index_select(0, picks), chosen, most)
    return [chosen, *found]


def read_result(delta: Delta, tokens: Sequence[int], gathered: Sequence[Tensor]) -> StepResult:
    """The step's result from the tokens of all samples and the outputs of `gather_logprobs`."""
    drawn = [i for i in range(len(tokens)) if i not in delta.scored]
    ids = [tokens[i] if tokens[i] >= 0 else None for i in drawn]
    if not gathered:
        return StepResult(token_ids=ids)
    found = dict(zip(delta.picked, _read(delta.wanted, gathered), strict=True))
    return StepResult(
        token_ids=ids,
        logprobs=[found[i] if found.get(i) and tokens[i] >= 0 else None for i in drawn],
        scores=[found[i] for i in sorted(delta.scored)],
    )


def read_vectors(delta: Delta, tokens: Sequence[int], vectors: Tensor) -> StepResult:
    """The result of a pooling step with vectors [S, N] float32. A token below 0 marks a vector that
    is not finite."""
    found = [vector.tobytes() for vector in vectors.numpy()]
    drawn = [i for i in range(len(tokens)) if i not in delta.scored]
    return StepResult(
        token_ids=[tokens[i] if tokens[i] >= 0 else None for i in drawn],
        scores=[found[i] if tokens[i] >= 0 else None for i in sorted(delta.scored)],
        vectors=[found[i] for i in drawn],
    )


def _read(wanted: Sequence[int], gathered: Sequence[Tensor]) -> list[TokenLogprobs]:
    chosen, values, ranks, top_ids, top_values = (tensor.tolist() for tensor in gathered)
    found = []
    for i, count in enumerate(wanted):
        ids = [token for token in top_ids[i][:count] if token >= 0]  # the vocabulary may be smaller
        found.append(
            TokenLogprobs(
                token_id=chosen[i],
                logprob=values[i],
                rank=ranks[i],
                top_token_ids=ids,
                top_logprobs=top_values[i][: len(ids)],
            )
        )
    return found
