"""A logits processor of a user: a request raises the logits of up to 8 tokens by `boost`.

llmc serve --logits-processor examples/logits_processor.py:Boost
"""

import torch

from llmc import LogitsProcessor, RowTable


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
