"""Answers that go on from a snapshot of recurrent states are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_engine
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_models import VOCAB, continue_greedily, load_reference, prompts

from llmc.engine.core import EngineCore
from llmc.engine.kv.snapshots import LEAST_BLOCKS, StateSnapshots
from llmc.engine.messages import AddRequest
from llmc.sampling_params import SamplingParams

# Dynamo makes an instance of an autograd function that a model defines
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

KINDS = {
    "qwen3_next": "gated delta rule and convolution beside attention",
    "bamba": "Mamba-2 beside attention",
    "lfm2": "short convolutions beside attention",
    "recurrent_gemma": "linear recurrence beside a window",
    "mamba2": "Mamba-2 alone",
    "deepseek_v4": "windows of tokens that become entries of the paged cache",
    "inkling2_text": "convolutions with weights of the token, a bias for each distance",
}
SIZE = tiny_engine.BLOCK_SIZE
LEAST = LEAST_BLOCKS * SIZE  # 32
NUM_TOKENS = 10
SYSTEM = prompts((0, 0, 0, 0, 53))[4]  # 13 blocks and a token
Prompt = tuple[int, ...]


class Subject:
    """A model in transformers and here."""

    def __init__(self, path: Path) -> None:
        self.model = load_reference(path)
        self.running = tiny_engine.start(path, max_model_len=160)
        self._expected: dict[tuple[Prompt, int], Any] = {}

    def expected(self, prompt: Prompt, num_tokens: int = NUM_TOKENS) -> Any:
        key = prompt, num_tokens
        if key not in self._expected:
            self._expected[key] = continue_greedily(self.model, prompt, num_tokens)
        return self._expected[key]

    def wrong(self, engine: EngineCore, asked: Sequence[Prompt], **sampling: Any) -> list[str]:
        """What differs from transformers when these are asked in one batch."""
        expected = [self.expected(prompt) for prompt in asked]
        got = tiny_engine.generate(engine, asked, NUM_TOKENS, **sampling)
        skipped, wrong = tiny_engine.differences(expected, got)
        assert skipped <= NUM_TOKENS // 2
        return wrong

    def hits(self, engine: EngineCore, prompt: Prompt) -> int:
        """Tokens that a right answer to this prompt found in the prefix cache."""
        before = engine.stats().prefix_cache_hits
        assert not self.wrong(engine, [prompt])
        return engine.stats().prefix_cache_hits - before


PARAMS = tiered(KINDS, "bamba", "lfm2", group="states {}")


@pytest.fixture(scope="module", params=PARAMS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    subject = Subject(save_random(tiny_config(request.param), tmp_path_factory.mktemp("model")))
    assert subject.running.started.info.num_snapshots == 8 * tiny_engine.MAX_ROWS
    return subject


def question(number: int, length: int = 6) -> Prompt:
    return tuple((number * 11 + i * 5) % (VOCAB - 6) + 1 for i in range(length))


def test_a_common_system_prompt_is_found_from_the_third_question_on(subject: Subject) -> None:
    """The second finds its blocks without a state, and keeps it where they end."""
    engine = subject.running.engine()
    hits = [subject.hits(engine, SYSTEM + question(number)) for number in range(1, 5)]
    assert hits == [0, 0, 52, 52]


def test_the_next_turn_of_a_chat_goes_on_from_the_answer(subject: Subject) -> None:
    engine = subject.running.engine()
    chat, hits = SYSTEM, []
    for number in range(3):
        chat += question(number)
        hits.append(subject.hits(engine, chat))
        chat += tuple(subject.expected(chat).tokens)
    # 59 tokens and 10 drawn, of which the last is not computed: 17 whole blocks
    assert hits == [0, 68, 84]


def test_the_same_prompt_again_computes_its_end_alone(subject: Subject) -> None:
    engine = subject.running.engine()
    for number, (length, found) in enumerate(((LEAST, 0), (LEAST + 1, LEAST), (48, 44), (53, 52))):
        prompt = question(number, length)
        assert [subject.hits(engine, prompt) for _ in range(2)] == [0, found]


def test_pieces_of_a_long_prompt_leave_states_as_their_distance_doubles(subject: Subject) -> None:
    engine = subject.running.engine(max_num_batched_tokens=19)
    long = question(1, 120)
    assert subject.hits(engine, long) == 0
    # steps that end in blocks 4, 9, 13, 18, 22, 27: states are kept after 9 and 18, and at the end
    lengths = (60, 100, 118)
    assert [subject.hits(engine, long[:n] + question(2)) for n in lengths] == [36, 72, 116]


def test_batches_forks_and_preemption_with_few_snapshots(subject: Subject) -> None:
    """Snapshots change hands, rows too, and a preempted request goes on from one."""
    asked = [SYSTEM[:length] + question(i) for i, length in enumerate((53, 53, 40, 53, 48, 36))]
    for options in (
        {"num_snapshots": 2},
        {"num_snapshots": 3, "max_num_batched_tokens": 21, "max_num_seqs": 3},
        {"tight_for": 53 + 6 + NUM_TOKENS, "max_num_batched_tokens": 40},
    ):
        engine = subject.running.engine(**options)
        for _ in range(3):
            assert not subject.wrong(engine, asked), options
        assert engine.stats().prefix_cache_hits > 0
        is_tight = "tight_for" in options and engine.scheduler.layout.is_whole
        assert (engine.stats().num_preemptions > 0) == is_tight
    greedy = SamplingParams(temperature=0.0, logprobs=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    first = AddRequest(request_id="0", prompt_token_ids=list(asked[0]), sampling=greedy)
    engine = subject.running.engine()
    for number in range(4):
        fork_of = "0" if number else None
        engine.add(
            AddRequest(
                request_id=str(number),
                prompt_token_ids=first.prompt_token_ids,
                sampling=greedy,
                fork_of=fork_of,
            )
        )
    got = tiny_engine.finish(engine)
    expected = [subject.expected(asked[0])] * 4
    assert not tiny_engine.differences(expected, [got[str(n)] for n in range(4)])[1]


def test_an_evicted_state_is_computed_again(subject: Subject) -> None:
    engine = subject.running.engine(num_snapshots=1)
    one, other = SYSTEM, prompts((0, 53))[1]
    assert [subject.hits(engine, p) for p in (one, one, other, one, one)] == [0, 52, 0, 0, 52]
    engine.scheduler.pool.reset_prefix_cache()
    assert subject.hits(engine, one) == 0


def test_a_wrong_snapshot_is_seen(subject: Subject) -> None:
    """What a hit reads is the snapshot: with that of another prefix, answers are others."""
    engine = subject.running.engine()
    one, other = SYSTEM, prompts((0, 53))[1]
    assert not subject.wrong(engine, [one, other])
    pair = list(engine.scheduler.pool.snapshots._snapshot_of.values())
    use = StateSnapshots.use
    with mock.patch.object(
        StateSnapshots, "use", lambda self, digest: pair[1 - pair.index(use(self, digest))]
    ):
        assert subject.wrong(engine, [one])
    assert not subject.wrong(engine, [one])
