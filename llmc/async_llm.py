"""`AsyncLLM`: many requests at once from asyncio, with streaming and cancellation.

The engine runs behind a link (frontend/engine_link.py): in a thread, or in another process.
Everything here runs on one event loop.

    submit() --messages--> link --EngineOutputs--> _on_event() --> ActiveRequest --> Stream
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from llmc.config import EngineConfig
from llmc.engine.messages import (
    AbortRequest,
    EngineOutputs,
    EngineState,
    EngineStats,
    GetState,
    Operate,
    Operated,
    Operation,
    RequestUpdate,
)
from llmc.errors import EngineAsleepError, EngineDeadError, InvalidRequestError, QueueFullError
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
from llmc.frontend.pooling import Scoring
from llmc.frontend.stream import Stream as Stream
from llmc.lora_request import LoRARequest
from llmc.outputs import FinishReason, RequestOutput
from llmc.pooling import PoolingParams
from llmc.processes.grammar_trial import make_trial
from llmc.processes.watchdog import Watchdog
from llmc.sampling_params import SamplingParams
from llmc.text.chat import Message, Tool, check_tools, reasoning_format
from llmc.text.infill import infill_prompt, need_marks
from llmc.text.reasoning import find_reasoning
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.tool_format import ToolFormat

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo, Phase
    from llmc.startup.start import Started

T = TypeVar("T")

LONG_TEXT = 4000  # characters or ids above which text work leaves the event loop
RENDER_TIMEOUT_S = 5.0
WATCHDOG_S = 60.0  # without an event for so long while requests wait: not ready


class AsyncLLM:
    """A model served to many callers on one event loop. Options are those of `LLM`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        on_phase: Callable[[Phase], None] | None = None,
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
        """An AsyncLLM on an engine that is already there. `tokenizer` None: token ids only."""
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
        is_shared: bool = False,
    ) -> AsyncLLM:
        """An AsyncLLM on an engine that runs elsewhere. `is_shared`: with others like this one."""
        llm = cls.__new__(cls)
        llm._attach(link, info, stats, config, tokenizer)
        llm._is_shared = is_shared
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
        self.inputs = InputProcessor(info, tokenizer)
        self.num_rows = config.max_num_seqs * config.data_parallel_size  # of all its engines
        self.max_queued = config.max_num_queued or 4 * self.num_rows
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, Stream] = {}
        self._link = link
        self._stats = stats
        self._state: asyncio.Future[EngineState | None] | None = None  # that was asked for
        self._orders: dict[int, asyncio.Future[Operated]] = {}  # that were not answered yet
        self._num_orders = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llmc-text")
        self._trial = make_trial(info, tokenizer)
        self._trial_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc-trial")
        self._dead: str | None = None
        self._is_over = False
        self._is_shared = False
        self._draining = False
        self.is_asleep = False  # it takes no requests until `wake_up`
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
        """Yields the output so far each time there is more; the last one has `finished` set.

        Leaving the loop early, or cancelling the task, aborts the request.
        """
        sampling = sampling_params or self.get_default_sampling_params()
        source = (await self.prepare(prompt, sampling)).with_adapter(lora_request)
        async with self.submit(source, request_id=request_id, priority=priority) as stream:
            while await stream.deltas():
                output = stream.requests[0].output()
                yield output
                if output.finished:
                    return

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        tokenizer = self.inputs.need_tokenizer("prompt")
        encode = functools.partial(tokenizer.encode, add_special_tokens=add_special_tokens)
        return await self._work(len(text), encode, text)

    async def infill(
        self, before: Sequence[str], after: str, *, add_special_tokens: bool = True
    ) -> tuple[list[Prompt], frozenset[int]]:
        """Prompts for what comes between each of the texts and `after`, and the tokens that end an
        answer. InvalidRequestError where the model has no marks for that."""
        tokenizer = self.inputs.need_tokenizer("suffix")
        marks = need_marks(tokenizer, self.info.name)
        make_one = functools.partial(
            infill_prompt, tokenizer, marks, add_special_tokens=add_special_tokens
        )

        def make() -> list[Prompt]:
            return [{"prompt": text, "prompt_token_ids": make_one(text, after)} for text in before]

        return await self._work(sum(map(len, before)) + len(after), make), marks.ends

    async def prepare(self, prompt: Prompt, sampling: SamplingParams) -> Input:
        """Check and tokenize; long texts in a worker thread, so that others go on."""
        source = await self._work(_size(prompt), self.inputs.process, prompt, sampling)
        await self._try_grammar(sampling)
        return source

    async def prepare_many(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Input]:
        """`prepare` of each; an error names its prompt by its place."""

        def process() -> list[Input]:
            return [
                self._at(i, len(prompts), functools.partial(self.inputs.process, p, sampling))
                for i, p in enumerate(prompts)
            ]

        sources = await self._work(sum(map(_size, prompts)), process)
        await self._try_grammar(sampling)
        return sources

    async def prepare_pooled(
        self, prompts: Sequence[Prompt], *, truncate: int | None = None
    ) -> list[Input]:
        """Check and tokenize prompts whose vectors are wanted; an error names its prompt."""
        pooled = functools.partial(self.inputs.pooled, truncate=truncate)

        def process() -> list[Input]:
            return [
                self._at(i, len(prompts), functools.partial(pooled, p))
                for i, p in enumerate(prompts)
            ]

        return await self._work(sum(map(_size, prompts)), process)

    async def prepare_scoring(
        self, left: Sequence[str], right: Sequence[str], params: PoolingParams
    ) -> Scoring:
        """Check and tokenize texts that are to be scored."""
        size = sum(map(len, left)) + sum(map(len, right))
        return await self._work(size, Scoring, self.inputs, left, right, params)

    async def _try_grammar(self, sampling: SamplingParams) -> None:
        """One at a time, in a separate thread: trying a grammar may take long."""
        spec = sampling.structured_outputs
        if spec is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._trial_worker, self._trial.check, spec)

    @staticmethod
    def _at(index: int, count: int, process: Callable[[], Input]) -> Input:
        """An error of one of several prompts names it by its place."""
        try:
            return process()
        except InvalidRequestError as exc:
            if exc.param == "prompt" and count > 1:
                exc.param = f"prompt[{index}]"
            raise

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        splits_reasoning: bool = False,
        max_reasoning_tokens: int | None = None,
    ) -> Input:
        """Render the chat template, check and tokenize, within RENDER_TIMEOUT_S.

        With `splits_reasoning` the input says how the answer marks its reasoning, if it may have
        any, and a grammar is for what comes after it; `max_reasoning_tokens` then limits it.
        """
        self.inputs.need_generation()
        tokenizer = self.inputs.need_tokenizer("messages")

        def render() -> Prompt:
            return self.inputs.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )

        def process(prompt: Prompt) -> Input:
            source = self.inputs.process(prompt, sampling)
            form = reasoning_format(tokenizer) if splits_reasoning else None
            if form is None:
                return source
            continued = messages[-1] if continue_final_message else None
            reasoning = find_reasoning(form, tokenizer, source.prompt_token_ids, continued)
            return (
                source if reasoning is None else source.splitting(reasoning, max_reasoning_tokens)
            )

        prompt = await self._within_time(render)
        # images take long to prepare
        source = await self._work(LONG_TEXT + 1, functools.partial(process, prompt))
        await self._try_grammar(source.sampling)
        return source

    async def check_tools(self, tools: Sequence[Tool]) -> ToolFormat:
        """How the model writes tool calls; InvalidRequestError where its template can't render
        these tools."""
        tokenizer = self.inputs.need_tokenizer("tools")
        return await self._within_time(functools.partial(check_tools, tokenizer, tools))

    async def _within_time(self, render: Callable[[], T]) -> T:
        """Always in a worker: a template is a program, and may take its time."""
        try:
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                return await self._work(LONG_TEXT + 1, render)
        except TimeoutError:
            raise InvalidRequestError(
                f"the chat template took more than {RENDER_TIMEOUT_S:g} s on these messages",
                param="messages",
                code="chat_template_error",
            ) from None

    @contextlib.asynccontextmanager
    async def submit(
        self,
        *sources: Input,
        request_id: str | None = None,
        priority: int = 0,
        stream_interval: int = 1,
    ) -> AsyncIterator[Stream]:
        """Hands prepared requests to the engine. Leaving the block aborts what still runs.

        With several sources their ids are `request_id` with a number behind it. Of each completion
        the reader gets a delta every `stream_interval` tokens, and the first one at once.
        """
        base = request_id or f"req-{uuid.uuid4().hex}"
        ids = [base] if len(sources) == 1 else [f"{base}-{i}" for i in range(len(sources))]
        self._admit()
        stream = Stream(stream_interval)
        try:
            for one, source in zip(ids, sources, strict=True):
                self._submit(one, source, stream, priority)
            yield stream
        finally:
            for request in stream.requests:
                if not request.finished:  # else its id may be another's by now
                    self.abort(request.request_id)
                elif self._streams.get(request.request_id) is stream:
                    del self._streams[request.request_id]

    def _admit(self) -> None:
        """Whether there is room. One call may overshoot the limit, the next is refused."""
        if self.is_asleep:
            raise EngineAsleepError(f"{self.info.name} is asleep, and has to be woken first")
        self.check_health()
        if self._draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        waiting = self._outputs.num_sequences - self.num_rows
        if self._is_shared:  # the others' requests are known from the engine alone, a bit late
            waiting = max(waiting, self._stats.num_waiting)
        if waiting >= self.max_queued:
            raise QueueFullError(
                f"{waiting} requests are waiting and the limit is {self.max_queued}; "
                "try again in a moment"
            )

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
        """End a request; its reader sees finish_reason "abort". Unknown or finished: nothing."""
        stream = self._streams.pop(request_id, None)
        request = self._outputs.active.get(request_id)
        for child in self._outputs.abort(request_id):
            self._link.send(AbortRequest(request_id=child))
        if stream is not None and request is not None:
            stream.notify(request)

    # ---- state ----

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model: a copy, which may be changed."""
        return self.inputs.need_tokenizer("get_tokenizer()").for_callers

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the model's generation_config recommends."""
        return self.inputs.default_sampling()

    def stats(self) -> EngineStats:
        """The engine's numbers after its latest turn."""
        return self._stats

    async def engine_state(self) -> EngineState:
        """Rows, blocks and queues as of the engine's next turn. Callers at a time share one.

        Raises EngineDeadError when there is no engine, or it is lost meanwhile.
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
        """Take no more requests, and wait for those that run, or abort them: for a sleep."""
        self.is_asleep = True
        for request_id in list(self._outputs.active) if aborts else ():
            self.abort(request_id)
        while self._outputs.active:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self._trial.close)  # a process, which a later check starts again

    async def operate(self, operation: Operation, folder: str = "") -> str:
        """Have the engine do this between two steps; what came of it, in words.

        "stop_profile" writes into `folder`. Raises InvalidRequestError where it can't be done, and
        EngineDeadError when the engine is lost meanwhile.
        """
        self.open()
        self.check_health()
        self._num_orders += 1
        number = self._num_orders
        answer: asyncio.Future[Operated] = asyncio.get_running_loop().create_future()
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
        """The processes that the model is served by."""
        return self._link.processes()

    @property
    def num_active(self) -> int:
        """Requests submitted and not ended."""
        return len(self._outputs.active)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_stalled(self) -> bool:
        """Requests are in flight, and there was no event of the engine for WATCHDOG_S."""
        left = self._seconds_left()
        return left is not None and left <= 0

    def _seconds_left(self) -> float | None:
        """Until the engine counts as stalled; None while it has nothing to do."""
        if not self._outputs.active:
            return None
        if self._link.has_idle_engine:
            return WATCHDOG_S
        return self._last_event + WATCHDOG_S - time.monotonic()

    @property
    def failure(self) -> str | None:
        """Why the engine stopped for good; None while it runs or may come back."""
        return self._dead if self._is_over else None

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now can expect an answer."""
        return self.is_alive and not (self._draining or self.is_stalled or self.is_asleep)

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine at the moment."""
        return self._dead is None

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead}")

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones end within `drain_timeout`, stop the engine."""
        await self.drain(drain_timeout)
        self._watchdog.stop()
        self._dead = self._dead or "it was shut down"
        self._lose_all("abort")
        for workers in (self._workers, self._trial_worker):
            workers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._trial.close)
        await self._link.close()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the running ones; whether all ended in time."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._outputs.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._outputs.active

    # ---- the engine's side ----

    def open(self) -> None:
        """Connect to the engine, from now on in the running event loop; the first request does."""
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
            case Operated():
                if (answer := self._orders.get(event.number)) is not None and not answer.done():
                    answer.set_result(event)
            case EngineLost():
                self._dead, self._is_over = event.reason, event.is_final
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
                self.inputs = InputProcessor(event.info, self.tokenizer)

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
                answer.set_exception(EngineDeadError(f"the engine has stopped: {self._dead}"))
        self._lose(list(self._outputs.active), reason, self._dead or "")

    def _lose(self, request_ids: Iterable[str], reason: FinishReason, why: str) -> None:
        message = f"the engine has stopped: {why}"
        for request_id in request_ids:
            for child in self._outputs.abort(request_id, reason, message):
                self._link.send(AbortRequest(request_id=child))
            self._streams.pop(request_id).lose(message)

    async def _work(self, size: int, do: Callable[..., T], *args: Any) -> T:
        if size <= LONG_TEXT:
            return do(*args)
        return await asyncio.get_running_loop().run_in_executor(self._workers, do, *args)


def _size(prompt: Prompt) -> int:
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data") is not None:
            return LONG_TEXT + 1
        return max((len(v) for v in prompt.values() if isinstance(v, str | list)), default=0)
    return len(prompt) if isinstance(prompt, str | list | tuple) else 0
