"""Where Ray is not installed: the tests on a cluster, in an environment that has it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is not None,
        reason="Ray is installed here: tests/integrations runs them as they are",
    ),
]


def run(*command: str, seconds: float) -> str:
    environment = {k: v for k, v in os.environ.items() if "PYTEST" not in k and k != "PYTHONPATH"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


def test_the_tests_on_a_cluster_pass_with_the_extra(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The new environment sees this one's packages, and adds those of the extra."""
    if "slow" not in pytestconfig.option.markexpr:
        pytest.skip("an installation and minutes of a local Ray: ask for it with -m slow")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"), seconds=120)
    python = str(tmp_path / "venv" / "bin" / "python")
    folder = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", seconds=60)
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(folder.strip(), "this_environment.pth").write_text(ours, encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["ray"]
    run(python, "-m", "pip", "install", "-q", *extra, seconds=600)
    said = run(
        *(python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"),
        "tests/integrations/test_ray_cluster_serve.py",
        "tests/integrations/test_ray_cluster_data.py",
        seconds=900,
    )
    assert "passed" in said and "skipped" not in said, said
