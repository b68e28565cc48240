"""`AsyncLLM`: many requests at once from asyncio, with streaming and cancellation.

The engine runs in a thread (front/engine_thread.py); everything here runs on one event loop.

    stream() --submit--> engine thread --EngineNews--> _hear() --> ActiveRequest --wake--> reader

Readers take what there is when they get to it, so a slow one makes nothing queue up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from llmc.config import EngineConfig
from llmc.engine.messages import AbortRequest, EngineStats
from llmc.errors import EngineDeadError, InvalidRequestError, QueueFullError
from llmc.front.engine import EngineOptions, load_tokenizer, make_config, start
from llmc.front.engine_thread import EngineNews, EngineThread, Stop
from llmc.front.inputs import Input, InputProcessor, Prompt
from llmc.front.outputs import ActiveRequest, CompletionDelta, Cursor, OutputProcessor
from llmc.front.watchdog import Watchdog
from llmc.outputs import RequestOutput
from llmc.sampling_params import SamplingParams
from llmc.text.chat import Message, render_chat
from llmc.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.start import ModelInfo, Phase, Started

T = TypeVar("T")

LONG_TEXT = 4000  # characters or ids above which text work leaves the event loop
RENDER_TIMEOUT_S = 5.0
WATCHDOG_S = 60.0  # no news for so long while requests wait: not ready


class Stream:
    """Requests that were submitted together, and their one reader. Made by `AsyncLLM.submit`."""

    def __init__(
        self,
        requests: Sequence[ActiveRequest],
        wake: asyncio.Event,
        check_health: Callable[[], None],
    ) -> None:
        self.requests = requests
        self._wake = wake
        self._check_health = check_health
        self._readers = [
            (index, completion, Cursor())
            for index, request in enumerate(requests)
            for completion in request.completions
        ]

    @property
    def error(self) -> str | None:
        """Why a request failed alone. The others go on."""
        return next((r.error for r in self.requests if r.error is not None), None)

    async def deltas(self) -> list[tuple[int, CompletionDelta]]:
        """Waits for news: pairs of a request's place in `requests` and what it gained.

        Empty at the end. A request that failed alone ends with finish_reason "error"; when the
        whole engine is gone EngineDeadError is raised. May be cancelled and called again.
        """
        while True:
            if any(request.error is not None for request in self.requests):
                self._check_health()
            self._wake.clear()
            found = [
                (index, delta)
                for index, completion, cursor in self._readers
                if (delta := completion.delta(cursor)) is not None
            ]
            if found or all(request.finished for request in self.requests):
                return found
            await self._wake.wait()


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
        self._attach(started, config, load_tokenizer(config, started.info))

    @classmethod
    def from_started(
        cls, started: Started, config: EngineConfig, tokenizer: Tokenizer | None = None
    ) -> AsyncLLM:
        """An AsyncLLM on an engine that is already there. `tokenizer` None: token ids only."""
        llm = cls.__new__(cls)
        llm._attach(started, config, tokenizer)
        return llm

    def _attach(self, started: Started, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.info: ModelInfo = started.info
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(started.info, tokenizer)
        self.max_queued = config.max_num_queued or 4 * config.max_num_seqs
        self._outputs = OutputProcessor(tokenizer)
        self._wakes: dict[str, asyncio.Event] = {}
        self._engine_thread = EngineThread(started.engine, self._publish)
        self._stats: EngineStats = started.engine.stats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llmc-text")
        self._dead: str | None = None
        self._draining = False
        self._last_news = time.monotonic()
        self._watchdog = Watchdog(self._seconds_left)

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the output so far each time there is more; the last one has `finished` set.

        Leaving the loop early, or cancelling the task, aborts the request.
        """
        sampling = sampling_params or self.get_default_sampling_params()
        source = await self.prepare(prompt, sampling)
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

    async def prepare(self, prompt: Prompt, sampling: SamplingParams) -> Input:
        """Check and tokenize; long texts in a worker thread, so that others go on."""
        return await self._work(_size(prompt), self.inputs.process, prompt, sampling)

    async def prepare_many(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Input]:
        """`prepare` of each; an error names its prompt by its place."""

        def process() -> list[Input]:
            return [self._process_at(i, prompt, sampling) for i, prompt in enumerate(prompts)]

        return await self._work(sum(map(_size, prompts)), process)

    def _process_at(self, index: int, prompt: Prompt, sampling: SamplingParams) -> Input:
        try:
            return self.inputs.process(prompt, sampling)
        except InvalidRequestError as exc:
            if exc.param == "prompt":
                exc.param = f"prompt[{index}]"
            raise

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Input:
        """Render the chat template, check and tokenize, within RENDER_TIMEOUT_S."""
        tokenizer = self.inputs.need_tokenizer("messages")

        def render() -> Input:
            ids = render_chat(
                tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
            return self.inputs.process(ids, sampling)

        try:
            # Always in a worker: a template is a program, and may take its time.
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
        self, *sources: Input, request_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[Stream]:
        """Hands prepared requests to the engine. Leaving the block aborts what still runs.

        With several sources their ids are `request_id` with a number behind it.
        """
        base = request_id or f"req-{uuid.uuid4().hex}"
        ids = [base] if len(sources) == 1 else [f"{base}-{i}" for i in range(len(sources))]
        self._admit()
        wake = asyncio.Event()
        requests: list[ActiveRequest] = []
        try:
            for one, source in zip(ids, sources, strict=True):
                requests.append(self._submit(one, source, wake, priority))
            yield Stream(requests, wake, self.check_health)
        finally:
            for request in requests:
                if not request.finished:  # else its id may be another's by now
                    self.abort(request.request_id)
                elif self._wakes.get(request.request_id) is wake:
                    del self._wakes[request.request_id]

    def _admit(self) -> None:
        """Whether there is room. One call may overshoot the limit, the next is refused."""
        self.check_health()
        if self._draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        waiting = self._outputs.num_sequences - self.config.max_num_seqs
        if waiting >= self.max_queued:
            raise QueueFullError(
                f"{waiting} requests are waiting and the limit is {self.max_queued}; "
                "try again in a moment"
            )

    def _submit(
        self, request_id: str, source: Input, wake: asyncio.Event, priority: int
    ) -> ActiveRequest:
        self._start_thread()
        was_idle = not self._outputs.active
        request, messages = self._outputs.add(request_id, source, priority)
        if was_idle:
            self._last_news = time.monotonic()  # the watchdog counts from here
            self._watchdog.watch()
        self._wakes[request_id] = wake
        for message in messages:
            self._engine_thread.send(message)
        return request

    def abort(self, request_id: str) -> None:
        """End a request; its reader sees finish_reason "abort". Unknown or finished: nothing."""
        self._end(request_id, "abort", None)

    def _end(self, request_id: str, reason: Any, error: str | None) -> None:
        for child in self._outputs.abort(request_id, reason, error):
            self._engine_thread.send(AbortRequest(request_id=child))
        wake = self._wakes.pop(request_id, None)
        if wake is not None:
            wake.set()

    # ---- state ----

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model."""
        return self.inputs.need_tokenizer("get_tokenizer()").hf

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the model's generation_config recommends."""
        return self.inputs.default_sampling()

    def stats(self) -> EngineStats:
        """The engine's numbers after its latest turn."""
        return self._stats

    @property
    def num_active(self) -> int:
        """Requests submitted and not ended."""
        return len(self._outputs.active)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_stalled(self) -> bool:
        """Requests are in flight, and the engine has said nothing for WATCHDOG_S."""
        left = self._seconds_left()
        return left is not None and left <= 0

    def _seconds_left(self) -> float | None:
        """Until the engine counts as stalled; None while it has nothing to do."""
        if not self._outputs.active:
            return None
        return self._last_news + WATCHDOG_S - time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now can expect an answer."""
        return self._dead is None and not self._draining and not self.is_stalled

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead}")

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones end within `drain_timeout`, stop the engine."""
        await self.drain(drain_timeout)
        self._watchdog.stop()
        for request_id in list(self._outputs.active):
            self._end(request_id, "abort", "the server shut down before this request ended")
        self._dead = self._dead or "it was shut down"
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._engine_thread.send(Stop())
            await asyncio.to_thread(self._engine_thread.join, 10.0)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the running ones; whether all ended in time."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._outputs.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._outputs.active

    # ---- engine thread -> event loop ----

    def _start_thread(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._engine_thread.start()
        elif self._loop is not loop:
            raise EngineDeadError("this AsyncLLM belongs to another event loop; use it from there")

    def _publish(self, news: EngineNews) -> None:
        """Called in the engine thread."""
        assert self._loop is not None, "the thread starts after the loop is known"
        # A loop that closed has no readers left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hear, news)

    def _hear(self, news: EngineNews) -> None:
        self._last_news = time.monotonic()
        if news.stats is not None:
            self._stats = news.stats
        if news.dead is not None:
            self._die(news.dead)
            return
        changed, aborts = self._outputs.apply(news.updates)
        for child in aborts:
            self._engine_thread.send(AbortRequest(request_id=child))
        for request in changed:
            wake = self._wakes.get(request.request_id)
            if wake is not None:
                wake.set()

    def _die(self, reason: str) -> None:
        self._dead = reason
        for request_id in list(self._outputs.active):
            self._end(request_id, "error", f"the engine has stopped: {reason}")

    async def _work(self, size: int, do: Callable[..., T], *args: Any) -> T:
        if size <= LONG_TEXT:
            return do(*args)
        return await asyncio.get_running_loop().run_in_executor(self._workers, do, *args)


def _size(prompt: Prompt) -> int:
    if isinstance(prompt, Mapping):
        return max((len(v) for v in prompt.values() if isinstance(v, str | list)), default=0)
    return len(prompt) if isinstance(prompt, str | list | tuple) else 0
