"""Messages between processes: the same on the other side, checked there, and of one version."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the server's dependencies are not installed")

import msgspec
from scripted_process import model_info

from llmc import errors
from llmc.cli.errors import describe
from llmc.config import EngineConfig
from llmc.engine.messages import (
    AbortRequest,
    AddRequest,
    BlockMap,
    EngineOutputs,
    EngineState,
    EngineStats,
    FinishedRequest,
    GetState,
    RequestUpdate,
    RequestView,
)
from llmc.engine.plan import TokenLogprobs
from llmc.errors import ConfigError
from llmc.image_input import ImageInput, ImageTensor
from llmc.model_info import Phase, PhaseBegins
from llmc.processes import wire
from llmc.processes.remote_errors import as_exception, describe_failure
from llmc.processes.server_processes import RestartBudget
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams

SAMPLING = SamplingParams(
    temperature=1,
    stop=["a", "\u4f60"],
    logit_bias={3: -1, 2**31 - 1: 0.5},
    allowed_token_ids=(1, 2),
    seed=-(2**63),
    logprobs=3,
)
ASKS_MORE = SamplingParams(
    structured_outputs=StructuredOutputsParams(json={"type": "integer"}),
    bad_words_token_ids=[[1, 2], [3]],
    prompt_logprobs=2,
    best_of=4,
    extra_args={"a": [1, 0.5, "t"], "b": True, "c": 2.0},
)
PIXELS = ImageTensor(dtype="float32", shape=(1, 2), data=bytes(8))
IMAGE = ImageInput(digest=bytes(16), tensors={"pixel_values": PIXELS}, spans=((0, 1),))
REQUEST = AddRequest(
    request_id="r", prompt_token_ids=[1, 2], sampling=SAMPLING, priority=-1, images=[IMAGE]
)
NUMBERS = {name: i for i, name in enumerate(EngineStats.__dataclass_fields__)}
STATS = EngineStats(**{**NUMBERS, "step_sizes": [3, 1]})
STATE = EngineState(
    time_s=1.5,
    collect_s=0.001,
    stats=STATS,
    num_rows=4,
    step_tokens=512,
    block_size=16,
    blocks=BlockMap(
        num_blank=1,
        num_cached=1,
        num_used=2,
        num_shared=1,
        num_saved=1,
        blocks_per_cell=1,
        runs=[0, 1, 1, 1, 2, 1, 3, 1],
    ),
    requests=[
        RequestView(
            number=3,
            state="running",
            row=0,
            num_prompt_tokens=20,
            num_cached_tokens=16,
            num_computed_tokens=21,
            num_output_tokens=2,
            age_s=0.5,
            first_token_s=None,
            block_runs=[2, 2],
        )
    ],
    finished=[FinishedRequest(number=1, num_output_tokens=5, first_token_s=0.25, total_s=1.0)],
)
LOGPROBS = TokenLogprobs(
    token_id=1, logprob=float("-inf"), rank=2, top_token_ids=[7], top_logprobs=[-0.25]
)
UPDATE = RequestUpdate(
    request_id="r",
    new_token_ids=[1],
    logprobs=[LOGPROBS],
    finish_reason="stop",
    stop_reason=4,
    is_whole=True,
    prompt_logprobs=[LOGPROBS],
)

to_engine: wire.Unpacker[Any] = wire.Unpacker(wire.TO_ENGINE)
to_frontend: wire.Unpacker[Any] = wire.Unpacker(wire.TO_FRONTEND)


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(),
        AbortRequest(request_id="r"),
        GetState(),
        wire.FrontendGone(frontend="api-1"),
    ],
)
def test_messages_to_the_engine_arrive(message: Any) -> None:
    assert to_engine(wire.pack(message)) == message


def test_a_request_arrives_with_all_that_belongs_to_it() -> None:
    request = to_engine(wire.pack(REQUEST))
    assert request.sampling.stop_strings == ("a", "\u4f60")
    assert request.sampling.allowed_token_ids == [1, 2]  # a sequence is a list there
    assert request.sampling.logit_bias == SAMPLING.logit_bias
    for name in ("temperature", "seed", "logprobs", "max_tokens", "top_p"):
        assert getattr(request.sampling, name) == getattr(SAMPLING, name)
    assert (request.request_id, request.prompt_token_ids, request.priority) == ("r", [1, 2], -1)


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputsParams(json={"type": "integer"}),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(regex="a+"),
        StructuredOutputsParams(choice=["yes", "n\u00f6"]),
        StructuredOutputsParams(grammar='root ::= "a"'),
    ],
    ids=lambda spec: spec.kind,
)
def test_every_kind_of_grammar_arrives(spec: StructuredOutputsParams) -> None:
    sampling = dataclasses.replace(ASKS_MORE, structured_outputs=spec)
    request = dataclasses.replace(REQUEST, sampling=sampling)
    arrived = to_engine(wire.pack(request)).sampling
    assert arrived == sampling
    assert (arrived.structured_outputs.kind, arrived.structured_outputs.text) == (
        spec.kind,
        spec.text,
    )


def test_two_grammars_at_once_do_not_arrive() -> None:
    frames = wire.pack(dataclasses.replace(REQUEST, sampling=ASKS_MORE))
    raw = msgspec.msgpack.decode(frames[2])
    raw["sampling"]["structured_outputs"]["regex"] = "a"
    with pytest.raises(wire.WireError, match="exactly one of"):
        to_engine([*frames[:2], msgspec.msgpack.encode(raw)])


@pytest.mark.parametrize(
    "message",
    [EngineOutputs(updates=[UPDATE], stats=STATS), STATE, wire.Disconnected(reason="why")],
)
def test_messages_of_the_engine_arrive(message: Any) -> None:
    assert to_frontend(wire.pack(message)) == message


@pytest.mark.parametrize(
    "report",
    [
        PhaseBegins(name="load"),
        Phase(name="load", seconds=0.5, detail="1\n2"),
        wire.Ready(info=model_info(), stats=STATS),
        wire.Failed(kind="OSError", message="no", trace="t", errno=13, filename="f"),
    ],
)
def test_reports_are_one_line(report: Any) -> None:
    line = wire.to_line(report)
    assert line.count(b"\n") == 1
    assert wire.from_line(line, *wire.REPORTS) == report


def test_the_configuration_arrives() -> None:
    config = EngineConfig(model="m", passes={"merge_linears": False}, max_num_seqs=3)
    arrived = wire.from_line(wire.to_line(config), EngineConfig)
    for name in EngineConfig.__dataclass_fields__:
        sent, got = getattr(config, name), getattr(arrived, name)
        assert got == (list(sent) if isinstance(sent, tuple) else sent), name


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram"},
        {"method": "ngram", "prompt_lookup_max": 1},
        {"method": "draft_model", "model": "small"},
        {"method": "eagle3", "model": "head", "quantization": "int8"},
        {"method": "mtp", "num_speculative_tokens": 2},
    ],
)
def test_every_kind_of_speculation_arrives(speculation: dict[str, Any]) -> None:
    config = EngineConfig(model="m", speculative_config=speculation)
    arrived = wire.from_line(wire.to_line(config), EngineConfig)
    assert arrived.speculative_config == config.speculative_config is not None


def test_code_does_not_cross_the_border() -> None:
    with pytest.raises(ConfigError, match="can't be sent to the engine process"):
        wire.to_line(EngineConfig(extra_passes=(lambda graph: None,)))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("temperature", -1.0, "in .0, 100."), ("n", "2", "Expected `int`"), ("n", 10**9, "1 to 128")],
)
def test_parameters_are_checked_on_arrival(field: str, value: Any, reason: str) -> None:
    frames = wire.pack(REQUEST)
    raw = msgspec.msgpack.decode(frames[2])
    raw["sampling"][field] = value
    with pytest.raises(wire.WireError, match=reason):
        to_engine([*frames[:2], msgspec.msgpack.encode(raw)])


def test_another_version_is_named_with_ours() -> None:
    with pytest.raises(wire.WireError) as caught:
        to_engine([b"0.0.1-abc", b"Hello", b""])
    text = str(caught.value)
    assert "0.0.1-abc" in text and wire.VERSION in text and "restart the server" in text


def test_the_version_follows_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire._version() == wire.VERSION

    changed = dataclasses.make_dataclass("AbortRequest", [("request_id", str), ("reason", str)])
    monkeypatch.setattr(wire, "TO_ENGINE", (wire.Hello, AddRequest, changed, wire.FrontendGone))
    assert wire._version() != wire.VERSION


@pytest.mark.parametrize("frames", [[], [b"a", b"b"], [b"a", b"b", b"c", b"d"]])
def test_another_number_of_parts_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(wire.WireError, match="must have 3"):
        to_engine(frames)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x92\xa4none\x01", b"\x91\xa5pickle"])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(wire.WireError, match="can't be read"):
        to_engine([wire.VERSION.encode(), b"AbortRequest", payload])


def test_a_kind_of_the_other_direction_is_refused() -> None:
    with pytest.raises(wire.WireError, match="unknown kind b'Disconnected'"):
        to_engine(wire.pack(wire.Disconnected(reason="why")))
    with pytest.raises(wire.WireError, match="unknown kind 'Hello'"):
        wire.from_line(wire.to_line(wire.Hello()), *wire.REPORTS)


def test_a_line_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    line = wire.to_line(Phase(name="load", seconds=0.5, detail=""))
    monkeypatch.setattr(wire, "VERSION", "0.0.1-abc")
    with pytest.raises(wire.WireError, match=r"restart the server"):
        wire.from_line(line, *wire.REPORTS)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("max_num_seqs must be 1"),
        errors.CheckpointError("no config.json"),
        errors.CompileError("no match"),
        MemoryError(),
        PermissionError(13, "Permission denied", "model/x"),
    ],
)
def test_a_failure_reads_the_same_in_the_other_process(error: Exception) -> None:
    line = wire.to_line(describe_failure(error))
    reported = as_exception(wire.from_line(line, wire.Failed))
    assert describe(reported) == describe(error)
    assert "in the engine process" in reported.__notes__[0]


def test_an_unforeseen_failure_keeps_its_name() -> None:
    reported = as_exception(describe_failure(RuntimeError("out of\ncudas")))
    message, _, code = describe(reported)
    assert message == "the engine did not start: RuntimeError: out of cudas"
    assert code == 1


def test_a_budget_is_spent_and_comes_back() -> None:
    budget = RestartBudget()
    assert [budget.take(at) for at in (0.0, 1.0, 2.0)] == [0.5, 2.0, 8.0]
    assert budget.take(3.0) is None
    assert str(budget) == "3 of 3 in 10 minutes"
    assert budget.take(600.5) == 8.0  # the first start is forgotten
    assert budget.take(600.6) is None
    assert budget.take(2000.0) == 0.5


def test_a_recommended_top_k_stays_a_whole_number() -> None:
    info = dataclasses.replace(model_info(), generation_defaults={"top_k": 20, "top_p": 0.9})
    ready = wire.from_line(wire.to_line(wire.Ready(info=info, stats=STATS)), wire.Ready)
    recommended: Any = ready.info.generation_defaults
    assert SamplingParams(**recommended).top_k == 20
