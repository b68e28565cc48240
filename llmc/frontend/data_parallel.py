"""Several engines of one model behind one link: routes each request to one of them (routing.py).

    AsyncLLM --AddRequest--> DataParallelLink --chosen--> link of engine-0 --> ...
                                         ---------> link of engine-1 --> ...
             <-- their events, with the engines' numbers summed up --

If an engine dies, only its own requests are lost (RequestsLost). The link itself counts as lost
when no engine is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmc.config import EngineConfig
from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineOutputs,
    EngineState,
    EngineStats,
    GetState,
    Operate,
    OperationResult,
)
from llmc.frontend.engine_link import (
    EngineEvent,
    EngineLink,
    EngineLost,
    EngineStarted,
    Message,
    Processes,
    Publish,
    RequestsLost,
)
from llmc.frontend.routing import EngineLoad, choose, prompt_digests
from llmc.model_info import ModelInfo

log = logging.getLogger(__name__)

SUM_S = 0.05  # age after which the summed statistics are recomputed
GAUGES = ("num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_deferred")


@dataclass(slots=True, kw_only=True)
class _Order:
    """An Operate that was forwarded, and the answers so far."""

    waiting: set[str]
    answers: dict[str, OperationResult] = field(default_factory=dict)


class DataParallelLink:
    """An EngineLink to several engines. `links` are by engine name; `config` is that of each."""

    def __init__(self, links: Mapping[str, EngineLink], config: EngineConfig) -> None:
        self._links = links
        self._config = config
        self._loads: dict[str, EngineLoad] = {}  # of engines that have been up
        self._over: set[str] = set()  # engines that will not be restarted
        self._owners: dict[str, str] = {}  # request -> engine
        self._asked: str | None = None  # the engine that was asked for its state
        self._orders: dict[int, _Order] = {}
        self._past: EngineStats | None = None  # counts of engines that were replaced
        self._reported: set[str] = set()  # quiet engines that were reported
        self._sum = sum_stats(())
        self._summed_at = 0.0

    def open(self, publish: Publish) -> None:
        self._publish = publish
        for name, link in self._links.items():
            link.open(partial(self._on_event, name))

    def dump_stacks(self) -> None:
        for link in self._links.values():
            link.dump_stacks()

    @property
    def has_idle_engine(self) -> bool:
        return any(not self._loads[name].requests for name in self._up())

    def processes(self) -> Processes:
        found = [link.processes() for link in self._links.values()]
        up = self._up()
        return Processes(
            pids={name: pid for one in found for name, pid in one.pids.items()},
            restarts={name: count for one in found for name, count in one.restarts.items()},
            engines={name: self._loads[name].stats if name in up else None for name in self._links},
        )

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))

    # ---- to the engines ----

    def send(self, message: Message) -> None:
        up = self._up()
        if not up:
            return  # the requests are lost already
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequest():
                name = self._forget(message.request_id)
                if name is not None:
                    self._links[name].send(message)
            case GetState():
                self._asked = up[0]
                self._links[up[0]].send(message)
            case Operate():
                self._orders[message.number] = _Order(waiting=set(up))
                for name in up:
                    if message.operation in ("reset_prefix_cache", "release_caches"):
                        self._loads[name].sent.clear()
                    self._links[name].send(message)

    def _add(self, message: AddRequest) -> None:
        name = self._owners.get(message.fork_of or "")  # the engine with the blocks to share
        digests: list[int] = []
        if name is None:
            digests = prompt_digests(message, self._config.block_size)
            name = choose(self._loads, message, digests)
            self._report_quiet()
        load = self._loads[name]
        load.add(message.request_id, load.num_new(digests), digests)
        self._owners[message.request_id] = name
        self._links[name].send(message)

    def _report_quiet(self) -> None:
        for name in self._up():
            if not self._loads[name].is_quiet():
                self._reported.discard(name)
            elif name not in self._reported:
                self._reported.add(name)
                log.error("%s makes no progress and gets no more requests; its stacks:", name)
                self._links[name].dump_stacks()

    def _forget(self, request_id: str) -> str | None:
        """Forget a request. -> the engine that had it."""
        name = self._owners.pop(request_id, None)
        if name is not None:
            self._loads[name].remove(request_id)
        return name

    # ---- from the engines ----

    def _on_event(self, name: str, event: EngineEvent) -> None:
        if name in self._loads:
            self._loads[name].heard_at = time.monotonic()
        match event:
            case EngineOutputs():
                self._turned(name, event)
            case EngineState():
                if name == self._asked:
                    self._publish(event)
            case OperationResult():
                self._on_operation_result(name, event)
            case EngineStarted():
                self._started(name, event)
            case EngineLost():
                self._lost(name, event)
            case RequestsLost():
                self._publish(event)

    def _turned(self, name: str, event: EngineOutputs) -> None:
        self._loads[name].stats = event.stats
        finished = [update for update in event.updates if update.finish_reason is not None]
        for update in finished:
            self._forget(update.request_id)
        # Many engines have many turns, so the sum is cached. It must be up to date when a request
        # finishes, since no further turn may follow.
        if finished or not event.updates or time.monotonic() - self._summed_at > SUM_S:
            self._sum = self._stats()
        self._publish(EngineOutputs(updates=event.updates, stats=self._sum))

    def _on_operation_result(self, name: str, answer: OperationResult) -> None:
        order = self._orders.get(answer.number)
        if order is None:
            return
        order.waiting.discard(name)
        order.answers[name] = answer
        if order.waiting:
            return
        del self._orders[answer.number]
        failed = [f"{n}: {a.error}" for n, a in order.answers.items() if a.error is not None]
        results = dict.fromkeys(a.result for a in order.answers.values())
        self._publish(
            OperationResult(
                number=answer.number,
                result="; ".join(results),
                error="; ".join(failed) or None,
            )
        )

    def _started(self, name: str, event: EngineStarted) -> None:
        was_up, known = self._up(), self._loads.get(name)
        stats = event.stats
        if known is not None and stats is not None:
            self._past = sum_stats([_counted(known.stats), *self._before()])
        if stats is None:  # the same engine as before
            assert known is not None, "the engine has been up before"
            stats = known.stats
        self._loads[name] = EngineLoad(
            info=event.info,
            stats=stats,
            num_rows=self._config.max_num_seqs,
            caches_prefixes=self._config.enable_prefix_caching and event.info.can_cache_prefixes,
        )
        if was_up and (self._owners or self._orders):  # EngineStarted would drop these
            self._publish(EngineOutputs(updates=(), stats=self._stats()))
        else:
            info = smallest(self._loads[one].info for one in self._up())
            self._publish(EngineStarted(info=info, stats=self._stats()))

    def _lost(self, name: str, event: EngineLost) -> None:
        if event.is_final:
            self._over.add(name)
        load = self._loads.get(name)
        ids: list[str] = []
        if load is not None:
            ids = list(load.requests)
            load.is_up = False
            load.requests, load.num_blocks = {}, 0
            load.sent.clear()
        for request_id in ids:
            del self._owners[request_id]
        if not self._up():
            is_final = self._over == set(self._links)
            self._orders.clear()
            self._publish(
                EngineLost(reason=event.reason, is_final=is_final, is_asleep=event.is_asleep)
            )
            return
        self._publish(RequestsLost(request_ids=ids, reason=f"{name}: {event.reason}"))
        self._publish(EngineOutputs(updates=(), stats=self._stats()))
        for number, order in list(self._orders.items()):
            if name in order.waiting:
                lost = f"the engine has stopped: {event.reason}"
                self._on_operation_result(name, OperationResult(number=number, error=lost))

    # ---- numbers ----

    def _is_up(self, name: str) -> bool:
        return name in self._loads and self._loads[name].is_up

    def _up(self) -> list[str]:
        return [name for name in self._links if self._is_up(name)]

    def _before(self) -> list[EngineStats]:
        return [] if self._past is None else [self._past]

    def _stats(self) -> EngineStats:
        """Summed statistics of all engines. Counts of engines that died are included."""
        self._summed_at = time.monotonic()
        now = [load.stats if load.is_up else _counted(load.stats) for load in self._loads.values()]
        return sum_stats([*now, *self._before()])


def _counted(stats: EngineStats) -> EngineStats:
    """The counters of an engine that has stopped, with all gauges 0."""
    gauges: dict[str, Any] = dict.fromkeys(GAUGES, 0)
    return dataclasses.replace(stats, **gauges)


_NUMBERS = [field.name for field in dataclasses.fields(EngineStats) if field.name != "step_sizes"]


def sum_stats(parts: Iterable[EngineStats]) -> EngineStats:
    parts = list(parts)
    total: dict[str, Any] = {name: sum(getattr(one, name) for one in parts) for name in _NUMBERS}
    sizes = [one.step_sizes for one in parts if one.step_sizes]
    return EngineStats(**total, step_sizes=[sum(counts) for counts in zip(*sizes, strict=True)])


def smallest(infos: Iterable[ModelInfo]) -> ModelInfo:
    """What every engine can serve: they may differ in their available memory."""
    infos = list(infos)
    return dataclasses.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_blocks=min(info.num_blocks for info in infos),
        pool_tokens=min(info.pool_tokens for info in infos),
        blocks_per_request=min(info.blocks_per_request for info in infos),
    )
