"""`AsyncLLM`: concurrent requests from asyncio, with streaming and cancellation.

The engine runs behind a link (frontend/engine_link.py): in a thread, or in another process.
Everything here runs on one event loop.

    submit() --messages--> link --EngineOutputs--> _on_event() --> ActiveRequest --> Stream
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from llmc.config import EngineConfig
from llmc.engine.messages import (
    AbortRequest,
    EngineOutputs,
    EngineState,
    EngineStats,
    GetState,
    Operate,
    Operation,
    OperationResult,
    RequestUpdate,
)
from llmc.errors import (
    EngineAsleepError,
    EngineDeadError,
    EngineShutDownError,
    InvalidRequestError,
    QueueFullError,
)
from llmc.frontend.engine_link import (
    EngineEvent,
    EngineLink,
    EngineLost,
    EngineStarted,
    Processes,
    RequestsLost,
)
from llmc.frontend.engine_options import EngineOptions, load_tokenizer, make_config, start
from llmc.frontend.engine_thread import EngineThread
from llmc.frontend.inputs import Input, InputProcessor, Prompt
from llmc.frontend.outputs import OutputProcessor
from llmc.frontend.preparation import Preparation
from llmc.frontend.stream import Stream as Stream
from llmc.lora_request import LoRARequest
from llmc.outputs import FinishReason, RequestOutput
from llmc.processes.watchdog import Watchdog
from llmc.sampling_params import SamplingParams
from llmc.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo, OnPhase
    from llmc.processes.shared_counts import SharedCounts
    from llmc.startup.start import Started

WATCHDOG_S = 60.0  # not ready if requests wait this long without an event


class AsyncLLM:
    """Serves a model to many callers on one event loop. Options are those of `LLM`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        on_phase: OnPhase | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = make_config(model, options)
        started = start(config, on_phase)
        engine, info = started.engine, started.info
        tokenizer = load_tokenizer(config, info)
        link = EngineThread(engine, started.end_ranks)
        self._attach(link, info, engine.stats(), config, tokenizer)

    @classmethod
    def from_started(
        cls, started: Started, config: EngineConfig, tokenizer: Tokenizer | None = None
    ) -> AsyncLLM:
        """Wrap an engine that is already started. `tokenizer` None: token ids only."""
        engine = started.engine
        link = EngineThread(engine, started.end_ranks)
        return cls.from_link(link, started.info, engine.stats(), config, tokenizer)

    @classmethod
    def from_link(
        cls,
        link: EngineLink,
        info: ModelInfo,
        stats: EngineStats,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        *,
        shared: SharedCounts | None = None,
    ) -> AsyncLLM:
        """Connect to an engine that runs elsewhere. `shared`: other AsyncLLMs use it too, and the
        limit of waiting requests is for all of them."""
        llm = cls.__new__(cls)
        llm._attach(link, info, stats, config, tokenizer)
        llm.shared = shared
        return llm

    def _attach(
        self,
        link: EngineLink,
        info: ModelInfo,
        stats: EngineStats,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self.prepare = Preparation(info, tokenizer)
        self.num_rows = config.max_num_seqs * config.data_parallel_size  # over all its engines
        self.max_queued = config.max_num_queued or 4 * self.num_rows
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, Stream] = {}
        self.num_preparing = 0  # calls
        self._link = link
        self._stats = stats
        self._state: asyncio.Future[EngineState | None] | None = None  # pending request for it
        self._orders: dict[int, asyncio.Future[OperationResult]] = {}  # not answered yet
        self._num_orders = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: str | None = None
        self._is_over = False
        self._was_shut_down = False  # while the engine was alive
        self.shared: SharedCounts | None = None
        self._draining = False
        self.is_asleep = False  # accepts no requests until `wake_up`
        self._last_event = time.monotonic()
        self._watchdog = Watchdog(self._seconds_left, link.dump_stacks)

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far each time it grows; the last one has `finished` set.

        Leaving the loop early, or cancelling the task, aborts the request.
        """
        sampling = sampling_params or self.get_default_sampling_params()
        with self.preparing():
            source = await self.prepare.prompt(prompt, sampling)
            if lora_request is not None:
                adapter = await asyncio.to_thread(self.prepare.inputs.adapter, lora_request)
                source = source.with_adapter(adapter)
        async with self.submit(source, request_id=request_id, priority=priority) as stream:
            while await stream.deltas():
                output = stream.requests[0].output()
                yield output
                if output.finished:
                    return

    @contextlib.contextmanager
    def preparing(self, *, submits: bool = True) -> Iterator[None]:
        """Surrounds the preparation of a call, and rejects the call before it if too many wait.

        `submits`: the call is then submitted, so it needs room in the queue.
        """
        with self._admitting():
            num_preparing = self.num_preparing + self._others()[0]
            if submits:
                self._admit(num_preparing)
            elif num_preparing >= self.num_rows + self.max_queued:
                raise QueueFullError(
                    f"{num_preparing} calls are being prepared and the limit is "
                    f"{self.num_rows + self.max_queued}; try again in a moment"
                )
            self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1
            self._report_counts()

    @contextlib.asynccontextmanager
    async def submit(
        self,
        *sources: Input,
        request_id: str | None = None,
        priority: int = 0,
        stream_interval: int = 1,
    ) -> AsyncIterator[Stream]:
        """Submit prepared requests to the engine. Leaving the block aborts unfinished ones.

        With several sources, their ids are `request_id` plus a number. For each completion, the
        reader gets the first delta at once, and then one every `stream_interval` tokens.
        """
        base = request_id or f"req-{uuid.uuid4().hex}"
        ids = [base] if len(sources) == 1 else [f"{base}-{i}" for i in range(len(sources))]
        stream = Stream(stream_interval)
        try:
            with self._admitting():
                self._admit()
                for one, source in zip(ids, sources, strict=True):
                    self._submit(one, source, stream, priority)
            yield stream
        finally:
            for request in stream.requests:
                if not request.finished:  # otherwise another request could have reused its id
                    self.abort(request.request_id)
                elif self._streams.get(request.request_id) is stream:
                    del self._streams[request.request_id]

    def _admit(self, num_preparing: int = 0) -> None:
        """Raise unless there is room. One call can overshoot the limit; the next is rejected.

        `num_preparing`: calls that will be submitted before this one.
        """
        if self.is_asleep:
            raise EngineAsleepError(f"{self.info.name} is asleep; wake it up first")
        self.check_health()
        if self._draining:
            raise EngineShutDownError("the server is shutting down and accepts no new requests")
        num_sequences = self._outputs.num_sequences + self._others()[1]
        waiting = num_preparing + num_sequences - self.num_rows
        if waiting >= self.max_queued:
            raise QueueFullError(
                f"{waiting} requests are waiting and the limit is {self.max_queued}; "
                "try again in a moment"
            )

    @contextlib.contextmanager
    def _admitting(self) -> Iterator[None]:
        """Surrounds an admission: no other process admits a call between the check and its end."""
        if self.shared is None:
            yield
            return
        with self.shared.locked():
            try:
                yield
            finally:
                self._report_counts()

    def _others(self) -> tuple[int, int]:
        """What other processes have: calls being prepared, and sequences in flight."""
        return (0, 0) if self.shared is None else self.shared.others()

    def _report_counts(self) -> None:
        if self.shared is not None:
            self.shared.write(self.num_preparing, self._outputs.num_sequences)

    def _submit(self, request_id: str, source: Input, stream: Stream, priority: int) -> None:
        self.open()
        was_idle = not self._outputs.active
        request, messages = self._outputs.add(request_id, source, priority)
        if was_idle:
            self._last_event = time.monotonic()  # the watchdog counts from here
            self._watchdog.watch()
        stream.add(request)
        self._streams[request_id] = stream
        for message in messages:
            self._link.send(message)

    def abort(self, request_id: str) -> None:
        """Abort a request; its reader sees finish_reason "abort". No-op if unknown or finished."""
        stream = self._streams.pop(request_id, None)
        request = self._outputs.active.get(request_id)
        for child in self._outputs.abort(request_id):
            self._link.send(AbortRequest(request_id=child))
        self._report_counts()
        if stream is not None and request is not None:
            stream.notify(request)

    # ---- state ----

    @property
    def inputs(self) -> InputProcessor:
        """Prepares and checks prompts for the model."""
        return self.prepare.inputs

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer: a copy, which can be modified."""
        return self.inputs.need_tokenizer("get_tokenizer()").for_callers

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults from the model's generation_config."""
        return self.inputs.default_sampling()

    def stats(self) -> EngineStats:
        """The engine's statistics after its latest turn."""
        return self._stats

    async def engine_state(self) -> EngineState:
        """Rows, blocks and queues as of the engine's next turn. Concurrent callers share one query.

        Raises EngineDeadError if there is no engine, or if it is lost meanwhile.
        """
        self.open()
        self.check_health()
        if self._state is None:
            self._state = asyncio.get_running_loop().create_future()
            self._link.send(GetState())
        state = await asyncio.shield(self._state)
        if state is None:
            self.check_health()
            raise EngineDeadError("the engine was restarted")
        return state

    async def stop_admitting(self, *, aborts: bool) -> None:
        """Before a sleep: reject new requests, and wait for the running ones or abort them."""
        self.is_asleep = True
        for request_id in list(self._outputs.active) if aborts else ():
            self.abort(request_id)
        while self._outputs.active:
            await asyncio.sleep(0.02)
        await self.prepare.end_trial()

    async def run_operation(self, operation: Operation, folder: str = "") -> str:
        """Run an operation in the engine between two steps; returns a description of the result.

        "stop_profile" writes into `folder`. Raises InvalidRequestError if it can't be done, and
        EngineDeadError if the engine is lost meanwhile.
        """
        self.open()
        self.check_health()
        self._num_orders += 1
        number = self._num_orders
        answer: asyncio.Future[OperationResult] = asyncio.get_running_loop().create_future()
        self._orders[number] = answer
        self._link.send(Operate(number=number, operation=operation, folder=folder))
        try:
            operated = await answer
        finally:
            self._orders.pop(number, None)
        if operated.error is not None:
            raise InvalidRequestError(operated.error)
        return operated.result

    def processes(self) -> Processes:
        """The processes that serve the model."""
        return self._link.processes()

    @property
    def num_active(self) -> int:
        """Number of unfinished requests."""
        return len(self._outputs.active)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_stalled(self) -> bool:
        """Whether requests are in flight but the engine sent no event for WATCHDOG_S."""
        left = self._seconds_left()
        return left is not None and left <= 0

    def _seconds_left(self) -> float | None:
        """Seconds until the engine counts as stalled; None while it is idle."""
        if not self._outputs.active:
            return None
        if self._link.has_idle_engine:
            return WATCHDOG_S
        return self._last_event + WATCHDOG_S - time.monotonic()

    @property
    def failure(self) -> str | None:
        """Why the engine stopped for good; None while it runs or can still restart."""
        return self._dead if self._is_over else None

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now can expect an answer."""
        return self.is_alive and not (self._draining or self.is_stalled or self.is_asleep)

    @property
    def is_alive(self) -> bool:
        """Whether the engine is currently running."""
        return self._dead is None

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is gone, EngineShutDownError if it was shut down."""
        if self._dead is not None:
            raise self._gone(self._dead)

    def _gone(self, why: str) -> EngineDeadError:
        if self._was_shut_down:
            return EngineShutDownError("the server was shut down; send the request again")
        return EngineDeadError(f"the engine has stopped: {why}")

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Reject new requests, let running ones finish within `drain_timeout`, stop the engine."""
        await self.drain(drain_timeout)
        self._watchdog.stop()
        if self._dead is None:
            self._dead, self._was_shut_down = "it was shut down", True
        self._lose_all("abort")
        await self.prepare.close()
        await self._link.close()

    async def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for running ones; returns whether all finished in time."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._outputs.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._outputs.active

    # ---- the engine's side ----

    def open(self) -> None:
        """Connect to the engine, bound to the running event loop. The first request calls this."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._link.open(self._on_event)
        elif self._loop is not loop:
            raise EngineDeadError("this AsyncLLM belongs to another event loop; use it from there")

    def _on_event(self, event: EngineEvent) -> None:
        self._last_event = time.monotonic()
        match event:
            case EngineOutputs():
                self._stats = event.stats
                self._apply(event.updates)
            case EngineState():
                self._answer_state(event)
            case OperationResult():
                if (answer := self._orders.get(event.number)) is not None and not answer.done():
                    answer.set_result(event)
            case EngineLost():
                self._dead, self._is_over = event.reason, event.is_final
                self._stats = dataclasses.replace(  # a dead engine holds nothing
                    self._stats,
                    num_running=0,
                    num_waiting=0,
                    num_deferred=0,
                    num_free_blocks=self._stats.num_blocks,
                )
                self.is_asleep = self.is_asleep or event.is_asleep
                self._lose_all("error")
            case RequestsLost():
                self._answer_state(None)
                self._lose(self._outputs.owners(event.request_ids), "error", event.reason)
            case EngineStarted():
                self._lose_all("error")
                self._dead = None
                self._stats = event.stats or self._stats
                self.info = event.info
                self.prepare.inputs = InputProcessor(event.info, self.tokenizer)
        self._report_counts()

    def _answer_state(self, state: EngineState | None) -> None:
        waiter, self._state = self._state, None
        if waiter is not None:
            waiter.set_result(state)

    def _apply(self, updates: Sequence[RequestUpdate]) -> None:
        changed, aborts = self._outputs.apply(updates)
        for child in aborts:
            self._link.send(AbortRequest(request_id=child))
        for request in changed:
            stream = self._streams.get(request.request_id)
            if stream is not None:
                stream.notify(request)

    def _lose_all(self, reason: FinishReason) -> None:
        self._answer_state(None)
        for answer in self._orders.values():
            if not answer.done():
                answer.set_exception(self._gone(self._dead or ""))
        self._lose(list(self._outputs.active), reason, self._dead or "")

    def _lose(self, request_ids: Iterable[str], reason: FinishReason, why: str) -> None:
        for request_id in request_ids:
            error = self._gone(why)  # one for each reader, which raises it
            for child in self._outputs.abort(request_id, reason, str(error)):
                self._link.send(AbortRequest(request_id=child))
            self._streams.pop(request_id).lose(error)
