"""Times a call on its device: the median of many calls, without launch overhead.

On a GPU the call is captured in a CUDA graph, as a step is, so that the host's launch overhead does
not count. If it can't be captured, its launches are timed, and the result says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Call = Callable[[], Any]
_LEAST_S = 2e-3  # between two events, which have a resolution of half a microsecond
_MAX_IN_A_GRAPH = 20
_REPLAYS = 4  # between two events: the GPU waits for the host's launch of the first one only


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median seconds of one call. `how`: "calls" (CPU), "graph", or "launches" (no graph)."""

    seconds: float
    how: str
    spread: float = 0.0  # of the rounds: (highest - lowest) / median


def time_call(run: Call, device: torch.device, *, budget_s: float = 0.4) -> Timing:
    """Time a call over as many rounds as fit in the budget (3 to 200)."""
    run()
    return _on_gpu(run, budget_s) if device.type == "cuda" else _on_cpu(run, budget_s)


def _on_cpu(run: Call, budget_s: float) -> Timing:
    once = max(_wall(run), 1e-6)
    times = [_wall(run) for _ in range(max(3, min(200, int(budget_s / once))))]
    return _timing(times, "calls")


def _wall(run: Call) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_gpu(run: Call, budget_s: float) -> Timing:
    once = max(between_events(run, 1), 1e-6)
    copies = max(1, min(_MAX_IN_A_GRAPH, int(_LEAST_S / once)))
    replay = _captured(run, copies)
    call, how, per = (run, "launches", 1) if replay is None else (replay, "graph", copies)
    call()
    once = max(between_events(call, 1), 1e-6)
    inner = max(1, min(200, int(_LEAST_S / once)))
    rounds = max(3, min(50, int(budget_s / (inner * once))))
    return _timing([between_events(call, inner) / per for _ in range(rounds)], how)


def time_in_turn(replays: Sequence[Call], device: torch.device, *, budget_s: float) -> list[float]:
    """Median seconds of each of several graphs. They are replayed in turn, over as many rounds as
    fit in the budget for each (3 to 50), so that a changing clock rate changes all of them."""
    is_gpu = device.type == "cuda"
    seconds = partial(between_events, times=_REPLAYS) if is_gpu else _wall
    once = max(seconds(replays[0]), 1e-6) * (_REPLAYS if is_gpu else 1)
    rounds = max(3, min(50, int(budget_s / once)))
    times = [[seconds(replay) for replay in replays] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def _timing(times: list[float], how: str) -> Timing:
    middle = statistics.median(times)
    return Timing(seconds=middle, how=how, spread=(max(times) - min(times)) / middle)


def between_events(run: Call, times: int) -> float:
    """Seconds of one of `times` calls in a row, on the current stream."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / times


def _captured(run: Call, copies: int) -> Call | None:
    """A replay of `copies` calls; None if `run` can't be captured in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream):  # ops keep counters for each stream
            for _ in range(copies):
                run()
    except RuntimeError as error:
        print(f"  (timed by launches, capture failed: {str(error).splitlines()[0][:120]})")
        torch.cuda.set_stream(current)  # a capture that fails at its end leaves its stream current
        torch.cuda.synchronize()
        return None
    return graph.replay
