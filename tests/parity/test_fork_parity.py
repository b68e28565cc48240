"""Sequences that share a prompt's blocks say what transformers says, on a real cache."""

from __future__ import annotations

from typing import Any

from tiny_engine import differences, finish

from llmc.engine.messages import AddRequest
from llmc.sampling_params import SamplingParams


def test_forks_equal_the_reference(subject: Any) -> None:
    """Greedy forks of one prompt all repeat its reference; without a prefix cache to help."""
    engine = subject.running.engine(enable_prefix_caching=False)
    for index, reference in enumerate(subject.expected):
        sampling = SamplingParams(
            temperature=0.0, logprobs=0, max_tokens=len(reference.tokens), ignore_eos=True
        )
        for name, fork_of in ((f"{index}", None), (f"{index}-fork", f"{index}")):
            engine.add(
                AddRequest(
                    request_id=name,
                    prompt_token_ids=list(reference.prompt),
                    sampling=sampling,
                    fork_of=fork_of,
                )
            )
    got = finish(engine)
    for suffix in ("", "-fork"):
        mine = [got[f"{index}{suffix}"] for index in range(len(subject.expected))]
        _, wrong = differences(subject.expected, mine)
        assert not wrong, f"{subject.family}{suffix}: " + "; ".join(wrong)
