"""Requests to a model that pools: each ends with its prompt and its own vector, or its tokens'."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from scripted_runner import ScriptedRunner

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import NewRow, StepPlan, StepResult
from llmc.sampling_params import SamplingParams

CONTEXT = 40
NAN_TOKEN, POISON = 98, 99


class VectorRunner(ScriptedRunner):
    """The vector of a request is the sum and the number of its tokens, that of a token inside of
    one the token and its place."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(self._finite, max_in_flight=max_in_flight)

    def _finite(self, new: NewRow, tokens: Sequence[int]) -> int | None:
        seen = tokens if new.sampling.prompt_logprobs is None else tokens[-1:]
        return None if NAN_TOKEN in seen else 0

    def execute(self, plan: StepPlan) -> StepResult:
        rows = {new.row: new for new in plan.new_rows}
        known = {row: new for row, (new, _) in self._rows.items()} | rows
        if any(POISON in known[work.row].token_ids for work in plan.work):
            raise RuntimeError("poison")
        result = super().execute(plan)
        prompts = [known[work.row].token_ids for work in plan.work if work.sample]
        vectors = [struct.pack("2f", sum(tokens), len(tokens)) for tokens in prompts]
        scores = [
            None if token == NAN_TOKEN else struct.pack("2f", token, place)
            for work in plan.work
            for place in range(work.start, work.start + work.num_scored)
            for token in [known[work.row].token_ids[place]]
        ]
        return StepResult(token_ids=result.token_ids, vectors=vectors, scores=scores)


def engine(
    *, max_in_flight: int, step_tokens: int, num_blocks: int = 64, scored: int = 256
) -> EngineCore:
    return EngineCore(
        VectorRunner(max_in_flight),
        EngineLimits(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=step_tokens,
            max_model_len=CONTEXT,
            vocab_size=100,
            max_num_scored_tokens=scored,
        ),
        EngineFeatures(eos_token_ids=(0, 1)),
    )


def run(
    core: EngineCore, prompts: Sequence[Sequence[int]], *, of_tokens: bool = False
) -> dict[str, RequestUpdate]:
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0 if of_tokens else None,
    )
    for i, prompt in enumerate(prompts):
        core.add(AddRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    found = {}
    while core.has_work:
        for update in core.step():
            assert update.finish_reason is not None and update.request_id not in found
            assert not update.new_token_ids
            found[update.request_id] = update
    core.check()
    return found


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("step_tokens", [3, 16, 512])
def test_each_gets_its_own_also_at_the_end_of_the_context(
    max_in_flight: int, step_tokens: int
) -> None:
    rng = random.Random(step_tokens)
    prompts = [[rng.randrange(1, 90) for _ in range(n)] for n in (1, 4, CONTEXT, 7, 5, 17, 8, 1)]
    prompts += prompts[:3]  # which the prefix cache knows
    core = engine(max_in_flight=max_in_flight, step_tokens=step_tokens)
    found = run(core, prompts)
    for i, prompt in enumerate(prompts):
        assert struct.unpack("2f", found[str(i)].vector) == (sum(prompt), len(prompt))
    assert core.stats().num_generated_tokens == 0


def test_a_request_that_fails_takes_no_other_with_it() -> None:
    prompts = [[5, 6], [7, NAN_TOKEN], [8], [POISON, 3], [9, 9, 9]]
    found = run(engine(max_in_flight=2, step_tokens=64), prompts)
    assert "not finite" in (found["1"].error or "") and "poison" in (found["3"].error or "")
    for i in (0, 2, 4):
        assert struct.unpack("2f", found[str(i)].vector)[0] == sum(prompts[i])


def test_requests_wait_for_blocks_when_there_are_few() -> None:
    prompts = [[i + 1] * 30 for i in range(6)]
    found = run(engine(max_in_flight=1, step_tokens=16, num_blocks=11), prompts)
    assert [struct.unpack("2f", found[str(i)].vector)[0] for i in range(6)] == [
        30 * (i + 1) for i in range(6)
    ]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("step_tokens", "scored", "num_blocks"), [(3, 256, 64), (16, 5, 64), (512, 512, 64), (7, 7, 11)]
)
def test_all_tokens_have_one_also_those_that_the_prefix_cache_knows(
    max_in_flight: int, step_tokens: int, scored: int, num_blocks: int
) -> None:
    rng = random.Random(step_tokens)
    prompts = [[rng.randrange(1, 90) for _ in range(n)] for n in (1, 4, CONTEXT, 7, 5, 17, 8, 2)]
    core = engine(
        max_in_flight=max_in_flight, step_tokens=step_tokens, num_blocks=num_blocks, scored=scored
    )
    run(core, prompts)
    for _ in range(2):
        found = run(core, prompts, of_tokens=True)
        for i, prompt in enumerate(prompts):
            pairs = list(struct.iter_unpack("2f", found[str(i)].vector))
            want = [(token, place) for place, token in enumerate(prompt)]
            assert pairs == [*want[:-1], (sum(prompt), len(prompt))]
            assert not found[str(i)].prompt_logprobs


def test_a_token_whose_vector_is_not_finite_ends_its_request_alone() -> None:
    prompts = [[5, 6, 7], [7, NAN_TOKEN, 3, 2, 1, 4], [8, 9], [*range(1, 30), NAN_TOKEN]]
    for step_tokens in (2, 64):
        found = run(engine(max_in_flight=2, step_tokens=step_tokens), prompts, of_tokens=True)
        assert all("not finite" in (found[i].error or "") for i in ("1", "3"))
        assert len(found["0"].vector) == 3 * 8 and len(found["2"].vector) == 2 * 8
