"""Adapters and their slots: who waits, who gives way, and what happens when reading one fails."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import pytest
from fake_adapters import Loader
from pending import DoneStep

from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import EagerReason, StepPlan, StepResult
from llmc.errors import InvalidRequestError
from llmc.lora_request import LoRARequest
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams

A, B, C = (LoRARequest(name, i + 1, f"/{name}") for i, name in enumerate("abc"))


class Runner:
    """Keeps what is in each slot, and checks that a row's adapter is in its slot in each step."""

    max_in_flight = 2
    num_runtime_compiles = 0
    eager_steps: Mapping[EagerReason, int] = MappingProxyType({})

    def __init__(self, adapters: dict[str, LoRARequest | None]) -> None:
        self.adapters = adapters  # by request
        self.slots: dict[int, LoRARequest] = {}
        self.rows: dict[int, tuple[str, int]] = {}
        self.order: list[str] = []  # requests as they are given rows
        self.errors: list[Exception] = []

    def use_idle_time(self, *, has_work: bool = False) -> bool:
        return False

    def submit(self, plan: StepPlan) -> DoneStep:
        if self.errors:
            return DoneStep(self.errors.pop())
        self.slots |= {copy.slot: copy.adapter for copy in plan.adapter_copies}
        for new in plan.new_rows:
            self.rows[new.row] = (new.request_id, new.adapter_slot)
            self.order.append(new.request_id)
        for work in plan.work:
            request, slot = self.rows[work.row]
            assert self.slots.get(slot) == self.adapters[request]
        return DoneStep(StepResult(token_ids=[5] * sum(work.sample for work in plan.work)))


class EndlessGrammars:
    """Never starts to compile, so that a request that ends meanwhile cancels it."""

    def begin(self, spec: StructuredOutputsParams) -> Future[Any]:
        return Future()


def engine(runner: Runner, loader: Loader | None, grammars: Any = None) -> EngineCore:
    return EngineCore(
        runner,
        EngineLimits(
            num_blocks=32,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=32,
            vocab_size=10,
        ),
        EngineFeatures(adapters=loader, grammars=grammars),
    )


def message(name: str, adapter: LoRARequest | None, tokens: int = 4) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3, 4, 5],
        sampling=SamplingParams(max_tokens=tokens),
        adapter=adapter,
    )


def run(core: EngineCore) -> dict[str, str | None]:
    """The errors of all requests."""
    ended: dict[str, str | None] = {}
    while core.has_work:
        for update in core.step():
            if update.finish_reason is not None:
                ended[update.request_id] = update.error
        core.check()
    return ended


def test_requests_wait_for_a_slot_and_the_oldest_is_reused() -> None:
    adapters = {"a": A, "b": B, "none": None, "c": C, "a2": A, "c2": C}
    runner, loader = Runner(adapters), Loader(2)
    core = engine(runner, loader)
    for name, adapter in adapters.items():
        core.add(message(name, adapter, tokens=9 if name == "b" else 4))
    assert run(core) == dict.fromkeys(adapters)
    # c finds no slot, and a2 does not go before it
    assert runner.order == ["a", "b", "none", "c", "a2", "c2"]
    assert loader.begun == [(A, None), (B, None), (C, A), (A, B)]


def test_what_has_an_adapter_of_another_shares_no_prefix() -> None:
    adapters = {"a": A, "b": B, "none": None}
    core = engine(Runner(adapters), Loader(2))
    for _ in range(2):
        for name, adapter in adapters.items():
            core.add(message(name, adapter))
            assert run(core) == {name: None}
    assert core.stats().prefix_cache_hits == 3 * 4  # each found its own block
    with pytest.raises(InvalidRequestError, match="another prompt, adapter or cache salt"):
        core.add(message("a", A))
        core.add(AddRequest(**{**vars_of(message("b", B)), "fork_of": "a"}))


def vars_of(message: AddRequest) -> dict[str, Any]:
    return {name: getattr(message, name) for name in AddRequest.__dataclass_fields__}


def test_steps_go_on_while_an_adapter_is_read() -> None:
    adapters = {"a": A, "none": None, "later": A}
    runner, loader = Runner(adapters), Loader(1, at_once=False)
    core = engine(runner, loader)
    for name, adapter in adapters.items():
        core.add(message(name, adapter))
    while "none" in core.scheduler.requests:
        core.step()
    assert runner.order == ["none"]
    assert core.step() == []  # waits a moment, and is not stuck
    loader.loading[A].set_result(None)
    assert run(core) == {"a": None, "later": None}


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone() -> None:
    adapters = {"a": A, "b": B, "a2": A}
    runner, loader = Runner(adapters), Loader(1, at_once=False)
    core = engine(runner, loader)
    for name, adapter in adapters.items():
        core.add(message(name, adapter))
    core.step()
    loader.loading[A].set_exception(InvalidRequestError("not finite"))
    loader.at_once = True
    assert run(core) == {"a": "not finite", "a2": "not finite", "b": None}
    core.add(message("a", A))  # tried again
    assert run(core) == {"a": None}


def test_an_adapter_that_cannot_begin_to_be_read_ends_its_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, loader = Runner({"a": A, "b": B}), Loader(2)
    core = engine(runner, loader)
    begin = loader.begin

    def without_threads(adapter: LoRARequest, instead_of: LoRARequest | None) -> Future[Any]:
        if adapter == A:
            raise RuntimeError("can't start new thread")
        return begin(adapter, instead_of)

    monkeypatch.setattr(loader, "begin", without_threads)
    core.add(message("a", A))
    core.add(message("b", B))
    assert run(core) == {"a": "can't start new thread", "b": None}
    monkeypatch.undo()
    core.add(message("a", A))
    assert run(core) == {"a": None}


def test_an_adapter_that_cannot_be_read_ends_requests_whose_grammar_is_compiling() -> None:
    runner, loader = Runner({"a": A, "b": B}), Loader(1, at_once=False)
    core = engine(runner, loader, EndlessGrammars())
    spec = StructuredOutputsParams(regex="[0-9]")
    constrained = SamplingParams(max_tokens=4, structured_outputs=spec)
    core.add(AddRequest(**{**vars_of(message("json", A)), "sampling": constrained}))
    core.add(message("a", A))
    core.step()
    loader.loading[A].set_exception(InvalidRequestError("not finite"))
    assert run(core) == {"a": "not finite", "json": "not finite"}
    loader.at_once = True
    core.add(message("b", B))  # the engine is alive
    assert run(core) == {"b": None}


def test_an_abandoned_load_gives_its_slot_back() -> None:
    adapters = {"a": A, "b": B}
    loader = Loader(1, at_once=False)
    core = engine(Runner(adapters), loader)
    core.add(message("a", A))
    core.step()
    core.abort("a")
    core.add(message("b", B))
    core.step()
    loader.loading[A].set_result(None)
    loader.at_once = True
    assert run(core) == {"b": None}
    assert loader.begun == [(A, None), (B, A)]


def test_a_failed_step_fills_its_slots_again() -> None:
    adapters = {"a": A, "b": B, "none": None}
    runner = Runner(adapters)
    runner.errors = [RuntimeError("twice"), RuntimeError("once")]
    core = engine(runner, Loader(2))
    for name, adapter in adapters.items():
        core.add(message(name, adapter))
    assert run(core) == dict.fromkeys(adapters)


def test_adapters_are_checked_on_the_way_in() -> None:
    core = engine(Runner({}), Loader(1))
    with pytest.raises(InvalidRequestError, match="no such adapter"):
        core.add(message("x", LoRARequest("refused", 9, "/x")))
    with pytest.raises(InvalidRequestError, match="enable_lora"):
        engine(Runner({}), None).add(message("a", A))
    assert not core.has_work
