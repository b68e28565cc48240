"""The engine of this process as a chat backend."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llmc.cli.chat_backends import Chunk, Messages

if TYPE_CHECKING:
    from llmc.async_llm import AsyncLLM
    from llmc.frontend.inputs import Input


class EngineBackend:
    """Answers with an AsyncLLM, in its event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.model = llm.info.name
        info = llm.info
        self.context_limit: int | None = min(info.max_model_len, info.pool_tokens)
        self._llm = llm

    @property
    def has_template(self) -> bool:
        """Without a chat template the model just continues the text of the conversation."""
        tokenizer = self._llm.tokenizer
        return tokenizer is None or tokenizer.chat_template is not None

    async def _prepare(self, messages: Messages, settings: Mapping[str, Any]) -> Input:
        defaults = dataclasses.replace(self._llm.get_default_sampling_params(), max_tokens=None)
        sampling = dataclasses.replace(defaults, **settings)
        if self.has_template:
            return await self._llm.prepare_chat(messages, sampling)
        text = "\n".join(message["content"] for message in messages)
        return await self._llm.prepare(text, sampling)

    async def answer(
        self, messages: Messages, settings: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        source = await self._prepare(messages, settings)
        said = 0  # outputs hold the whole text so far
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
                )
                said = len(completion.text)

    async def close(self) -> None:
        await self._llm.shutdown()
