"""deploy/kubernetes, held against the schemas of Kubernetes' API and of Ray Serve."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("starlette", reason="the server's dependencies are not installed")

from llmc.integrations.ray.serve import _settings
from llmc.server.app import ROUTES
from llmc.server.settings import ServerSettings

FOLDER = Path(__file__).parents[1] / "deploy" / "kubernetes"
OLDEST, NEWEST = "1.25", "1.34"  # that the manifests are for; the newest that is checked
Object = Mapping[str, Any]

# KubeRay's own kinds (kuberay: apis/ray/v1), for what our manifest has of them. A `template` is
# Kubernetes' own, and is checked as a pod.
POD_GROUP = {"rayStartParams": dict, "template": dict}
RAY_SERVICE: dict[str, Any] = {
    "serveConfigV2": str,
    "rayClusterConfig": {
        "rayVersion": str,
        "enableInTreeAutoscaling": bool,
        "headGroupSpec": POD_GROUP,
        "workerGroupSpecs": [
            {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, **POD_GROUP}
        ],
    },
}


def objects(name: str) -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def plain() -> list[Object]:
    """Every object of a kind that Kubernetes has itself."""
    return [
        one
        for path in FOLDER.glob("*.yaml")
        for one in objects(path.name)
        if "ray" not in one["apiVersion"]
    ]


def ray_service() -> Object:
    [found] = objects("ray-service.yaml")
    return found


def pods() -> Iterator[Object]:
    for one in plain():
        if "template" in one["spec"]:
            yield one["spec"]["template"]
    cluster = ray_service()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]


def validate(one: Object, version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed")
    import kubernetes_validate

    kubernetes_validate.validate(dict(one), version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_manifests_follow_the_schema(version: str) -> None:
    assert [one["kind"] for one in plain()] == ["Deployment", "Service", "PodDisruptionBudget"]
    for one in plain():
        validate(one, version)
    for pod in pods():
        meta = {"name": "one", **pod.get("metadata", {})}
        validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod["spec"]}, version
        )


def test_the_schema_finds_mistakes() -> None:
    [deployment] = [one for one in plain() if one["kind"] == "Deployment"]
    validate(deployment, NEWEST)
    import kubernetes_validate

    deployment["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinessProb"):
        validate(deployment, NEWEST)


def test_names_and_labels_of_the_objects_meet() -> None:
    by_kind = {one["kind"]: one for one in plain()}
    deployment = by_kind["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["minAvailable"] < deployment["replicas"]
    [container] = deployment["template"]["spec"]["containers"]
    [port] = container["ports"]
    assert port["containerPort"] == ServerSettings().port
    assert by_kind["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]


def test_the_probes_ask_routes_that_are_there_and_leave_time_to_drain() -> None:
    [deployment] = [one for one in plain() if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    asked = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    assert asked == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert set(asked.values()) <= {path for verb, path, _ in ROUTES if "GET" in verb}
    [seconds] = container["lifecycle"]["preStop"]["exec"]["command"][1:]
    needed = int(seconds) + ServerSettings().shutdown_timeout_s
    assert pod["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("number", range(3))
def test_no_pod_has_more_rights_than_it_needs(number: int) -> None:
    spec = list(pods())[number]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    for container in spec["containers"]:
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        [key] = [one for one in container["env"] if one["name"] == "LLMC_API_KEY"]
        assert "value" not in key  # it is in a Secret, and in no file of ours


def _check(value: Any, shape: Any, where: str) -> None:
    if isinstance(shape, dict):
        assert set(value) <= set(shape), f"{where}: {set(value) - set(shape)}"
        for name, inner in shape.items():
            assert name in value, f"{where}: {name} is missing"
            _check(value[name], inner, f"{where}.{name}")
    elif isinstance(shape, list):
        for one in value:
            _check(one, shape[0], where)
    else:
        assert type(value) is shape, f"{where} is {value!r}"


def test_the_ray_service_follows_its_schema() -> None:
    service = ray_service()
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    _check(service["spec"], RAY_SERVICE, "spec")
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(type(value) is str for value in group["rayStartParams"].values())


def test_what_serve_runs_fits_its_nodes() -> None:
    service = ray_service()["spec"]
    config = yaml.safe_load(service["serveConfigV2"])
    [application] = config["applications"]
    args = application["args"]
    _settings(args["server"])
    [workers] = service["rayClusterConfig"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    deployment = args["deployment"]
    assert deployment["ray_actor_options"]["num_cpus"] <= int(
        container["resources"]["limits"]["cpu"]
    )
    scaling = deployment["autoscaling_config"]
    assert scaling["max_replicas"] <= workers["maxReplicas"]
    assert scaling["target_ongoing_requests"] <= args["max_num_seqs"]
    port = config["http_options"]["port"]
    [head] = service["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "serve", "containerPort": port} in head["ports"]
