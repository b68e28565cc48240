"""The server on Ray Serve, on a real Ray of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "ray", reason="Ray is not installed here; tests/e2e/test_on_ray.py runs these elsewhere"
)

import httpx
import openai
import yaml
from live_ray import MARKS, TINY, live_ray, placement_groups, processes, wait_for
from tiny_adapters import save_adapter
from tiny_chat import tiny_chat_model
from tiny_models import load_reference

from llmc.integrations.ray import app, build_app
from llmc.llm import LLM
from llmc.sampling_params import SamplingParams

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
PREFIX = "/llm"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with live_ray(tmp_path_factory.mktemp("ray")):
        yield


@dataclass(frozen=True, kw_only=True)
class Served:
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", **options)

    def ask(self, client: openai.OpenAI, num_tokens: int, **options: Any) -> Any:
        return client.completions.create(
            prompt="Once upon a time",
            max_tokens=num_tokens,
            temperature=0.0,
            extra_body={"ignore_eos": True},
            **{"model": "tiny", **options},
        )

    def whole(self, client: openai.OpenAI, num_tokens: int, **options: Any) -> str:
        answer = self.ask(client, num_tokens, **options).choices[0]
        assert answer.finish_reason == "length"
        return str(answer.text)

    def streamed(self, client: openai.OpenAI, num_tokens: int) -> str:
        """EOFError where the stream ends before its answer does."""
        text, reason = "", None
        for event in self.ask(client, num_tokens, stream=True):
            text += event.choices[0].text
            reason = event.choices[0].finish_reason
        if reason != "length":
            raise EOFError(f"the stream ended after {len(text)} characters")
        return text

    @property
    def num_replicas(self) -> int:
        from ray import serve

        [deployment] = serve.status().applications["default"].deployments.values()
        return deployment.replica_states.get("RUNNING", 0)


@pytest.fixture(scope="module")
def proxy(cluster: None) -> Iterator[int]:
    """The port of Serve."""
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield port
    finally:
        serve.shutdown()


@pytest.fixture(scope="module")
def served(proxy: int) -> Served:
    from ray import serve

    application = build_app(
        str(tiny_chat_model()),
        server={"served_model_names": ["tiny"]},
        deployment={
            "ray_actor_options": {"num_cpus": 1},
            "health_check_period_s": 1,
            "autoscaling_config": {
                "min_replicas": 1,
                "max_replicas": 2,
                "target_ongoing_requests": 2,
                "upscale_delay_s": 1,
                "metrics_interval_s": 0.5,
                "look_back_period_s": 2,
                "downscale_delay_s": 600,
            },
        },
        **TINY,
    )
    serve.run(application, route_prefix=PREFIX)
    return Served(url=f"http://127.0.0.1:{proxy}{PREFIX}")


def test_a_stream_comes_through_the_proxy_as_it_is_made(served: Served) -> None:
    client = served.client()
    assert served.num_replicas == 1
    assert httpx.get(served.url + "/health").json() == {"status": "ok"}
    times = []
    began = time.monotonic()
    for _ in served.ask(client, 600, stream=True):
        times.append(time.monotonic() - began)
    assert len(times) > 20
    assert times[0] < times[-1] / 2
    assert served.streamed(client, 60) == served.whole(client, 60)
    ids = httpx.get(served.url + "/v1/models").headers.get_list("x-request-id")
    assert len(ids) == 1
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        served.whole(client, 10**6)


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    def metric(line: str) -> float:
        text = httpx.get(served.url + "/metrics").text
        return float(next(row.split()[-1] for row in text.splitlines() if line in row))

    before = metric('finished_reason="abort"')
    stream = served.ask(served.client(), 1900, stream=True)
    next(iter(stream))
    assert metric("llmc:num_requests_running{") == 1
    stream.close()
    wait_for(lambda: metric("llmc:num_requests_running{") == 0, "the request's end", 2.0)
    assert metric('finished_reason="abort"') == before + 1


def test_load_brings_a_replica_and_a_killed_one_loses_its_own_requests_alone(
    served: Served,
) -> None:
    """All clients get every answer: the client sends again what it has no answer to, and its
    caller what broke off in a stream."""
    client = served.client(max_retries=8)
    expected = served.whole(client, 300)
    stop = threading.Event()
    answers: list[str] = []
    broken: list[BaseException] = []

    def load(number: int) -> None:
        while not stop.is_set():
            try:
                ask = served.streamed if number % 2 else served.whole
                answers.append(ask(client, 300))
            except (openai.APIError, httpx.HTTPError) as error:  # a stream that broke off
                broken.append(error)

    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(load, number) for number in range(8)]
        try:
            wait_for(lambda: served.num_replicas == 2, "a second replica")
            replicas = processes("ray::ServeReplica:default:llmc")
            assert len(replicas) == 2
            wait_for(lambda: len(answers) > 20, "answers of both")
            assert broken == []
            pid, victim = next(iter(replicas.items()))
            victim.kill()
            so_far = len(answers)
            wait_for(
                lambda: len(set(processes("ray::ServeReplica:default:llmc")) - {pid}) == 2,
                "another replica in its place",
            )
            wait_for(lambda: served.num_replicas == 2, "both to serve")
            wait_for(lambda: len(answers) > so_far + 20, "answers after it")
        finally:
            stop.set()
        for call in calls:
            call.result()
    assert set(answers) == {expected}
    assert len(broken) <= 4, broken  # streams in flight, and none of them ended as if whole


def test_a_replica_that_is_to_end_finishes_its_requests(served: Served) -> None:
    from ray import serve

    client = served.client(max_retries=0)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(served.streamed, client, 1500) for _ in range(4)]
        time.sleep(0.5)
        began = time.monotonic()
        serve.delete("default")
        assert time.monotonic() - began < 25
        assert len({call.result() for call in calls}) == 1
    assert httpx.get(served.url + "/health").status_code == 404
    assert processes("ray::ServeReplica:default:llmc") == {}


def test_adapters_are_chosen_by_model_id(proxy: int, tmp_path: Path) -> None:
    """Two adapters, of which a replica keeps one: each answers as it does without Ray."""
    from ray import serve

    path = str(tiny_chat_model())
    base = load_reference(tiny_chat_model())
    adapters = [
        save_adapter(base, tmp_path / name, number=number, r=4, target_modules=["q_proj", "v_proj"])
        for number, name in enumerate(("poems", "prose"), start=1)
    ]
    loras = {"enable_lora": True, "max_loras": 1, "dtype": "float32"}
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(path, **TINY, **loras) as llm:
        want = {
            one.lora_name: llm.generate("Once upon a time", params, lora_request=one)[0]
            for one in adapters
        }
    texts = {name: output.outputs[0].text for name, output in want.items()}
    assert texts["poems"] != texts["prose"]
    application = build_app(path, lora_dir=str(tmp_path), **TINY, **loras)
    serve.run(application, route_prefix="/")
    served = Served(url=f"http://127.0.0.1:{proxy}")

    def ask(name: str) -> str:
        headers = {"serve_multiplexed_model_id": name}
        client = served.client(max_retries=0, default_headers=headers)
        return served.whole(client, 20, model=name)

    for name in ("poems", "prose", "poems"):
        assert ask(name) == texts[name]
    with pytest.raises(openai.NotFoundError, match="there is no LoRA adapter 'nothing'"):
        ask("nothing")
    serve.delete("default")


def test_a_replica_of_several_ranks_is_replaced_when_one_is_killed(proxy: int) -> None:
    """They are in the placement group of the replica."""
    from ray import serve

    application = build_app(
        str(tiny_chat_model()),
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        server={"served_model_names": ["tiny"]},
        deployment={"placement_group_bundles": [{"CPU": 1}, {"CPU": 1}]},
        **TINY,
    )
    serve.run(application, route_prefix="/")
    served = Served(url=f"http://127.0.0.1:{proxy}")
    client = served.client(max_retries=20)
    expected = served.whole(client, 20)
    [(pid, rank)] = processes("ray::_RankActor").items()
    assert placement_groups() == ["CREATED"]
    rank.kill()
    assert served.whole(client, 20) == expected
    assert pid not in processes("ray::_RankActor")
    serve.delete("default")
    wait_for(lambda: not processes("ray::_RankActor"), "the ranks to end", 20.0)


@pytest.mark.parametrize("file", ["examples/ray_serve.yaml", "deploy/kubernetes/ray-service.yaml"])
def test_ray_takes_the_configuration(file: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    given = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    given = yaml.safe_load(given["spec"]["serveConfigV2"]) if "spec" in given else given
    [application] = ServeDeploySchema.model_validate(given).applications
    built = app({**application.args, "model": str(tiny_chat_model())})
    assert built._bound_deployment.name == "llmc"
