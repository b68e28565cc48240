"""Random prompts for a server that has its own tokenizer.

Token ids are exact: they are drawn from a tokenizer's vocabulary, or from ids that the server's
/tokenize returned. If only text works (chat, or a server without /tokenize), prompts are random
words, and their real length is the usage that the server reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmc.load_test.client import Target
from llmc.load_test.serving import fetch_token_ids
from llmc.load_test.workloads import BenchRequest, random_lengths, random_workload

if TYPE_CHECKING:
    from llmc.text.tokenizer import Tokenizer

_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had
by word but not what all were we when your can said there use an each which she do how their if
will up other about out many then them these so some her would make like him into time has look
two more write go see number no way could people my than first water been call who oil its now
find long down day did get come made may part sound year work back name good sentence man think
say great where help through much before line right too mean old any same tell boy follow came
want show also around form three small set put end does another well large must big even such
because turn here why ask went men read need land different home us move try kind hand picture
again change off play spell air away animal house point page letter mother answer found study
still learn should world high every near add food between own below country plant last school
"""
WORDS = tuple(_TEXT.split())


async def random_prompts(
    target: Target,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    seed: int,
    tokenizer: Tokenizer | None,
) -> list[BenchRequest]:
    """Prompts of the requested lengths, as exact as this server allows."""
    sample = None
    if tokenizer is None:
        sample = await fetch_token_ids(target, " ".join(WORDS))
        known = sorted(set(sample or ()))
    else:
        known = [t for t in range(tokenizer.size) if t not in tokenizer.special_ids]
    if known and (target.backend == "openai" or tokenizer is not None):
        requests = random_workload(
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            token_ids=known,
            range_ratio=range_ratio,
            prefix_len=prefix_len,
            seed=seed,
        )
        if target.backend == "openai":
            return requests
        assert tokenizer is not None, "checked above"
        return [
            BenchRequest(text=tokenizer.decode(r.token_ids or ()), output_len=r.output_len)
            for r in requests
        ]
    tokens_per_word = len(sample) / len(WORDS) if sample else 1.0
    return random_texts(
        num_prompts=num_prompts,
        input_len=prefix_len + input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        seed=seed,
        tokens_per_word=tokens_per_word,
    )


def random_texts(
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    seed: int = 0,
    tokens_per_word: float = 1.0,
) -> list[BenchRequest]:
    """Prompts of random words, about `input_len` tokens each."""
    rng = np.random.default_rng(seed)
    inputs = random_lengths(input_len, range_ratio, num_prompts, rng)
    outputs = random_lengths(output_len, range_ratio, num_prompts, rng)
    return [
        BenchRequest(
            text=" ".join(rng.choice(WORDS, size=max(1, round(num_in / tokens_per_word)))),
            output_len=num_out,
        )
        for num_in, num_out in zip(inputs, outputs, strict=True)
    ]
