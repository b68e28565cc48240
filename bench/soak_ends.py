"""The two interfaces that a soak test uses: AsyncLLM in this process, and HTTP to a server.

Both start a tiny model (soak_model.py) with a pool so small that requests preempt each other.
`settle` waits until all requests are done and reports what is then in use, which must not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import psutil

from bench.serve_processes import serving
from bench.soak_cases import BAD_FIELDS, CONTEXT, Case
from bench.soak_model import BYTES_PER_TOKEN, model_folder
from llmc.async_llm import AsyncLLM
from llmc.config import EngineConfig
from llmc.errors import InvalidRequestError
from llmc.frontend.engine_options import load_tokenizer
from llmc.sampling_params import SamplingParams
from llmc.startup.start import Started, start_engine

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "opt_level": 0,
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,  # long prompts come in chunks
    "max_num_queued": 1000,
    "kv_cache_memory": 26 * 16 * BYTES_PER_TOKEN,  # 26 blocks; 8 long requests need 90
    "swap_space": 16 * 16 * BYTES_PER_TOKEN,
    "scheduling_policy": "priority",
    "speculative_config": {"method": "ngram"},
}
SETTLE_S = 60.0
ENDED = ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion of an answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


Answer = tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The resources used by the processes of an idle engine. Memory in bytes."""

    fds: int
    threads: int
    tasks: int
    rss: int
    counts: dict[str, float]  # of the engine, since its start


class SoakError(AssertionError):
    """Something happened that must never happen."""


class End(Protocol):
    async def ask(self, case: Case) -> Answer: ...
    async def misbehave(self, rng: random.Random) -> None: ...
    async def settle(self) -> Holdings: ...


def ended(choices: Sequence[Choice], case: Case) -> Answer:
    """The answer, checked to be complete and to have a valid finish reason."""
    reasons = [choice.finish_reason for choice in choices]
    if len(choices) != case.fields["n"] or not set(reasons) <= set(ENDED):
        raise SoakError(f"{case} ended with {reasons}")
    return tuple(choices)


def holdings(processes: Sequence[psutil.Process], tasks: int, counts: dict[str, float]) -> Holdings:
    gc.collect()
    fds = threads = rss = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived child has ended
            fds += process.num_fds()
            threads += process.num_threads()
            rss += process.memory_info().rss
    return Holdings(fds=fds, threads=threads, tasks=tasks, rss=rss, counts=counts)


class InProcess:
    """AsyncLLM on an engine thread, with steps planned ahead."""

    def __init__(self, started: Started, llm: AsyncLLM) -> None:
        self._started = started
        self._llm = llm

    async def ask(self, case: Case) -> Answer:
        source = await self._llm.prepare.prompt(
            {"prompt_token_ids": list(case.prompt), "cache_salt": case.salt}, case.params()
        )
        async with self._llm.submit(source, priority=case.priority) as stream:
            while await stream.deltas():
                pass
            output = stream.requests[0].output()
        if output.error is not None:
            raise SoakError(f"{case} failed: {output.error}")
        choices = [
            Choice(
                token_ids=tuple(one.token_ids), text=one.text, finish_reason=str(one.finish_reason)
            )
            for one in output.outputs
        ]
        return ended(choices, case)

    async def misbehave(self, rng: random.Random) -> None:
        fields = dict(rng.choice(BAD_FIELDS))
        ids = fields.pop("prompt", [5, 6])
        salt = {"cache_salt": fields.pop("cache_salt")} if "cache_salt" in fields else {}
        try:
            params = SamplingParams(**{"max_tokens": 5, **fields})
            source = await self._llm.prepare.prompt({"prompt_token_ids": ids, **salt}, params)
        except InvalidRequestError:
            return
        raise SoakError(f"{fields} was accepted: {source}")

    async def settle(self) -> Holdings:
        engine, deadline = self._started.engine, time.monotonic() + SETTLE_S
        while engine.has_work or self._llm.num_active:
            if time.monotonic() > deadline:
                raise SoakError(f"requests remain: {engine.stats()}")
            await asyncio.sleep(0.01)
        engine.check()
        stats = engine.stats()
        if stats.num_free_blocks != stats.num_blocks or stats.num_running or stats.num_waiting:
            raise SoakError(f"an idle engine still uses resources: {stats}")
        compiles = self._started.runner.num_runtime_compiles
        if compiles:
            raise SoakError(f"{compiles} compilations happened while requests waited")
        counts = {
            "requests": stats.num_finished,
            "steps": stats.num_steps,
            "preemptions": stats.num_preemptions,
            "swaps": stats.num_swaps,
            "cached tokens": stats.prefix_cache_hits,
            "draft tokens accepted": stats.num_accepted_tokens,
            "failed steps": stats.num_failed_steps,
        }
        if stats.num_failed_steps:
            raise SoakError(f"{stats.num_failed_steps} steps failed")
        return holdings([psutil.Process()], len(asyncio.all_tasks()), counts)


@contextlib.asynccontextmanager
async def in_process(options: dict[str, Any]) -> AsyncIterator[InProcess]:
    config = EngineConfig(
        **{**ENGINE, "model": str(model_folder()), "async_scheduling": True, **options}
    )
    started = start_engine(config)
    if started.upgrade is not None:
        await asyncio.to_thread(started.upgrade.wait)
    llm = AsyncLLM.from_started(started, config, load_tokenizer(config, started.info))
    try:
        yield InProcess(started, llm)
    finally:
        await llm.shutdown()


_BROKEN = (b"", b"{", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "x", "temperature": NaN}')


class OverHttp:
    """`llmc serve` as users start it, in separate processes."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self._client = client
        self._rng = random.Random(0)

    async def ask(self, case: Case) -> Answer:
        body = case.body()
        may_stream = "prompt_logprobs" not in body  # they can't be streamed
        if may_stream and self._rng.random() < 0.5:
            return ended(await self._stream(body), case)
        response = await self._client.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise SoakError(f"{response.status_code} for {case}: {response.text}")
        return ended([_choice(one) for one in response.json()["choices"]], case)

    async def _stream(self, body: dict[str, Any]) -> list[Choice]:
        texts = [""] * body["n"]
        tokens: list[list[int]] = [[] for _ in texts]
        reasons = [""] * body["n"]
        async with self._client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as response:
            if response.status_code != 200:
                raise SoakError(f"{response.status_code}: {await response.aread()!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise SoakError(f"a stream failed: {event}")
                for choice in event["choices"]:
                    index = choice["index"]
                    texts[index] += choice["text"]
                    tokens[index] += choice.get("token_ids") or []
                    reasons[index] = choice["finish_reason"] or reasons[index]
        return [
            Choice(token_ids=tuple(ids), text=text, finish_reason=reason)
            for ids, text, reason in zip(tokens, texts, reasons, strict=True)
        ]

    async def misbehave(self, rng: random.Random) -> None:
        body = json.dumps({"prompt": [5, 6], "max_tokens": 5, **rng.choice(BAD_FIELDS)}).encode()
        if rng.random() < 0.3:
            body = rng.choice(_BROKEN)
        headers = {"content-type": "application/json"}
        response = await self._client.post("/v1/completions", content=body, headers=headers)
        if response.status_code != 400 or "error" not in response.json():
            raise SoakError(f"{response.status_code} for {body!r}: {response.text}")

    async def settle(self) -> Holdings:
        deadline = time.monotonic() + SETTLE_S
        while (busy := await self._metrics()) and any(busy[name] for name in _GAUGES):
            if time.monotonic() > deadline:
                raise SoakError(f"requests remain: {busy}")
            await asyncio.sleep(0.05)
        if busy["process_restarts_total"] or not busy["engine_up"]:
            raise SoakError(f"the engine did not survive: {busy}")
        failed = {name: busy[name] for name in _FAULTS if busy[name]}
        if failed:
            raise SoakError(f"steps failed, or waited for a compiler: {failed}")
        names = ("engine_steps_total", "num_preemptions_total", "prefix_cache_hits_total")
        counts = {name.removesuffix("_total"): busy[name] for name in names}
        return holdings(psutil.Process().children(recursive=True), 0, counts)

    async def _metrics(self) -> dict[str, float]:
        """The values of /metrics summed over processes, on a connection that is then closed."""
        async with httpx.AsyncClient(base_url=self._url) as client:
            text = (await client.get("/metrics", headers={"connection": "close"})).text
        found: dict[str, float] = {}
        for name, value in re.findall(r"^llmc:(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found


_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_FAULTS = ("failed_engine_steps_total", "runtime_compiles_total")


def _choice(one: dict[str, Any]) -> Choice:
    return Choice(
        token_ids=tuple(one["token_ids"]), text=one["text"], finish_reason=one["finish_reason"]
    )


@contextlib.asynccontextmanager
async def over_http(options: dict[str, Any]) -> AsyncIterator[OverHttp]:
    words = [str(model_folder()), "--no-access-log"]
    for name, value in {**ENGINE, **options}.items():
        flag = "max-queue" if name == "max_num_queued" else name.replace("_", "-")
        words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    # keep no connections, so that an idle server's resources are its own
    limits = httpx.Limits(max_keepalive_connections=0)
    with serving(words) as url:
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
            yield OverHttp(url, client)
