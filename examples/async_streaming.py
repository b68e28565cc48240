"""Several concurrent requests from asyncio, each streamed token by token.

python examples/async_streaming.py [MODEL]
"""

import asyncio
import sys

from llmc import AsyncLLM, SamplingParams


async def stream(llm: AsyncLLM, prompt: str) -> None:
    num_shown = 0
    async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16)):
        text = output.outputs[0].text
        if len(text) > num_shown:
            print(f"{prompt!r}: {text[num_shown:]!r}")
            num_shown = len(text)


async def run(model: str | None) -> None:
    llm = AsyncLLM(model, opt_level=0)
    try:
        await asyncio.gather(stream(llm, "The capital of France is"), stream(llm, "Once upon"))
    finally:
        await llm.shutdown()


def main(model: str | None = None) -> None:
    asyncio.run(run(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
