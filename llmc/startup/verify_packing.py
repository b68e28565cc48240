"""Once per architecture: packed requests must not see each other, and chunks must not matter.

Packing is correct only if nothing mixes tokens except attention and the ops that keep a state. A
model that sums, convolves or recurs over its tokens in another way would be captured without an
error, but its output would depend on other requests in the batch, or on how a prompt is chunked. So
two requests are run together and alone, one of them in two chunks, and their logits are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.errors import CompileError
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams

# The second is one token, directly after the first in the packed batch.
LENGTHS = (7, 1)
# Relative error of logits: rounding and reordered sums are far below, mixing is far above.
_TOLERANCE = {torch.float32: 0.01}
_TOLERANCE_LOW_PRECISION = 0.1
# The lowest of 200,000 normally distributed logits is up to 54 times as far below the best as the
# eighth best is.
_BEST, _MOST_SPREADS = 8, 100


def verify_packing(
    runner: ModelRunner, dtype: torch.dtype, *, in_pieces: bool = True, rounds: bool = False
) -> None:
    """Raise CompileError if a request's logits depend on other requests, or on its chunks.

    `in_pieces`: prompts are computed in chunks; those of encoders are not. `rounds`: inputs of
    linears are rounded to 8 bits, where reordered sums can round some to the next value.

    `runner` needs two rows, and blocks for both requests; its rows are free again afterwards.
    """
    vocab, size, groups = runner.rows.vocab_size, runner.rows.block_size, runner.rows.num_groups
    prompts = [[(7 * i + 3 * j + 1) % vocab for j in range(n)] for i, n in enumerate(LENGTHS)]
    blocks = [-(-len(p) // size) * groups for p in prompts]
    tables = [list(range(blocks[0])), list(range(blocks[0], sum(blocks)))]
    exact = _TOLERANCE.get(dtype, _TOLERANCE_LOW_PRECISION)
    tolerance = _TOLERANCE_LOW_PRECISION if rounds else exact
    together = _logits(runner, prompts, tables, (0, 1))
    alone = [_logits(runner, prompts, tables, (i,))[0] for i in (0, 1)]
    for i in (0, 1):
        if (error := _error(together[i], alone[i])) > tolerance:
            raise CompileError(
                "the model mixes the tokens of requests that are computed together "
                f"(logits differ by {error:.0%}): something besides its attention "
                "reads other tokens, which is not supported yet"
            )
    if not in_pieces:
        return
    if (error := _error(_in_pieces(runner, prompts[0], tables[0]), alone[0])) > tolerance:
        raise CompileError(
            "the model loses information from earlier steps of the same prompt "
            f"(logits differ by {error:.0%}): something besides its attention carries a state from "
            "token to token, which is not supported yet"
        )


def _error(got: Tensor, want: Tensor) -> float:
    """Error relative to `want`; 0 if broken or zero weights leave nothing to compare."""
    if want.isnan().any() or want.max().isinf():
        return 0.0
    kept = _not_banned(want)
    got, want = got[kept], want[kept]
    scale = want.norm()
    if scale == 0:
        return 0.0 if got.norm() == 0 else float("inf")
    error = float((got - want).norm() / scale)
    return error if error == error else float("inf")


def _not_banned(logits: Tensor) -> Tensor:
    """Which logits [V] the model computed: to ban tokens, some set others to -inf or a number so
    low that their norm would hide any error of the rest."""
    best = logits.topk(min(_BEST, len(logits))).values
    spread = best[0] - best[best.isfinite()][-1:]
    lowest = best[0] - _MOST_SPREADS * spread
    return logits.isfinite() & ((logits >= lowest) | (spread == 0))


def _in_pieces(runner: ModelRunner, prompt: Sequence[int], table: Sequence[int]) -> Tensor:
    """Last-token logits of a prompt computed in two steps."""
    half = len(prompt) // 2
    first = RowWork(row=0, start=0, num_tokens=half, sample=False, new_blocks=table)
    rest = RowWork(row=0, start=half, num_tokens=len(prompt) - half, sample=True)
    runner.logits(StepPlan(step=0, released_rows=(0,), new_rows=[_row(0, prompt)], work=[first]))
    logits = runner.logits(StepPlan(step=0, work=[rest])).float()[0]
    runner.rows.release(0)
    return logits


def _row(row: int, prompt: Sequence[int]) -> NewRow:
    return NewRow(
        row=row,
        request_id=f"verify {row}",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_token_ids=(),
    )


def _logits(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    rows: Sequence[int],
) -> list[Tensor]:
    """Last-token logits of the chosen prompts, computed in one step."""
    plan = StepPlan(
        step=0,
        released_rows=(0, 1),
        new_rows=[_row(r, prompts[r]) for r in rows],
        work=[
            RowWork(row=r, start=0, num_tokens=len(prompts[r]), sample=True, new_blocks=tables[r])
            for r in rows
        ],
    )
    logits = runner.logits(plan).float()
    for row in rows:
        runner.rows.release(row)
    return list(logits)
