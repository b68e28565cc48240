"""Which token a sample's log-probability is of: the drawn one, or the next one of the prompt."""

from __future__ import annotations

import torch

from llmc.runner.logprobs import chosen_tokens


def test_prompt_tokens_are_read_at_their_places_and_padding_stays_within_the_step() -> None:
    history = torch.arange(12).view(2, 6) + 100
    inputs = {
        # two requests of 3 and 1 tokens, the ends of 5 and 4, and two samples of padding
        "query_start": torch.tensor([0, 3, 4], dtype=torch.int32),
        "context_len": torch.tensor([5, 4], dtype=torch.int32),
        "logits_index": torch.tensor([0, 1, 3, 4, 7], dtype=torch.int32),
        "row": torch.tensor([0, 0, 1, 1, 0]),
        "length": torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32),  # 0: only scored
    }
    drawn = torch.tensor([1, 2, 3, 4, 5])
    # positions 2 and 3 of the first request are followed by its tokens 3 and 4
    want = [103, 104, 3, 4, 5]
    assert chosen_tokens(drawn, inputs, {"history": history}).tolist() == want
