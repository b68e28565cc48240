"""`LLM`: offline inference from Python, without a server.

    prompts -> frontend.inputs -> engine.add
                                  engine.step() until done -> frontend.outputs -> RequestOutput

The caller's thread drives the engine, and calls from other threads wait. Use AsyncLLM to serve
concurrent callers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from llmc.config import EngineConfig
from llmc.engine.messages import Operate
from llmc.errors import (
    ConfigError,
    EngineAsleepError,
    EngineDeadError,
    InvalidRequestError,
    LlmcError,
    QueueFullError,
)
from llmc.frontend.arguments import as_conversations, as_list, for_each
from llmc.frontend.beam_search import SearchingEngine, run_searches
from llmc.frontend.engine_options import Engine, EngineOptions, load_tokenizer, make_config, start
from llmc.frontend.inputs import Input, InputProcessor, Prompt
from llmc.frontend.interrupts import uninterrupted
from llmc.frontend.outputs import ActiveRequest, OutputProcessor
from llmc.frontend.pooling_methods import PoolingMethods
from llmc.frontend.progress import GenerationProgress
from llmc.lora_request import LoRARequest
from llmc.outputs import BeamSearchOutput, RequestOutput
from llmc.sampling_params import BeamSearchParams, SamplingParams
from llmc.structured.trial import Trial
from llmc.text.chat import Message, Tool
from llmc.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.engine.messages import EngineStats
    from llmc.model_info import ModelInfo, OnPhase
    from llmc.startup.start import Started

Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None  # one for all, or one each
Outcome = ActiveRequest | InvalidRequestError


class LLM(PoolingMethods):
    """A model loaded for offline generation or for pooling (`embed`, `classify`, `score`).

    `model` is a local directory, a GGUF file, a hub id, or None for the default model. Options are
    the fields of EngineConfig: dtype, device, max_model_len, max_num_seqs, max_num_batched_tokens,
    block_size, kv_cache_memory, opt_level, passes, seed, load_format and so on.

        with LLM("path/to/model") as llm:
            [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
            print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        on_phase: OnPhase | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = make_config(model, options)
        started = start(config, on_phase)
        self._attach(started, config, load_tokenizer(config, started.info))

    @classmethod
    def from_started(
        cls, started: Started, config: EngineConfig, tokenizer: Tokenizer | None = None
    ) -> LLM:
        """Wrap an engine that is already started. `tokenizer` None: token ids only."""
        llm = cls.__new__(cls)
        llm._attach(started, config, tokenizer)
        return llm

    def _attach(self, started: Started, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._is_asleep = False
        self._take(started)
        self._outputs = OutputProcessor(tokenizer)
        self._trial = Trial.for_model(
            tokenizer,
            vocab_size=started.info.vocab_size,
            eos_token_ids=started.info.eos_token_ids,
        )
        self._ids = itertools.count()
        self._in_use = threading.RLock()  # held by the caller whose requests run

    def _take(self, started: Started) -> None:
        self.info: ModelInfo = started.info
        self._engine: SearchingEngine | None = started.engine
        self._upgrade = started.upgrade
        self._end_ranks = started.end_ranks
        self._inputs = InputProcessor(started.info, self._tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: Adapters = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; outputs are in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        `sampling_params` is one for all or one per prompt; None uses the model's own defaults
        (and max_tokens=16). In a list, a prompt that can't be served gets an output whose `error`
        gives the reason, and the others are served; InvalidRequestError is raised if none can be.
        With `scheduling_policy="priority"`, prompts with a lower `priority` (one for all or one
        per prompt) are served first. A prompt given as a dict can have a `cache_salt`, so that it
        shares cached prefixes only with prompts of the same salt, and `add_special_tokens`, which
        is False for text that already begins with them.
        `lora_request`: the LoRA adapter to use, one for all prompts or one (or None) per prompt;
        the engine must have been started with `enable_lora=True`.
        `use_tqdm` is an alias of `progress`.
        """
        self._inputs.need_generation()
        items = as_list(prompts)
        params = _params(sampling_params, self.get_default_sampling_params(), len(items))
        adapters = for_each("lora_request", lora_request, len(items))

        def prepare(prompt: Prompt, sampling: SamplingParams, adapter: Any) -> Input:
            return self._inputs.process(prompt, sampling).with_adapter(
                self._inputs.adapter(adapter)
            )

        jobs = [
            functools.partial(prepare, *each) for each in zip(items, params, adapters, strict=True)
        ]
        ranks = for_each("priority", priority, len(items))
        return self._run(jobs, items, progress if use_tqdm is None else use_tqdm, ranks)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many (a list of conversations).

        Like `generate`, with the model's chat template. Without `sampling_params` the answer can
        fill the context. `tools` (in OpenAI's format) are passed to the template; tool calls are
        left in the answer's text, as the model writes them.
        """
        self._inputs.need_generation()
        chats = as_conversations(messages)
        default = dataclasses.replace(self.get_default_sampling_params(), max_tokens=None)
        params = _params(sampling_params, default, len(chats))

        render = functools.partial(
            self._inputs.render,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
        )

        adapters = for_each("lora_request", lora_request, len(chats))

        def prepare(chat: Sequence[Message], sampling: SamplingParams, adapter: Any) -> Input:
            return self._inputs.process(render(chat), sampling).with_adapter(
                self._inputs.adapter(adapter)
            )

        jobs = [
            functools.partial(prepare, *each) for each in zip(chats, params, adapters, strict=True)
        ]
        return self._run(jobs, [None] * len(chats), progress if use_tqdm is None else use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, as found by transformers' beam search.

        Prompts and the order of outputs are as in `generate`; all prompts are searched at once.
        """
        self._inputs.need_generation()
        items = as_list(prompts)
        shown = progress if use_tqdm is None else use_tqdm
        with self._in_use:
            return run_searches(self._running(), self._inputs, items, params, self._ids, shown)

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer: a copy, which can be modified."""
        return self._inputs.need_tokenizer("get_tokenizer()").for_callers

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults from the model's generation_config."""
        return self._inputs.default_sampling()

    def stats(self) -> EngineStats:
        """The engine's current counters and gauges."""
        return self._running().stats()

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Wait for background compilation, if any; returns whether the compiled step is in use.

        Meant for benchmarks: requests are served in the meantime too, only slower.
        """
        return self._upgrade is not None and self._upgrade.wait(timeout)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, such as between two measurements; returns True."""
        with self._in_use:
            operated = self._running().run_operation(
                Operate(number=0, operation="reset_prefix_cache")
            )
        if operated.error is not None:
            raise InvalidRequestError(operated.error)
        return True

    def sleep(self, level: int = 1) -> None:
        """Release memory until `wake_up`; until then, no requests are served.

        Level 1 releases the memory of the KV cache and keeps the weights. Level 2 drops the whole
        engine, including the weights, and so does level 1 where the cache can't be released in
        place (GPUs, several ranks); `wake_up` then loads them again.
        """
        if level not in (1, 2):
            raise ConfigError(f"level must be 1 or 2, got {level!r}")
        with self._in_use:
            engine = self._engine
            if engine is None and not self._is_asleep:
                raise EngineDeadError("this LLM is closed; create a new one")
            self._is_asleep = True
            self._trial.close()
            if engine is None:
                return
            if level == 1 and self.info.device == "cpu" and self.config.tensor_parallel_size == 1:
                engine.release_caches()
                return
            self._engine = self._upgrade = None
            self._end_ranks()
            self._end_ranks = lambda: None  # the old closure references the engine
            del engine
            from llmc.startup.start import release_freed_memory

            release_freed_memory()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Serve requests again. `tags` are accepted but ignored: everything wakes at once."""
        with self._in_use:
            if self._is_asleep and self._engine is None:
                self._take(start(self.config))
            self._is_asleep = False

    def close(self) -> None:
        """Free the model's memory. The LLM can't be used afterwards; closing twice is fine."""
        self._trial.close()
        with self._in_use:
            engine, self._engine = self._engine, None
            self._upgrade, self._is_asleep = None, False
            if engine is not None:
                self._abort_all(engine)
        self._end_ranks()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> SearchingEngine:
        if self._is_asleep:
            raise EngineAsleepError("this LLM is asleep; call wake_up() first")
        if self._engine is None:
            raise EngineDeadError("this LLM is closed; create a new one")
        return self._engine

    def _run(
        self,
        prepare: Sequence[Callable[[], Input]],
        prompts: Sequence[Any],
        progress: bool,
        priorities: Iterable[int] = itertools.repeat(0),
    ) -> list[RequestOutput]:
        with self._in_use:
            outcomes = self._outcomes(self._running(), prepare, progress, priorities)
        return [
            self._refused(item, prompt) if isinstance(item, InvalidRequestError) else item.output()
            for item, prompt in zip(outcomes, prompts, strict=True)
        ]

    def _vectors(self, prepare: Sequence[Callable[[], Input]], progress: bool) -> list[Outcome]:
        with self._in_use:
            return self._outcomes(self._running(), prepare, progress, itertools.repeat(0))

    def _outcomes(
        self,
        engine: Engine,
        prepare: Sequence[Callable[[], Input]],
        progress: bool,
        priorities: Iterable[int],
    ) -> list[Outcome]:
        """The finished requests, and the errors of rejected ones."""
        try:
            outcomes = [
                self._submit(engine, make, priority)
                for make, priority in zip(prepare, priorities, strict=False)
            ]
            errors = [item for item in outcomes if isinstance(item, InvalidRequestError)]
            if errors and len(errors) == len(outcomes):
                raise errors[0]
            self._drive(engine, progress, len(outcomes) - len(errors))
        except BaseException:  # Ctrl-C above all: leave an engine that can be used again
            self._abort_all(engine)
            raise
        return outcomes

    def _submit(self, engine: Engine, make: Callable[[], Input], priority: int) -> Outcome:
        request_id = str(next(self._ids))
        try:
            source = make()
            if source.sampling.structured_outputs is not None:
                self._trial.check(source.sampling.structured_outputs)
            request, messages = self._outputs.add(request_id, source, priority)
            with uninterrupted():
                for message in messages:
                    engine.add(message)
        except InvalidRequestError as exc:
            self._abort(engine, request_id)
            return exc
        except QueueFullError as exc:
            self._abort(engine, request_id)
            return InvalidRequestError(str(exc), code="queue_full")
        return request

    def _drive(self, engine: Engine, progress: bool, num_requests: int) -> None:
        num_done = num_tokens = 0
        while engine.use_idle_time():  # the caller's thread is idle only before the first step
            pass
        with (
            GenerationProgress(num_requests, enabled=progress) as bar,
            uninterrupted() as check_interrupts,
        ):
            while self._outputs.active:
                if not engine.has_work:
                    raise LlmcError(
                        f"the engine has no work left but {len(self._outputs.active)} requests "
                        "are unanswered; this is a bug in llmc"
                    )
                updates = engine.step()
                changed, aborts = self._outputs.apply(updates)
                for request_id in aborts:
                    engine.abort(request_id)
                num_tokens += sum(len(update.new_token_ids) for update in updates)
                num_done += sum(request.finished for request in changed)
                bar.update(num_done, num_tokens)
                check_interrupts()
            while engine.has_work:  # steps already submitted for finished requests
                engine.step()
                check_interrupts()

    def _refused(self, error: InvalidRequestError, prompt: Any) -> RequestOutput:
        return RequestOutput(
            request_id=str(next(self._ids)),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=[],
            outputs=[],
            finished=True,
            error=str(error),
        )

    def _abort(self, engine: Engine, request_id: str) -> None:
        for child in self._outputs.abort(request_id):
            engine.abort(child)

    def _abort_all(self, engine: Engine) -> None:
        with uninterrupted():
            for request_id in list(self._outputs.active):
                self._abort(engine, request_id)


def _params(given: Params, default: SamplingParams, count: int) -> Sequence[SamplingParams]:
    if given is not None and not isinstance(given, SamplingParams | list | tuple):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams or a list of them, got {given!r:.80}",
            param="sampling_params",
        )
    return for_each("sampling_params", default if given is None else given, count)
