"""Once per architecture: packed requests must not see each other.

Packing is right only if nothing but attention mixes tokens. A model that sums, convolves or recurs
over its tokens would be captured without a complaint and answer from its neighbours' text, so two
requests are run together and alone, and their logits compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.errors import CompileError
from llmc.runner.model_runner import ModelRunner
from llmc.sampling_params import SamplingParams

# The second is one token, right behind the text of the first.
LENGTHS = (7, 1)
# Relative error of logits: rounding and another order of sums stay far below, a mix far above.
_TOLERANCE = {torch.float32: 0.01}
_TOLERANCE_LOW_PRECISION = 0.1


def verify_packing(runner: ModelRunner, dtype: torch.dtype) -> None:
    """CompileError when a request's logits depend on the request beside it.

    `runner` needs two rows and blocks for both requests; its rows are free again afterwards.
    """
    vocab, size = runner.rows.vocab_size, runner.rows.block_size
    prompts = [[(7 * i + 3 * j + 1) % vocab for j in range(n)] for i, n in enumerate(LENGTHS)]
    blocks = [-(-len(p) // size) for p in prompts]
    tables = [list(range(blocks[0])), list(range(blocks[0], sum(blocks)))]
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_LOW_PRECISION)
    together = _logits(runner, prompts, tables, (0, 1))
    for i in (0, 1):
        alone = _logits(runner, prompts, tables, (i,))[0]
        scale = alone.norm()
        error = (together[i] - alone).norm()
        if not torch.isfinite(scale) or scale == 0:
            continue  # broken or zero weights tell nothing; the sampler reports them
        if not error <= tolerance * scale:
            raise CompileError(
                "the model mixes the tokens of requests that are computed together "
                f"(logits differ by {float(error / scale):.0%}): something besides its attention "
                "looks at other tokens, which can't be served yet"
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
        new_rows=[
            NewRow(
                row=r,
                request_id=f"verify {r}",
                token_ids=prompts[r],
                num_prompt_tokens=len(prompts[r]),
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                stop_token_ids=(),
            )
            for r in rows
        ],
        work=[
            RowWork(row=r, start=0, num_tokens=len(prompts[r]), sample=True, new_blocks=tables[r])
            for r in rows
        ],
    )
    logits = runner.logits(plan).float()
    for row in rows:
        runner.rows.release(row)
    return list(logits)
