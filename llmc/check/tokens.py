"""The input of both sides: a few token sequences, and the steps in which an engine computes them.

Both get the same tokens, so a rounding difference never leads to a different text. The steps cover
what happens in serving: several packed requests, prompts in chunks, decodes next to prefills, and a
request that is preempted during decode and recomputed from its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TEXTS = (
    "A",
    "The quick brown fox jumps over the lazy dog while seven wizards count the stars.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n# 3.14 is near pi, 2.72 near e, and 42 answers all.\n",
    "In the beginning the engineers drew a graph. They wrote on every edge what flowed along it, "
    "and on every node what was done to it. Then they looked for nodes that could become one, and "
    "found many. The graph grew small, the machine grew fast, and nobody could say whether "
    "it still computed the same thing. So they kept the first drawing, and compared. ",
)
_DECODES = 6
_PROMPTS = (1, 13, 37, 64)
MAX_ADAPTERS = len(_PROMPTS) - 1  # in addition to the model without adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """`token_ids` start with a prompt of `prompt_len`; the rest are decoded one by one.
    `adapter`: the number of the sequence's LoRA adapter, from 1; 0 means none."""

    token_ids: tuple[int, ...]
    prompt_len: int
    adapter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, computed in one step."""

    sequence: int
    start: int
    count: int


def make_sequences(
    encode: Callable[[str], Sequence[int]] | None,
    *,
    vocab_size: int,
    max_len: int,
    longest: int | None = None,
    num_adapters: int = 0,
) -> tuple[TokenSequence, ...]:
    """Texts in the model's own tokens, or ids by a fixed rule if it has no tokenizer.

    `longest` is the length of the longest prompt. Sequences cycle through no adapter and each one.
    """
    made = []
    for i, (text, length) in enumerate(zip(_TEXTS, _PROMPTS, strict=True)):
        wanted = longest if longest is not None and i == len(_TEXTS) - 1 else length
        total = max(2, min(wanted + _DECODES, max_len))
        ids = [t % vocab_size for t in encode(text)] if encode is not None else []
        if not ids:
            ids = [(11 * i + 7 * j + i * j * 3 + 1) % vocab_size for j in range(total)]
        ids = (ids * (total // len(ids) + 1))[:total]
        prompt_len = max(1, total - _DECODES)
        made.append(
            TokenSequence(
                token_ids=tuple(ids), prompt_len=prompt_len, adapter=i % (num_adapters + 1)
            )
        )
    return tuple(made)


def make_steps(sequences: Sequence[TokenSequence]) -> list[list[Chunk]]:
    """All sequences at once: prompts in thirds of the longest, then one token per step.

    The longest is preempted once, when half of its decoded tokens are done.
    """
    longest = max(range(len(sequences)), key=lambda i: len(sequences[i].token_ids))
    kept = sequences[longest]
    preempted_at = kept.prompt_len + (len(kept.token_ids) - kept.prompt_len) // 2
    recomputed = [0] * len(sequences)  # tokens known from the start after a preemption
    chunk = -(-max(s.prompt_len for s in sequences) // 3)
    done = [0] * len(sequences)
    steps: list[list[Chunk]] = []
    while any(d < len(s.token_ids) for d, s in zip(done, sequences, strict=True)):
        step = []
        for i, sequence in enumerate(sequences):
            if i == longest and not recomputed[i] and done[i] == preempted_at:
                done[i], recomputed[i] = 0, preempted_at
            left = max(sequence.prompt_len, recomputed[i]) - done[i]
            count = min(chunk, left) if left > 0 else 1
            if done[i] < len(sequence.token_ids):
                step.append(Chunk(sequence=i, start=done[i], count=count))
                done[i] += count
        steps.append(step)
    return steps
