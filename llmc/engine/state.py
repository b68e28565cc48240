"""The engine's current state as plain data, for monitoring (GetState).

Computed only on request. Lists are truncated to bound cost and size: MAX_REQUESTS requests with
MAX_BLOCKS blocks each, and MAX_CELLS cells of the pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

from llmc.engine.kv.prefix_cache import live
from llmc.engine.messages import EngineState, EngineStats, RequestView
from llmc.engine.options import EngineLimits
from llmc.engine.request import Request
from llmc.engine.scheduler import Scheduler

MAX_REQUESTS = 64
MAX_BLOCKS = 256  # the first ones, because requests share prefixes
MAX_CELLS = 1024


def collect_state(scheduler: Scheduler, limits: EngineLimits, stats: EngineStats) -> EngineState:
    """Collect the state between two steps. `collect_s` is the CPU time that this took."""
    started = time.thread_time()  # CPU time, which excludes that of other processes
    now = time.monotonic()
    running = islice(scheduler.running, MAX_REQUESTS)
    waiting = islice(scheduler.waiting, max(0, MAX_REQUESTS - len(scheduler.running)))
    requests = [_view(request, now) for queue in (running, waiting) for request in queue]
    blocks = scheduler.pool.draw(MAX_CELLS)
    return EngineState(
        time_s=now,
        collect_s=time.thread_time() - started,
        stats=stats,
        num_rows=limits.max_num_seqs,
        step_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        blocks=blocks,
        requests=requests,
        finished=list(scheduler.last_finished),
    )


def _view(request: Request, now: float) -> RequestView:
    return RequestView(
        number=request.rank[1],
        state=request.state.value,
        row=request.row,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_computed_tokens=request.num_computed,
        num_output_tokens=request.num_output_tokens,
        age_s=now - request.arrived_s,
        first_token_s=request.first_token_s,
        block_runs=runs(live(request.table.blocks[:MAX_BLOCKS])),
    )


def runs(blocks: Sequence[int]) -> list[int]:
    """Run-length encode blocks as flat pairs (first, count): [4, 5, 9] -> [4, 2, 9, 1]."""
    pairs: list[int] = []
    for block in blocks:
        if pairs and block == pairs[-2] + pairs[-1]:
            pairs[-1] += 1
        else:
            pairs += (block, 1)
    return pairs
