"""`python -m bench.gpu`: the whole of it in miniature, its arithmetic, and a run without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_package import ROOT
from fake_graphs import FakeGraphs
from op_cases import require_cpu_ops

from bench.gpu import command as command_module
from bench.gpu import model_part, prompts_part, smoke, start_parts, tune_part
from bench.gpu import subject as subject_module
from bench.gpu.ablation import optional_passes
from bench.gpu.decode import padding_waste, steady_steps
from bench.gpu.parts import PARTS, choose
from bench.gpu.process import PartProcess
from bench.gpu.record import Record, finite
from bench.gpu.replay import Span, summary
from bench.gpu.report import failures, figures, table
from bench.gpu.settings import GIB, full, tiny
from bench.gpu.shapes import linears, prefill_flops, read_config, step_bytes
from bench.gpu.subject import running, swap_and_capture
from bench.gpu.targets import TARGETS, judge
from bench.tree import link_tree
from bench.tuned_table import make_line, write_lines
from llmc.compiler.lower import StepFunction
from llmc.config import EngineConfig
from llmc.kernels.prompts import PromptConfig, prompt_config
from llmc.kernels.registry import OPS
from llmc.kernels.tuned import Key, load_table
from llmc.runner import buckets
from llmc.runner.device import HostDevice
from llmc.runner.model_runner import ModelRunner
from llmc.runner.rows import RowTables
from llmc.startup import bind
from llmc.startup.resolve import pick_level

# cold and ablate start engines again in ways that others do; they are a minute on a busy machine
LONG = ("cold", "ablate")

# llmc is found where bench.tree links it, and nowhere else
NOT_INSTALLED = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "llmc":
            path = [place for place in sys.path if "llmc-tree-" in place]
        return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Visible]
"""


def command(
    tmp_path: Path, *args: str, python_path: Path | None = None
) -> tuple[dict[str, Any], str]:
    output = tmp_path / "gpu.json"
    environment = dict(os.environ)
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *args, "--output-json", str(output)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text()), done.stdout


def test_the_root_left_the_path() -> None:
    assert str(ROOT) not in sys.path and "bench" in sys.modules


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_part_works_in_miniature(tmp_path: Path) -> None:
    pytest.importorskip(
        "triton", reason="triton is not installed: its kernels can't be interpreted"
    )
    names = [part.name for part in PARTS if part.name not in LONG]
    result, printed = command(tmp_path, "--tiny", "--part", ",".join(names))
    assert list(result["parts"]) == names
    for name, part in result["parts"].items():
        assert part["status"] == "ok", part
        assert list(failures(part)) == [], f"{name}: {part}"
    model = result["parts"]["8b"]["data"]
    assert set(model["decode"]) == {"1", "2", "4"}
    assert all(row["step_ms"] > 0 for row in model["decode"].values())
    assert model["replay"]["kernels"] > 10
    assert set(model["prefill"]) == {"16", "64"} and model["mixed"]["output_tokens"] > 0
    peer = result["parts"]["peer-8b"]["data"]
    assert peer["batch"]["ratio"] > 0 and "sdpa" in peer["batch"]["attention_of_transformers"]
    assert result["versions"]["torch"] and result["machine"]["processor"]
    measured = [v for v in judge(result["parts"]) if v.value is not None]
    assert len(measured) > len(TARGETS) / 2
    assert "SHORT" in printed and "these numbers are meaningless" in printed
    assert "attention_config(16, 4, 4, False): " in printed and " 0 tried" not in printed
    assert json.loads((tmp_path / "gpu-files" / "tuned.json").read_text())["version"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure this machine's GPU")
def test_without_a_gpu_each_measurement_says_why(tmp_path: Path) -> None:
    result, printed = command(tmp_path, "--part", "limits")
    part = result["parts"]["limits"]
    assert part["status"] == "ok" and part["data"]["machine"]["cpu_cores"]
    assert "error" in part["data"]["bandwidth"]
    assert "NOT MEASURED" in printed


# what llmc depends on and a machine with torch, transformers and pytest may lack
ABSENT = (
    "gguf", "llguidance", "msgspec", "prometheus_client", "prompt_toolkit", "pydantic",
    "starlette", "uvicorn", "zmq",
)  # fmt: skip
HIDE = f"""
import sys
from types import SimpleNamespace

def find_spec(name, *args):
    if name.partition(".")[0] in {ABSENT}:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))
"""


def test_parts_run_where_only_the_named_packages_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result, _ = command(tmp_path, "--tiny", "--part", "limits,8b,kernels")
    for name, part in result["parts"].items():
        assert part["status"] == "ok" and not list(failures(part)), f"{name}: {part}"


def test_a_run_without_time_starts_nothing(tmp_path: Path) -> None:
    result, _ = command(tmp_path, "--part", "limits,8b", "--seconds", "3")
    assert {p["status"] for p in result["parts"].values()} == {"no time"}


def test_tests_that_take_too_long_are_interrupted_and_what_ran_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text(
        "import time, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_fast_dry_run(): pass\n"
        f"def test_slow_dry_run(): open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(300)\n"
    )
    start = time.monotonic()
    junit = tmp_path / "tests.xml"
    with pytest.raises(RuntimeError, match=r"'passed': 1.*status 2"):
        start_parts.run_pytest(tiny(), [str(file)], [], junit, seconds=10)
    assert (tmp_path / "begun").exists() and time.monotonic() - start < 100
    assert 'name="test_fast_dry_run"' in junit.read_text()
    assert "1 passed" in (tmp_path / "tests.log").read_text()


def test_jobs_that_compile_share_the_memory_of_an_h100() -> None:
    """All at once would need more, and the tests that run meanwhile would find none."""
    room, most = start_parts.Room(62 * GIB), 0
    jobs = [f"{kind} {name}" for kind in ("model", "generate") for name in ("8b", "0.6b", "1b")]
    assert sum(start_parts.job_bytes(full(), job) for job in jobs) > 80 * GIB
    running: list[int] = []

    def run(job: str) -> None:
        nonlocal most
        size = start_parts.job_bytes(full(), job)
        with room.taken(size):
            running.append(size)
            most = max(most, sum(running))
            time.sleep(0.05)
            running.remove(size)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, jobs))
        assert 0 < most <= 62 * GIB
        with start_parts.Room(0).taken(GIB):
            pass  # alone


def test_the_compiled_step_is_the_one_that_is_measured() -> None:
    """It waits for an idle moment once the uncompiled one has graphs."""
    rows = RowTables(
        num_rows=2, max_model_len=16, block_size=4, vocab_size=8, device=torch.device("cpu")
    )

    def call(**inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(inputs["row"])
        return torch.zeros(count, dtype=torch.int64), torch.zeros(count, 8)

    step = StepFunction(call=call, inputs=("positions", "request_row", "row"), source="")
    runner = ModelRunner(
        step, rows, max_tokens=16, device=HostDevice(FakeGraphs()), use_graphs=True, buckets=(1, 2)
    )
    while runner.capture_next() is not None:
        pass
    runner.swap_step(replace(step, level=2))
    before = runner.graph_bytes
    found = swap_and_capture(runner)
    assert found["num_captures"] == 2
    assert 0 < found["longest_capture_seconds"] <= found["capture_seconds"]
    assert runner.step.level == 2 and runner.graph_bytes == 2 * before


def test_parts_are_chosen_by_name_in_their_own_order() -> None:
    assert [p.name for p in choose("8b, tests")] == ["tests", "8b"]
    assert choose(None) == PARTS
    with pytest.raises(SystemExit, match="unknown part"):
        choose("9b")


def test_passes_that_the_engine_needs_stay_on() -> None:
    names = optional_passes(full())
    assert "fuse_linears" in names and "lower_kernels" not in names


def expected_s(names: str | None) -> int:
    groups = command_module.in_groups(choose(names))
    return sum(max(part.expected_s for part in group) for group in groups)


def test_a_full_run_is_expected_to_end_in_time() -> None:
    """But for its last parts, which have commands of their own."""
    names = [part.name for part in PARTS]
    assert expected_s(",".join(names[: names.index("tune")])) < 530
    assert expected_s("8b,0.6b,tune,prompts,8b-tuned,0.6b-tuned") < 400


def test_every_target_names_a_part_and_an_aim_beyond_its_floor() -> None:
    names = {part.name for part in PARTS}
    for target in TARGETS:
        assert target.path[0] in names
        if target.better == "high":
            assert target.aim >= target.floor
        else:
            assert target.aim <= target.floor


def test_verdicts() -> None:
    def parts(share: float) -> dict[str, Any]:
        return {"8b": {"data": {"decode": {"1": {"share_of_read": share}}}}}

    words = [next(judge(parts(s))).word for s in (0.5, 0.8, 0.95)]
    assert words == ["SHORT", "reached", "aim reached"]
    failed = {"8b": {"data": {"decode": {"error": "x", "where": "y"}}}}
    assert next(judge(failed)).word == "NOT MEASURED"
    assert "50.0%" in list(table(parts(0.5)))[1]


def test_gaps_count_only_time_in_which_nothing_runs() -> None:
    spans = [
        Span(name="a", start=0.0, length=10.0),
        Span(name="b", start=5.0, length=10.0),  # overlaps, as programmatic launches do
        Span(name="a", start=17.0, length=3.0),
    ]
    found = summary(spans, num_layers=1)
    assert (found["total_us"], found["busy_us"], found["gap_us"]) == (20.0, 18.0, 2.0)
    assert found["num_gaps"] == 1 and found["median_gap_us"] == 2.0
    assert found["top"][0] == {"name": "a", "count": 2, "total_us": 13.0}


def test_padding_costs_nothing_where_time_does_not_depend_on_the_batch() -> None:
    assert padding_waste({1: 2.0, 256: 2.0}, 256) == pytest.approx(0.0)
    waste = padding_waste({1: 1.0, 256: 256.0}, 256)  # time is the batch: the rows' own share
    assert 0.02 < waste < 0.10


def test_bytes_and_operations_of_a_known_shape() -> None:
    config = read_config("llama-3.1-8b.json")
    assert step_bytes(config, 2) == pytest.approx(15.0e9, rel=0.01)
    assert step_bytes(read_config("qwen3-0.6b.json"), 2) == pytest.approx(1.19e9, rel=0.01)
    assert step_bytes(read_config("llama-3.2-1b.json"), 2) == pytest.approx(2.47e9, rel=0.01)
    assert {x.name: (x.inputs, x.outputs) for x in linears(config)}["qkv"] == (4096, 6144)
    flops = prefill_flops(config, 1000)
    assert flops["linear"] / 1000 == pytest.approx(2 * 6.98e9, rel=0.01)
    assert flops["attention"] == pytest.approx(4 * 32 * 4096 * 1000 * 1001 / 2)


def test_a_failed_measurement_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "part.json")

    def broken() -> None:
        raise ValueError("no such kernel")

    assert record.measure("first", broken) is None
    assert record.measure("second", lambda: {"x": float("nan")}) is not None
    kept = json.loads((tmp_path / "part.json").read_text())
    assert kept["first"]["error"] == "ValueError: no such kernel"
    assert kept["second"] == {"x": None}
    assert list(failures({"data": kept})) == ["first (ValueError: no such kernel)"]
    assert finite({"a": (1, float("inf")), 2: ROOT}) == {"a": [1, None], "2": str(ROOT)}


def engines_with_graphs(patch: pytest.MonkeyPatch) -> list[FakeGraphs]:
    """From now on, engines capture on the CPU. -> the backends, one for each runner."""
    require_cpu_ops()
    backends: list[FakeGraphs] = []

    def opened(device: torch.device, **options: Any) -> HostDevice:
        backends.append(FakeGraphs())
        return HostDevice(backends[-1])

    patch.setattr(bind, "open_device", opened)
    return backends


def test_smoke_compares_graphs_with_eager_steps_also_from_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = engines_with_graphs(monkeypatch)
    with running(tiny(), tiny().smallest) as subject:
        serving = backends[-1]
        found = smoke.graphs_equal_eager_steps(subject)
        assert found == {"batches": [1, 2, 4], "graphs": True, "eager_steps": 0}
        captured = [shape.requests for shape in serving.captured if shape.is_decode]
        assert captured == [4, 2, 1, 1, 2, 4] and serving.num_replays == 3 * 3 * 6
        monkeypatch.setattr(type(serving.steps[-1]), "replay", lambda step: step.outputs)
        with pytest.raises(RuntimeError, match="batch 1 with graphs: other results"):
            smoke.graphs_equal_eager_steps(subject)


def test_prompts_are_timed_without_and_with_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = engines_with_graphs(monkeypatch)
    settings = replace(tiny(), prefills=(15, 16))
    with running(settings, settings.smallest) as subject:
        found = model_part.prefill(subject, 1e12)
        assert all(
            row["in_graph"] and min(row["ms"], row["eager_ms"]) > 0 for row in found.values()
        )
        captured = [shape for shape in backends[-1].captured if not shape.is_decode]
        assert captured[-2:] == [(16, 2, 2), (16, 1, 1)] and backends[-1].num_replays == 2 * 5
        monkeypatch.setattr(buckets, "MAX_MIXED_TOKENS", 15)
        assert not model_part.prefill(subject, 1e12)["15"]["in_graph"]


def test_a_capture_that_fails_is_reported_by_smoke_and_leaves_the_model_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines_with_graphs(monkeypatch)

    def fail(*args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeGraphs, "capture", fail)
    with running(tiny(), tiny().smallest) as subject:
        assert subject.startup["opt_level"] == 1 and subject.startup["num_captures"] == 0
        with pytest.raises(RuntimeError, match="54 steps ran without a graph"):
            smoke.graphs_equal_eager_steps(subject)
        assert steady_steps(subject, 1)["step_ms"] > 0


def test_smoke_runs_all_ops_and_names_those_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    require_cpu_ops()
    right = smoke.every_op(tiny())
    assert right["num_ops"] > 20 and right["largest_error"] < 1e-3

    def broken(*args: Any) -> Any:
        raise RuntimeError("invalid device function")

    def wrong(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.zeros_like(x)

    for name, call in (("act_mul", broken), ("rms_norm", wrong)):
        impls = [
            replace(impl, op=lambda call=call: call) if impl.name == "cpu" else impl
            for impl in OPS[name].impls
        ]
        monkeypatch.setattr(OPS[name], "impls", impls)
    with pytest.raises(RuntimeError, match=r"^2 of .*'act_mul': .*'rms_norm': 'error"):
        smoke.every_op(tiny())


def test_all_parts_are_rehearsed_although_levels_ops_and_parts_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-O1 can't start, so models are measured at -O0; every op raises; one part can't run."""
    require_cpu_ops()
    start = subject_module.start_engine

    def failing(config: EngineConfig, *args: Any) -> Any:
        if config.opt_level == 1:
            raise MemoryError("no room for graphs")
        return start(config, *args)

    def broken(*args: Any) -> Any:
        raise RuntimeError("invalid device function")

    monkeypatch.setattr(subject_module, "start_engine", failing)
    monkeypatch.setattr(smoke, "_error", broken)
    monkeypatch.setattr("bench.gpu.limits.run", broken)
    result: dict[str, Any] = {"parts": {}}
    command_module._here(choose("smoke,ladder,limits,0.6b"), result, tmp_path / "x.json", 0)
    states = {name: part["status"] for name, part in result["parts"].items()}
    assert states == {"smoke": "ok", "ladder": "ok", "limits": "failed", "0.6b": "ok"}
    data = {name: part["data"] for name, part in result["parts"].items()}
    assert "invalid device function" in data["smoke"]["ops"]["error"]
    assert data["smoke"]["graphs"]["graphs"] is False
    assert data["ladder"]["-O1"]["error"] == "MemoryError: no room for graphs"
    assert data["ladder"]["-O0"]["decode"]["1"]["step_ms"] > 0
    started = data["0.6b"]["start"]
    assert started["failed_levels"] == {"-O1": "MemoryError: no room for graphs"}
    assert started["opt_level"] == 0 and data["0.6b"]["decode"]["1"]["step_ms"] > 0
    kept = {path.name for path in (tmp_path / "x-files").iterdir()}
    assert {"0.6b-replay-1.json.gz", "0.6b-replay-64.json.gz", "smoke.json"} <= kept


PROMPT: Key = prompt_config.key((16,), prompt_config.rule(16))
OTHER: Key = prompt_config.key((64,), prompt_config.rule(64))


def rehearsed(names: str, path: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"parts": {}}
    command_module._here(choose(names), result, path / "x.json", 0)
    parts: dict[str, Any] = result["parts"]
    return parts


def test_models_are_measured_again_with_what_tune_and_prompts_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_cpu_ops()
    measured = {"before_s": {"a call": 2e-6}, "after_s": {"a call": 1e-6}}

    def found(settings: Any, path: Path) -> dict[str, Any]:
        line = make_line(OTHER, PromptConfig(min_tokens=300), measured)
        write_lines(path, {OTHER: line})
        return {"lines": [line]}

    used = []
    by_batch = model_part.by_batch

    def spied(*args: Any) -> dict[str, Any]:
        used.append(set(load_table()))
        return by_batch(*args)

    line = make_line(PROMPT, PromptConfig(min_tokens=40), {"ms": {}})
    monkeypatch.setattr(tune_part, "search", found)
    monkeypatch.setattr(prompts_part, "lines", lambda times: {PROMPT: line})
    monkeypatch.setattr(model_part, "by_batch", spied)
    parts = rehearsed("0.6b,tune,prompts,0.6b-tuned", tmp_path)
    assert list(parts) == ["0.6b", "tune", "prompts", "0.6b-tuned"]
    assert not [failure for part in parts.values() for failure in failures(part)]
    assert used == [set(), {PROMPT, OTHER}] and load_table() == {}
    again = parts["0.6b-tuned"]["data"]
    assert set(again) >= {"start", "decode", "slope", "prefill", "mixed"} and "replay" not in again
    before = parts["0.6b"]["data"]["decode"]["1"]["step_ms"]
    text = "\n".join(figures(parts))
    assert (
        f"0.6b-tuned decode 1: {before:.3f} -> {again['decode']['1']['step_ms']:.3f} ms (" in text
    )
    assert "0.6b-tuned prefill 16: " in text and "a call: 2.0 -> 1.0 us" in text


def test_tune_measures_the_decode_steps_of_its_models_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def written(command: list[str], **options: Any) -> None:
        commands.append(command)
        write_lines(tmp_path / "tuned.json", {OTHER: line, PROMPT: other})

    times = {"before_s": {"a step": 2e-3}, "after_s": {"a step": 1e-3}}
    line = make_line(OTHER, PromptConfig(min_tokens=300), times)
    other = make_line(PROMPT, PromptConfig(min_tokens=300), times)
    monkeypatch.setattr(tune_part.subprocess, "run", written)
    found = tune_part.search(full(), tmp_path / "tuned.json")
    [command] = commands
    text = " ".join(command)
    assert (
        "--steps 1,8,64 --context 90,2048 --model llama-3.1-8b.json --model qwen3-0.6b.json" in text
    )
    lines = list(figures({"tune": {"data": {"searches": found}}}))
    assert lines == ["tune       a step: 2000.0 -> 1000.0 us"], "both lines are for one step"


def test_models_of_other_configs_can_be_started_too() -> None:
    settings = full()
    assert settings.of_config("qwen3-0.6b.json") == settings.model("0.6b")
    other = settings.of_config("lfm2-350m.json")
    assert other.config == "lfm2-350m.json" and other.cache_bytes == 20 * GIB


def test_models_are_not_measured_again_without_anything_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(tune_part, "search", broken)
    monkeypatch.setattr(model_part, "running", broken)
    parts = rehearsed("tune,0.6b-tuned", tmp_path)
    assert "no such device" in parts["tune"]["data"]["searches"]["error"]
    assert parts["0.6b-tuned"]["status"] == "failed"
    assert "run the parts `tune` and `prompts` first" in parts["0.6b-tuned"]["error"]
    parts = rehearsed("prompts,0.6b-tuned", tmp_path)
    assert {part["status"] for part in parts.values()} == {"ok"}
    assert "0.6b-tuned no options are faster than those that the code chooses" in figures(parts)


def test_a_part_that_takes_too_long_is_stopped_and_its_log_is_kept(tmp_path: Path) -> None:
    (part,) = choose("limits")
    process = PartProcess(part, tmp_path, 0.0)
    while not process.poll():
        time.sleep(0.01)
    assert process.result()["status"] == "timeout" and (tmp_path / "limits.log").exists()


def test_smoke_comes_before_everything_and_the_ladder_before_the_models() -> None:
    groups = [[part.name for part in group] for group in command_module.in_groups(PARTS)]
    assert groups[:3] == [["smoke"], ["tests", "warm"], ["ladder"]]


def test_the_parts_measure_the_default_level_of_gpus() -> None:
    assert full().default_level == pick_level(None, torch.device("cuda"))
    assert set(full().levels) == {0, 1, 2}


@pytest.mark.parametrize("name", ["prompts", "tune", "kernels", "linears", "ablations", "gpu"])
def test_a_benchmark_needs_no_installation(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOT_INSTALLED)
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_a_tree_of_links_is_importable_without_an_installation(tmp_path: Path) -> None:
    site = link_tree(tmp_path)
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)];"
        "import llmc, llmc.passes, llmc.kernels, llmc.engine.core; print(llmc.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(site), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(site / "llmc" / "__init__.py"), done.stderr
