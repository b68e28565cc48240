"""Your own logits processor: a request raises the logits of up to 8 tokens by `boost`.

python examples/logits_processor.py [MODEL]
llmc serve --logits-processor examples/logits_processor.py:Boost
"""

import sys

import torch

from llmc import LLM, LogitsProcessor, RowTable, SamplingParams


class Boost(LogitsProcessor):
    arguments = ("boost_tokens", "boost")

    def tables(self, vocab_size):
        return {"tokens": RowTable(shape=(8,), dtype=torch.int64), "amount": RowTable(shape=(8,))}

    def begin(self, args, prompt_token_ids, vocab_size):
        tokens = torch.tensor(args["boost_tokens"])
        if len(tokens) > 8 or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"boost_tokens must be 1 to 8 token ids below {vocab_size}")
        padding = [0] * (8 - len(tokens))
        amount = [float(args.get("boost", 5.0))] * len(tokens)
        return {"tokens": [*tokens.tolist(), *padding], "amount": [*amount, *padding]}

    def apply(self, logits, batch):
        return logits.scatter_add(1, batch.state["tokens"], batch.state["amount"])


def main(model: str | None = None) -> None:
    with LLM(model, opt_level=0, logits_processors=[Boost]) as llm:
        sampling = SamplingParams(max_tokens=3, extra_args={"boost_tokens": [7], "boost": 1e4})
        [output] = llm.generate("The capital of France is", sampling)
        print(output.outputs[0].token_ids)  # [7, 7, 7]


if __name__ == "__main__":
    main(*sys.argv[1:])
