"""Runs a load against a server: when requests are sent, how many at a time, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from llmc.errors import ConfigError
from llmc.load_test.client import Target, open_client, send
from llmc.load_test.metrics import RequestTrace
from llmc.load_test.workloads import BenchRequest

OnDone = Callable[[RequestTrace], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`request_rate` requests per second on average; inf sends all at once.

    Gaps follow a gamma distribution with shape `burstiness`: 1 is a Poisson process, less is
    burstier, more is steadier.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be above 0 or inf, got {self.request_rate}")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise ConfigError(f"--burstiness must be a number above 0, got {self.burstiness}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")


def departure_times(load: Load, count: int) -> list[float]:
    """When to send each request, in seconds after the start, non-decreasing.

    The gaps are scaled so that the last request is sent at count / rate. A short run then has the
    requested rate, rather than one dominated by a few long gaps.
    """
    if math.isinf(load.request_rate):
        return [0.0] * count
    rng = np.random.default_rng(load.seed)
    scale = 1 / (load.request_rate * load.burstiness)
    times = np.cumsum(rng.gamma(shape=load.burstiness, scale=scale, size=count))
    if times[-1] > 0:
        times *= count / load.request_rate / times[-1]
    return [float(t) for t in times]


async def run_load(
    target: Target,
    load: Load,
    requests: Sequence[BenchRequest],
    *,
    warmups: Sequence[BenchRequest] = (),
    on_done: OnDone | None = None,
) -> tuple[list[RequestTrace], float]:
    """Send the warm-ups one by one, then the load; returns its traces in order, and its seconds."""
    async with open_client(target) as client:
        for request in warmups:
            trace = await send(client, target, request)
            if trace.error is not None:
                raise ConfigError(f"a warm-up request to {target.base_url} failed: {trace.error}")
        return await _send_all(client, target, load, requests, on_done)


async def _send_all(
    client: httpx.AsyncClient,
    target: Target,
    load: Load,
    requests: Sequence[BenchRequest],
    on_done: OnDone | None,
) -> tuple[list[RequestTrace], float]:
    limit = (
        contextlib.nullcontext()
        if load.max_concurrency is None
        else asyncio.Semaphore(load.max_concurrency)
    )

    async def send_one(request: BenchRequest) -> RequestTrace:
        async with limit:
            trace = await send(client, target, request)
        if on_done is not None:
            on_done(trace)
        return trace

    start_s = time.perf_counter()
    tasks = []
    for request, leaves_s in zip(requests, departure_times(load, len(requests)), strict=True):
        delay_s = start_s + leaves_s - time.perf_counter()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(asyncio.create_task(send_one(request)))
    traces = await asyncio.gather(*tasks)
    return list(traces), time.perf_counter() - start_s


async def find_model(target: Target, wait_s: float) -> str:
    """The first model that the server offers; waits up to `wait_s` for the server to come up."""
    deadline = time.perf_counter() + wait_s
    async with open_client(target) as client:
        while True:
            try:
                response = await client.get("/v1/models", timeout=10.0)
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
            else:
                if response.status_code == 200:
                    return _first_model(response)
                reason = f"HTTP {response.status_code}"
                if response.status_code in (401, 403):
                    raise ConfigError(
                        f"{target.base_url} requires an API key; set it with --api-key "
                        "or OPENAI_API_KEY"
                    )
            if time.perf_counter() >= deadline:
                raise ConfigError(
                    f"no server answers at {target.base_url} ({reason}); start one with "
                    "`llmc serve` or name another with --base-url"
                )
            await asyncio.sleep(0.5)


def _first_model(response: httpx.Response) -> str:
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{response.url} lists no model; name one with --model") from error


async def fetch_token_ids(target: Target, text: str) -> list[int] | None:
    """The ids of `text` from the server's tokenizer, or None if it has no /tokenize."""
    async with open_client(target) as client:
        body: dict[str, Any] = {"model": target.model, "prompt": text, "add_special_tokens": False}
        try:
            response = await client.post("/tokenize", json=body, timeout=30.0)
        except httpx.HTTPError:
            return None
    if response.status_code != 200:
        return None
    try:
        tokens = response.json()["tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    return [t for t in tokens if isinstance(t, int)] if isinstance(tokens, list) else None
