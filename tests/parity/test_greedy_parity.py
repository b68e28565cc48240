"""Greedy tokens equal transformers' `generate`, however the scheduler cuts the work into steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiny_engine import Generated, differences, generate
from tiny_models import Continuation


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Limits of the engine that decide how the same requests are cut into steps."""

    max_num_batched_tokens: int = 256
    max_num_seqs: int = 8
    is_tight: bool = False  # room for one request and a little more
    enable_prefix_caching: bool = True

    def options(self, longest: int) -> dict[str, Any]:
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "tight_for": longest if self.is_tight else None,
            "enable_prefix_caching": self.enable_prefix_caching,
        }


WHOLE = Scenario()
TINY_CHUNKS = Scenario(max_num_batched_tokens=5)
FEW_ROWS = Scenario(max_num_seqs=2, max_num_batched_tokens=16)
FEW_BLOCKS = Scenario(is_tight=True, max_num_batched_tokens=9)
NO_PREFIX_CACHE = Scenario(is_tight=True, max_num_batched_tokens=16, enable_prefix_caching=False)


def check(subject: Any, scenario: Scenario) -> Any:
    """Run the scenario and compare; gives the engine's counters."""
    longest = max(len(r.prompt) + len(r.tokens) for r in subject.expected)
    engine = subject.running.engine(**scenario.options(longest))
    got = generate(engine, [r.prompt for r in subject.expected], len(subject.expected[0].tokens))
    skipped, wrong = differences(subject.expected, got)
    assert not wrong, f"{subject.family}: " + "; ".join(wrong)
    total = sum(len(r.tokens) for r in subject.expected)
    assert skipped <= total // 20, f"{skipped} of {total} positions were skipped as ties"
    return engine.stats()


def keeps_growing(subject: Any) -> bool:
    """Where all layers see a window, whoever was let in needs no more blocks later."""
    layout = subject.running.started.engine.scheduler.layout
    return any(window.is_whole for window in layout.windows)


def test_whole_prompts_in_one_batch(subject: Any) -> None:
    stats = check(subject, WHOLE)
    assert stats.num_preemptions == 0
    # All prompts fit in the first step, so the rest of the steps are decodes of the whole batch.
    assert stats.num_steps == len(subject.expected[0].tokens)


def test_prefill_in_tiny_chunks(subject: Any) -> None:
    stats = check(subject, TINY_CHUNKS)
    num_prompt_tokens = sum(len(r.prompt) for r in subject.expected)
    assert stats.num_steps >= num_prompt_tokens / TINY_CHUNKS.max_num_batched_tokens


def test_more_requests_than_rows(subject: Any) -> None:
    check(subject, FEW_ROWS)
    assert len(subject.expected) > FEW_ROWS.max_num_seqs


def test_preemption_and_prefix_cache(subject: Any) -> None:
    assert (check(subject, FEW_BLOCKS).num_preemptions > 0) == keeps_growing(subject)


def test_preemption_without_prefix_cache(subject: Any) -> None:
    stats = check(subject, NO_PREFIX_CACHE)
    assert (stats.num_preemptions > 0) == keeps_growing(subject)
    assert stats.prefix_cache_hits == 0


def test_the_comparison_sees_a_wrong_token() -> None:
    """A comparison that can't fail would prove nothing."""
    reference = Continuation(
        prompt=(1, 2), tokens=(5, 6, 7), logprobs=(-1.0, -1.0, -1.0), margins=(0.5, 5e-5, 0.5)
    )
    fine = Generated(tokens=[5, 6, 7], logprobs=[-1.0, -1.0, -1.0])
    assert differences([reference], [fine]) == (0, [])
    tie = Generated(tokens=[5, 9, 9], logprobs=[-1.0, -1.0, -1.0])
    assert differences([reference], [tie]) == (2, [])
    wrong = Generated(tokens=[4, 6, 7], logprobs=[-1.0, -1.0, -1.0])
    assert differences([reference], [wrong])[1] == ["prompt of 2, token 0: 4, transformers 5"]
    off = Generated(tokens=[5, 6, 7], logprobs=[-1.0, -1.1, -1.0])
    assert len(differences([reference], [off])[1]) == 1
