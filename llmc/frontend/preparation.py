"""Validates, renders and tokenizes requests of `AsyncLLM` before they are sent to the engine.

    prompt, messages --InputProcessor, in a worker thread if that takes long--> Input

Everything here runs on one event loop, which other requests' streams share.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from llmc.background_thread import Interruptible
from llmc.errors import InvalidRequestError
from llmc.frontend.inputs import Input, InputProcessor, Prompt
from llmc.frontend.pooling import Scoring
from llmc.frontend.turns import CALLER, Turns
from llmc.pooling import PoolingParams
from llmc.sampling_params import SamplingParams
from llmc.structured.trial import Trial
from llmc.text.chat import Document, Message, Tool, check_tools, reasoning_format
from llmc.text.infill import infill_prompt, need_infill_tokens
from llmc.text.reasoning import find_reasoning
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.tool_format import ToolFormat

if TYPE_CHECKING:
    from llmc.model_info import ModelInfo

T = TypeVar("T")

LONG_TEXT = 4000  # characters or ids above which text work leaves the event loop
RENDER_TIMEOUT_S = 5.0  # of CPU time
LEAST_WAIT_S = 0.01  # before it is read again


class Preparation:
    """Makes `Input`s from callers' requests. InvalidRequestError says what is wrong with one.

    `inputs` is replaced when the engine restarts, with its new information about the model.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None) -> None:
        self.inputs = InputProcessor(info, tokenizer)
        self._name = info.name
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llmc-text")
        self._trial = Trial.for_model(
            tokenizer, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
        )
        self._trial_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc-trial")
        self._trial_turns = Turns()

    async def end_trial(self) -> None:
        """End the process in which grammars are tried. The next grammar starts it again."""
        await asyncio.to_thread(self._trial.close)

    async def close(self) -> None:
        for workers in (self._workers, self._trial_worker):
            workers.shutdown(wait=False, cancel_futures=True)
        await self.end_trial()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        tokenizer = self.inputs.need_tokenizer("prompt")
        encode = functools.partial(tokenizer.encode, add_special_tokens=add_special_tokens)
        return await self._work(len(text), encode, text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, with its special tokens."""
        return await self._work(len(token_ids), self.inputs.decode, token_ids)

    async def joined(self, parts: Sequence[str | int]) -> Prompt:
        """A prompt of texts and token ids. The special tokens of a text come before the first part,
        if that is a text."""
        if len(parts) == 1 and isinstance(parts[0], str):
            return parts[0]
        token_ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                token_ids += await self.encode(part, add_special_tokens=index == 0)
            else:
                token_ids.append(part)
        return token_ids

    async def infill(
        self,
        before: Sequence[str],
        after: str,
        *,
        add_special_tokens: bool = True,
        extra: Sequence[tuple[str, str]] = (),
        beginning: str = "",
        num_reserved: int = 0,
    ) -> tuple[list[Prompt], frozenset[int]]:
        """Prompts for infilling between each of the texts and `after`, and the tokens that end an
        answer. InvalidRequestError if the model has no infilling tokens.

        `extra`: names and texts of other files; of these, as much as fits beside `num_reserved`
        tokens of output. `beginning`: how the answer begins.
        """
        tokenizer = self.inputs.need_tokenizer("suffix")
        marks = need_infill_tokens(tokenizer, self._name)
        make_one = functools.partial(
            infill_prompt,
            tokenizer,
            marks,
            add_special_tokens=add_special_tokens,
            extra=extra,
            beginning=beginning,
            most=max(1, self.inputs.model.max_model_len - max(1, num_reserved)),
        )

        def make() -> list[Prompt]:
            return [{"prompt": text, "prompt_token_ids": make_one(text, after)} for text in before]

        size = sum(map(len, before)) + len(after) + sum(len(text) for _, text in extra)
        return await self._work(size, make), marks.ends

    async def prompt(self, prompt: Prompt, sampling: SamplingParams) -> Input:
        """Validate and tokenize; long texts in a worker thread, so that others are not blocked."""
        source = await self._work(_size(prompt), self.inputs.process, prompt, sampling)
        await self._try_grammar(sampling)
        return source

    async def prompts(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Input]:
        """`prompt` for each; an error names its prompt by index."""

        sources = await self._each(prompts, lambda prompt: self.inputs.process(prompt, sampling))
        await self._try_grammar(sampling)
        return sources

    async def pooled(
        self, prompts: Sequence[Prompt], *, truncate: int | None = None
    ) -> list[Input]:
        """Validate and tokenize prompts for pooling; an error names its prompt by index."""
        return await self._each(
            prompts, lambda prompt: self.inputs.pooled(prompt, truncate=truncate)
        )

    async def scoring(
        self, left: Sequence[str], right: Sequence[str], params: PoolingParams
    ) -> Scoring:
        """Validate and tokenize texts for scoring."""
        size = sum(map(len, left)) + sum(map(len, right))
        return await self._work(size, Scoring, self.inputs, left, right, params)

    async def _try_grammar(self, sampling: SamplingParams) -> None:
        """Try a grammar unless it is known. One at a time, in a separate thread, because it can
        take long; callers take turns."""
        spec = sampling.structured_outputs
        if spec is None or self._trial.is_accepted(spec):
            return
        async with self._trial_turns.turn(CALLER.get()):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._trial_worker, self._trial.check, spec)

    async def _each(
        self, prompts: Sequence[Prompt], process: Callable[[Prompt], Input]
    ) -> list[Input]:
        """Process the prompts. If there are several, an error names its prompt by index."""

        def process_all() -> list[Input]:
            sources = []
            for index, prompt in enumerate(prompts):
                try:
                    sources.append(process(prompt))
                except InvalidRequestError as exc:
                    if exc.param == "prompt" and len(prompts) > 1:
                        exc.param = f"prompt[{index}]"
                    raise
            return sources

        return await self._work(sum(map(_size, prompts)), process_all)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        *,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Document] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        splits_reasoning: bool = False,
        max_reasoning_tokens: int | None = None,
    ) -> Input:
        """Render the chat template (within RENDER_TIMEOUT_S), validate and tokenize.

        With `splits_reasoning`, the input says how the answer marks its reasoning, if it can have
        any, and a grammar applies after it; `max_reasoning_tokens` then limits the reasoning.
        """
        self.inputs.need_generation()
        tokenizer = self.inputs.need_tokenizer("messages")

        def render() -> Prompt:
            return self.inputs.render(
                messages,
                tools=tools,
                documents=documents,
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

    async def tools(self, tools: Sequence[Tool]) -> ToolFormat:
        """How the model writes tool calls. InvalidRequestError if its template can't render these
        tools."""
        tokenizer = self.inputs.need_tokenizer("tools")
        return await self._within_time(functools.partial(check_tools, tokenizer, tools))

    async def _within_time(self, render: Callable[[], T]) -> T:
        """Render in a worker thread with a limit of its CPU time: a template is a program, which
        may be slow."""
        call = Interruptible(render)
        work = asyncio.get_running_loop().run_in_executor(self._workers, call)
        try:
            while not work.done() and (left_s := RENDER_TIMEOUT_S - call.seconds) > 0:
                await asyncio.wait({work}, timeout=max(left_s, LEAST_WAIT_S))
            if work.done():
                return work.result()
        finally:
            if not work.done():
                work.cancel()
                call.end()  # otherwise it would block the worker, and the process at its exit
        raise InvalidRequestError(
            f"the chat template took more than {RENDER_TIMEOUT_S:g} s on these messages",
            param="messages",
            code="chat_template_error",
        )

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
