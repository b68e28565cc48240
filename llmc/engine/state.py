"""What the engine does at this moment, as plain data: for people who watch it (GetState).

Nothing here runs unless somebody asks. Lists are cut, so that the cost and the size are bounded:
MAX_REQUESTS requests with MAX_BLOCKS blocks of each, MAX_CELLS cells of the pool.
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
MAX_BLOCKS = 256  # the first ones: prefixes are what requests share
MAX_CELLS = 1024


def collect_state(scheduler: Scheduler, limits: EngineLimits, stats: EngineStats) -> EngineState:
    """The state between two steps. `collect_s` says what this has cost."""
    started = time.thread_time()  # not the time that other processes take from this one
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
    """Flat pairs: a block, and how many in a row begin with it. [4, 5, 9] -> [4, 2, 9, 1]."""
    pairs: list[int] = []
    for block in blocks:
        if pairs and block == pairs[-2] + pairs[-1]:
            pairs[-1] += 1
        else:
            pairs += (block, 1)
    return pairs
