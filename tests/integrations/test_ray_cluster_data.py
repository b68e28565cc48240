"""Ray Data, and ranks on a placement group, on a real Ray of this machine."""

from __future__ import annotations

import glob
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live_ray import MARKS, TINY, live_ray, placement_groups, processes, ray, wait_for
from tiny_chat import tiny_chat_model

from llmc.errors import ConfigError, EngineDeadError
from llmc.integrations.ray import LLMPredictor
from llmc.llm import LLM
from llmc.sampling_params import SamplingParams
from llmc.startup import ray_ranks

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with live_ray(tmp_path_factory.mktemp("ray"), num_nodes=2, cores=2):
        yield


def test_every_prompt_is_answered_once_although_a_worker_is_killed(
    cluster: None, tmp_path: Path
) -> None:
    count = 10_000

    def num_saved() -> int:
        return sum(Path(p).read_bytes().count(b"\n") for p in glob.glob(f"{tmp_path}/*.jsonl"))

    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: num_saved() > count // 3, "a third of the answers")
        pid, worker = next(iter(processes("ray::MapWorker(MapBatches(LLMPredictor)").items()))
        worker.kill()
        killed.append(pid)

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"id": i, "prompt": f"number {i}"} for i in range(count)]
    answered = ray.data.from_items(rows, override_num_blocks=40).map_batches(
        LLMPredictor,
        fn_constructor_kwargs={
            "model": str(tiny_chat_model()),
            "sampling_params": {"max_tokens": 2, "temperature": 0.0},
            "id_column": "id",
            "checkpoint_dir": str(tmp_path),
            **TINY,
            "max_num_seqs": 64,
        },
        batch_size=250,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    )
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    made = answered.take_all()
    killer.join()
    assert len(killed) == 1
    assert sorted(row["id"] for row in made) == list(range(count))
    assert {row["error"] for row in made} == {""}
    assert {row["num_generated_tokens"] for row in made} == {2}
    assert all(row["prompt"] == f"number {row['id']}" for row in made)
    again = LLMPredictor(  # a run after this one: what it finds it does not compute
        str(tiny_chat_model()),
        sampling_params={"max_tokens": 2, "temperature": 0.0},
        id_column="id",
        checkpoint_dir=str(tmp_path),
        **TINY,
    )
    saved = num_saved()
    sample = sorted(made, key=lambda row: int(row["id"]))[:: count // 100]
    batch = {name: [row[name] for row in sample] for name in ("id", "prompt")}
    assert again(batch)["generated_text"] == [row["generated_text"] for row in sample]
    assert num_saved() == saved


def test_ranks_on_a_placement_group_answer_as_one_and_a_killed_one_ends_the_engine(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank takes a node's cores, so they are on two nodes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    num_threads = torch.get_num_threads()
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    texts = ["This License", "You may", "Once"]
    options = {**TINY, "dtype": "float32"}

    def answers(llm: LLM) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(texts, params, progress=False)]

    with LLM(str(tiny_chat_model()), **options) as one:
        want, weights = answers(one), one.info.weight_bytes
    on_ray = {**options, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    with LLM(str(tiny_chat_model()), **on_ray) as two:
        assert answers(two) == want
        assert two.info.weight_bytes < weights
        assert placement_groups() == ["CREATED"]
        [table] = [
            group
            for group in ray.util.placement_group_table().values()
            if group["state"] == "CREATED"
        ]
        assert len(set(table["bundles_to_node_id"].values())) == 2
        [rank] = processes("ray::_RankActor").values()
        rank.kill()
        with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) exited .*Actor"):
            answers(two)
    wait_for(lambda: placement_groups() == [], "the group's end", 20.0)
    assert processes("ray::_RankActor") == {}
    torch.set_num_threads(num_threads)


def test_a_placement_that_cannot_be_is_an_error_with_what_there_is(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ranks, "PLACEMENT_TIMEOUT_S", 1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    num_threads = torch.get_num_threads()
    options = {**TINY, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    try:
        with pytest.raises(ConfigError, match=r"2 bundles of \{'CPU': 3.0\} in 1 s; it has"):
            LLM(str(tiny_chat_model()), **options)
    finally:
        torch.set_num_threads(num_threads)
    assert placement_groups() == []
