"""The engine in this process as a chat backend."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llmc.cli.chat_backends import Chunk, Messages
from llmc.cli.conversation import SETTINGS, ShownToken
from llmc.outputs import CompletionOutput

if TYPE_CHECKING:
    from llmc.async_llm import AsyncLLM
    from llmc.frontend.inputs import Input


class EngineBackend:
    """Answers with an AsyncLLM, on its event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.model = llm.info.name
        info = llm.info
        self.context_limit: int | None = min(info.max_model_len, info.pool_tokens)
        self._llm = llm
        sampling = dataclasses.replace(llm.get_default_sampling_params(), max_tokens=None)
        self.defaults: Mapping[str, Any] = {
            name: getattr(sampling, name) for name in SETTINGS if name != "max_tokens"
        } | {"max_tokens": "as many as fit"}
        self.models: Sequence[str] = ()

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; without one it just continues the text."""
        tokenizer = self._llm.tokenizer
        return tokenizer is None or tokenizer.chat_template is not None

    async def _prepare(self, messages: Messages, settings: Mapping[str, Any]) -> Input:
        defaults = dataclasses.replace(self._llm.get_default_sampling_params(), max_tokens=None)
        sampling = dataclasses.replace(defaults, **settings)
        if self.has_template:
            return await self._llm.prepare.chat(messages, sampling)
        text = "\n".join(message["content"] for message in messages)
        return await self._llm.prepare.prompt(text, sampling)

    async def answer(
        self, messages: Messages, settings: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        source = await self._prepare(messages, settings)
        said = num_tokens = 0  # outputs hold the whole text so far
        async with aclosing(
            self._llm.generate(source.prompt_token_ids, source.sampling)
        ) as outputs:
            async for output in outputs:
                [completion] = output.outputs
                yield Chunk(
                    text=completion.text[said:],
                    prompt_tokens=len(output.prompt_token_ids),
                    cached_tokens=output.num_cached_tokens,
                    completion_tokens=len(completion.token_ids),
                    finish_reason=completion.finish_reason,
                    error=output.error,
                    tokens=self._tokens(completion)[num_tokens:],
                )
                num_tokens = len(completion.logprobs or ())
                said = len(completion.text)

    @staticmethod
    def _tokens(completion: CompletionOutput) -> list[ShownToken]:
        """The tokens so far, if log-probabilities were requested."""
        return [
            ShownToken(
                text=place[token].decoded_token or "",
                logprob=place[token].logprob,
                alternatives=[(one.decoded_token or "", one.logprob) for one in place.values()],
            )
            for token, place in zip(completion.token_ids, completion.logprobs or (), strict=False)
        ]

    async def close(self) -> None:
        await self._llm.shutdown()
