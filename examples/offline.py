"""Offline inference: a list of prompts, then a chat.

python examples/offline.py [MODEL]
"""

import sys

from llmc import LLM, SamplingParams


def main(model: str | None = None) -> None:
    with LLM(model, opt_level=0) as llm:
        prompts = ["The capital of France is", "Once upon a time", "def add(a, b):"]
        sampling = SamplingParams(temperature=0.0, max_tokens=16)
        for output in llm.generate(prompts, sampling):
            print(repr(output.prompt), "->", repr(output.outputs[0].text))

        [answer] = llm.chat([{"role": "user", "content": "Name three colors."}], sampling)
        print(answer.outputs[0].text, f"({answer.outputs[0].finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
