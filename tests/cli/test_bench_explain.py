"""`llmc bench explain`: the work of a step by hand arithmetic, the verdicts, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs
from rank_threads import RankThreads, rank_threads
from tiny_engine import Running, generate, start
from tiny_models import save_checkpoint

from llmc.cli.main import main
from llmc.errors import InvalidRequestError, LlmcError
from llmc.kernels.cpu.build import load
from llmc.load_test import machine
from llmc.load_test.explain import Explanation, Limits, explain_steps
from llmc.load_test.explain_report import format_table
from llmc.load_test.observe import ObservedStep, OpRow
from llmc.load_test.op_work import Call, RequestTokens, Work, work_of
from llmc.passes.inputs import AdapterInput, CacheInput, Input, StateInput, WeightInput
from llmc.runner.device import HostDevice
from llmc.runner.model_runner import ModelRunner
from llmc.startup import bind

LIMITS = Limits(bytes_per_s=1e10, operations_per_s=1e11)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 32, 4, 2, 8, 64, 96, 2
FLOAT = 4  # bytes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("explain") / "tiny")


@pytest.fixture(scope="module")
def running(checkpoint: Path) -> Running:
    return start(checkpoint)


@pytest.fixture(scope="module")
def explained(running: Running) -> list[Explanation]:
    return explain_steps(
        running.started,
        batch_size=3,
        context_len=21,
        input_len=17,
        num_iters=2,
        limits=lambda: LIMITS,
    )


def linear(inputs: int, outputs: int, rows: int, logits: int | None = None) -> Work:
    """Of a linear of every layer, or of one."""
    count = rows if logits is None else logits
    values = inputs * outputs + count * (inputs + outputs)
    times = LAYERS if logits is None else 1
    return Work(
        num_bytes=times * FLOAT * values, num_operations=times * 2 * count * inputs * outputs
    )


@pytest.mark.parametrize(
    ("step", "rows", "logits", "seen", "pairs"),
    [(0, 3, 3, 3 * 21, 3 * 21), (1, 17, 1, 17, 17 * 18 // 2)],
    ids=["decode", "prompt"],
)
def test_bytes_and_operations_are_those_of_the_model(
    explained: list[Explanation], step: int, rows: int, logits: int, seen: int, pairs: int
) -> None:
    found = {(row.kind, row.name): row for row in explained[step].rows}
    query = HEADS * HEAD_DIM
    linears = {
        "self_attn.q_proj+k_proj+v_proj": linear(HIDDEN, query + 2 * KV_HEADS * HEAD_DIM, rows),
        "self_attn.o_proj": linear(query, HIDDEN, rows),
        "mlp.gate_proj+up_proj": linear(HIDDEN, 2 * INNER, rows),
        "mlp.down_proj": linear(INNER, HIDDEN, rows),
        "lm_head": linear(HIDDEN, VOCAB, rows, logits),
    }
    assert {n: row.work for (kind, n), row in found.items() if kind == "linear"} == linears
    attention = found["attention", "paged_attention"]
    assert attention.num_calls == LAYERS
    assert attention.work.num_operations == LAYERS * 4 * HEADS * HEAD_DIM * pairs
    cached = seen * 2 * KV_HEADS * HEAD_DIM
    packed = attention.work.num_bytes - LAYERS * FLOAT * (cached + 2 * rows * query)
    assert 0 < packed < 2000  # the block tables and the like
    assert all(row.seconds >= 0 for row in found.values())
    assert explained[step].step_s > 0
    assert [row.seconds for row in explained[step].rows] == sorted(
        (row.seconds for row in found.values()), reverse=True
    )


@pytest.mark.parametrize("replays", [False, True])
def test_an_observed_step_draws_the_same_tokens(running: Running, replays: bool) -> None:
    if replays and not load():
        pytest.skip("there are no C++ ops on this machine, so that no step is replayed")
    prompts, runner = [[5, 6, 7], [8, 9, 10, 11, 12]], running.started.runner
    expected = generate(running.engine(), prompts, 6)
    served, runner.step = runner.step, ObservedStep(running.started, replays=replays).step
    try:
        assert generate(running.engine(), prompts, 6) == expected
    finally:
        runner.step = served


def test_steps_are_timed_with_their_graphs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bind, "open_device", lambda device, **options: HostDevice(FakeGraphs()))
    monkeypatch.setattr(
        bind,
        "ModelRunner",
        lambda *args, **given: ModelRunner(*args, **given | {"use_graphs": True}),
    )
    running = start(checkpoint)
    runner = running.started.runner
    while runner.capture_next() is not None:
        pass
    decode, _ = explain_steps(
        running.started, batch_size=3, context_len=21, input_len=17, num_iters=2,
        limits=lambda: LIMITS,
    )  # fmt: skip
    assert sum(decode.eager_steps.values()) == 1, "only that of the prompts"


def test_ranks_spend_a_share_in_collectives(checkpoint: Path) -> None:
    with rank_threads():
        many = start(checkpoint, tensor_parallel_size=2)
    decode, prompt = explain_steps(
        many.started, batch_size=3, context_len=21, input_len=17, num_iters=2,
        limits=lambda: LIMITS,
    )  # fmt: skip
    processes = many.started.rank_processes
    assert isinstance(processes, RankThreads)
    processes.stop()
    for explained in (decode, prompt):
        collectives = {r.name: r for r in explained.rows if r.kind == "collective"}
        calls = {name: row.num_calls for name, row in collectives.items()}
        assert calls == {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1, "first_rank": 1}
        spent = sum(row.seconds for row in collectives.values())
        assert 0 < spent == explained.collectives_s < explained.ops_s
        assert explained.as_json()["collectives_seconds"] == spent
        share = f"{spent / explained.ops_s:.0%} of them in collectives"
        assert share in format_table(explained).splitlines()[0]


def test_batches_that_do_not_fit_are_refused(running: Running) -> None:
    def explain(**sizes: int) -> None:
        explain_steps(running.started, num_iters=2, limits=lambda: LIMITS, **sizes)

    with pytest.raises(InvalidRequestError, match="exceeds the limit of 64 tokens"):
        explain(batch_size=1, context_len=62, input_len=4)
    few = running.started.info.pool_tokens
    with pytest.raises(InvalidRequestError, match=rf"it has {few}; lower --batch-size"):
        explain(batch_size=few, context_len=40, input_len=4)
    with pytest.raises(LlmcError, match="no step with 9 decoding requests"):
        ObservedStep(running.started, replays=False).rows(decode_of=9)


def call(
    name: str,
    requests: list[tuple[int, int]],
    roles: dict[str, Input],
    result: Any,
    *,
    written: str | None = None,
    **given: Any,
) -> Work:
    return work_of(
        Call(
            name=name,
            given=given,
            roles=roles,
            written=frozenset() if written is None else frozenset((written,)),
            result=result,
            requests=[RequestTokens(new=new, context=context) for new, context in requests],
        )
    )


@pytest.mark.parametrize(
    ("window", "chunk", "chosen", "seen", "pairs"),
    [
        (0, 0, None, 10, 8 + 9 + 10),
        (4, 0, None, 6, 3 * 4),
        (0, 8, None, 10, 8 + 1 + 2),
        (0, 0, 2, 6, 3 * 2),  # each query chooses two, of which none may be another's
    ],
)
def test_of_a_cache_the_part_that_is_seen_counts(
    window: int, chunk: int, chosen: int | None, seen: int, pairs: int
) -> None:
    query, cache = torch.zeros(3, 4, 8), torch.zeros(5, 2, 4, 8)
    picks = None if chosen is None else torch.zeros(3, 1, chosen, dtype=torch.int32)
    roles: dict[str, Input] = {
        "key_cache": CacheInput(layer=0, part="key"),
        "value_cache": CacheInput(layer=0, part="value"),
    }
    work = call(
        "paged_attention", [(3, 10)], roles, torch.empty(3, 4, 8),
        query=query, key_cache=cache, value_cache=cache, context_len=torch.tensor([10]),
        window=window, chunk=chunk, chosen=picks, sparse_block_size=1,
    )  # fmt: skip
    given = 8 + 2 * query.nbytes + (0 if picks is None else picks.nbytes)
    assert work.num_bytes == given + 2 * seen * 2 * 8 * FLOAT
    assert work.num_operations == 2 * 4 * 16 * pairs


def test_of_latents_the_form_that_is_computed_counts() -> None:
    heads, dim, shared, v_dim, rank = 2, 12, 4, 8, 32
    query, cache = torch.zeros(45, heads, dim + shared), torch.zeros(20, 1, 4, rank + shared)
    weight = torch.zeros(heads * (dim + v_dim), rank)
    work = call(
        "latent_attention", [(40, 44), (5, 30)], {"key_cache": CacheInput(layer=0, part="key")},
        torch.empty(45, heads, v_dim), query=query, weight=weight, key_cache=cache,
        context_len=torch.tensor([44, 30]), window=0, chunk=0,
    )  # fmt: skip
    pairs = sum(range(5, 45)), sum(range(26, 31))
    expanded = 44 * weight.numel() + pairs[0] * heads * (dim + shared + v_dim)
    absorbed = 5 * weight.numel() + pairs[1] * heads * (2 * rank + shared)
    assert work.num_operations == 2 * (expanded + absorbed)
    made = 45 * heads * v_dim * FLOAT + query.nbytes + weight.nbytes + 16
    assert work.num_bytes == made + (44 + 30) * (rank + shared) * FLOAT


def test_of_tables_experts_and_states_what_is_used_counts() -> None:
    weight: dict[str, Input] = {"weight": WeightInput(parts=("embed.weight",))}
    ids = torch.tensor([1, 5, 5])
    rows = torch.empty(3, 16)
    found = call("embedding", [(3, 3)], weight, rows, weight=torch.zeros(50, 16), indices=ids)
    assert found == Work(num_bytes=rows.nbytes * 2 + ids.nbytes)

    experts, x = torch.zeros(8, 32, 16), torch.zeros(3, 16)
    found = call(
        "expert_linear", [(3, 3)], weight, torch.empty(3, 32), x=x, weight=experts, expert=ids
    )
    assert found.num_operations == 2 * 3 * 16 * 32
    given = {"x": x, "weight": experts, "expert": ids, "act": "silu"}
    gated = call("expert_linear", [(3, 3)], weight, torch.empty(3, 16), **given)
    assert gated.num_operations == found.num_operations
    given = {"x": x, "weight": experts, "expert": ids, "share": torch.zeros(1, 3)}
    summed = call("sum_expert_linear", [(1, 1)], weight, torch.empty(1, 32), **given)
    assert summed.num_operations == found.num_operations
    assert summed.num_bytes == found.num_bytes - 2 * 32 * FLOAT + 3 * FLOAT
    routed = call("route", [(3, 3)], weight, (x, x, ids), x=x, router=torch.zeros(8, 16))
    assert routed.num_operations == 2 * 3 * 16 * 8
    assert found.num_bytes == experts.nbytes // 4 + x.nbytes + 3 * 32 * FLOAT + ids.nbytes

    state: dict[str, Input] = {"state": StateInput(call=0, op="linear_recurrence")}
    slots = torch.zeros(9, 16)
    found = call("linear_recurrence", [(1, 4), (2, 2)], state, torch.empty(3, 16), x=x, state=slots)
    assert found == Work(num_bytes=2 * x.nbytes + 2 * 2 * 16 * FLOAT, num_operations=2 * 3 * 16)


def test_of_adapters_on_experts_those_that_rows_use_count() -> None:
    a, b = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 4, 32)
    roles: dict[str, Input] = {
        "a": AdapterInput(op="experts", matrix="a", weights=("up",), widths=(32,)),
        "b": AdapterInput(op="experts", matrix="b", weights=("up",), widths=(32,)),
    }
    # two tokens of two choices, the first without an adapter; the second chose one expert twice
    adapter, expert, out = (
        torch.tensor([0, 2]).int(),
        torch.tensor([1, 2, 5, 5]),
        torch.zeros(4, 32),
    )
    found = call(
        "add_lora", [(2, 2)], roles, None, written="out", out=out, a=a, b=b, adapter=adapter,
        expert=expert,
    )  # fmt: skip
    assert found.num_operations == 2 * 2 * 4 * (16 + 32)
    used = 4 * (16 + 32) * FLOAT
    assert found.num_bytes == used + 2 * out.nbytes + adapter.nbytes + expert.nbytes


def test_a_view_has_no_work_and_what_is_written_to_counts_twice() -> None:
    x = torch.zeros(3, 16)
    assert call("view", [(3, 3)], {}, x.view(48), x=x) == Work()
    assert call("relu_", [(3, 3)], {}, x, written="x", x=x) == Work(num_bytes=2 * x.nbytes)


def row(kind: str, milliseconds: float, megabytes: float, gigaflop: float = 0.0) -> OpRow:
    work = Work(num_bytes=int(megabytes * 1e6), num_operations=int(gigaflop * 1e9))
    return OpRow(kind=kind, name=kind, num_calls=1, seconds=milliseconds * 1e-3, work=work)


@pytest.mark.parametrize(
    ("step_ms", "rows", "bound_by", "verdict"),
    [
        (
            12, [row("linear", 10, 40), row("sampler", 1, 0)], "memory",
            "bound by memory: linears move 40 MB at 40% of 10 GB/s",
        ),
        (
            12, [row("linear", 10, 1, 0.5), row("attention", 1, 9)], "compute",
            "bound by compute: linears do 0.5 GFLOP at 50% of 100 GFLOP/s",
        ),
        (
            30, [row("linear", 10, 40)], "host",
            "bound by the host: the ops take 10.00 of 30.00 ms",
        ),
        (
            12, [row("linear", 4, 40), row("collective", 6, 1)], "collectives",
            "bound by communication between ranks: 6.00 of 10.00 ms",
        ),
    ],
)  # fmt: skip
def test_verdicts(step_ms: float, rows: list[OpRow], bound_by: str, verdict: str) -> None:
    found = Explanation(
        title="step", step_s=step_ms * 1e-3, eager_steps={}, rows=tuple(rows), limits=LIMITS
    )
    assert (found.bound_by, found.verdict) == (bound_by, verdict)
    assert format_table(found).splitlines()[1] == verdict
    assert "CUDA graph" not in format_table(found)
    eager = replace(found, eager_steps={"too_large": 2, "not_captured": 1})
    line = "steps without a CUDA graph: not captured: 1, too large: 2"
    assert format_table(eager).splitlines()[2] == line


def test_command(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "measure_read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(machine, "measure_product_rate", lambda device, dtype: 1e11)
    result, plot = tmp_path / "result.json", tmp_path / "plot.png"
    sizes = "--context-len 12 --input-len 9 --num-iters 1 --kv-cache-memory 1MiB -O0 --device cpu"
    words = ["bench", "explain", str(checkpoint), *sizes.split()]
    assert main([*words, "--output-json", str(result), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "decode step, 1 request of 12 tokens: " in out and "prompt of 9 tokens: " in out
    assert "mlp.gate_proj+up_proj" in out and "10.0 GB/s read, 100 GFLOP/s" in out
    found = json.loads(result.read_text())
    assert found["read_bandwidth_bytes_per_s"] == 1e10
    assert found["decode"]["verdict"] in out and found["prefill"]["verdict"] in out
    ops = found["decode"]["ops"]
    assert sum(op["seconds"] for op in ops) == pytest.approx(found["decode"]["ops_seconds"])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--context-len 1", "--context-len must be at least 2, got 1"),
        ("--batch-size 65", "--batch-size 65 exceeds --max-num-seqs 64"),
        ('--speculative-config {"method":"ngram"}', "remove --speculative-config"),
    ],
)
def test_mistakes_end_before_the_model_is_loaded(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "explain", "nowhere", *flags.split()]) != 0
    assert message in capsys.readouterr().err


def test_the_rate_of_products_is_plausible() -> None:
    assert 1e8 < machine.measure_product_rate("cpu", "float32", repeats=1) < 1e15
