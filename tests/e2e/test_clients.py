"""The snippets of docs/clients.md, each in an environment of its own, beside `llmc serve`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from real_model import needs_model
from tiers import tiered

TEXT = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
SAID = "The capital of France is Paris."

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.xdist_group("clients"),  # one server for all
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("starlette", "uvicorn", "zmq", "msgspec")),
        reason="the server's dependencies are not installed",
    ),
    needs_model,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    name: str
    install: str  # "": nothing
    language: str
    code: str


def snippets() -> list[Snippet]:
    found = []
    for section in TEXT.split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        install = blocks.pop(0)[1].strip() if len(blocks) > 1 else ""
        [(language, code)] = blocks
        found.append(
            Snippet(name=section.split("\n")[0], install=install, language=language, code=code)
        )
    return found


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    llmc = Path(sys.executable).with_name("llmc")
    log = tmp_path_factory.mktemp("clients") / "server.log"
    with log.open("wb") as out:
        command = [str(llmc), "serve", "--served-model-name", "small", "--port", str(port)]
        server = subprocess.Popen([*command, "-O0"], stdout=out, stderr=out)
        try:
            for _ in range(2400):
                assert server.poll() is None, log.read_text()[-2000:]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                        break
                except OSError:
                    time.sleep(0.1)
            yield port
        finally:
            server.terminate()
            server.wait(60)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment,
        check=False,
    )


def python_with(package: str, folder: Path) -> Path:
    """A new environment's Python. Each package has its own, since two may exclude each other."""
    python, pip = folder / "venv" / "bin" / "python", [sys.executable, "-m", "pip"]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
        [*pip, "--python", str(python), "install", "-q", "--no-compile", package],
    ):
        done = run(command, folder)
        assert done.returncode == 0, done.stderr
    return python


def package_of(snippet: Snippet) -> str:
    return snippet.install.removeprefix("pip install ").strip('"')


def is_here(snippet: Snippet) -> bool:
    name, version = package_of(snippet).split("==")
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


def runner(snippet: Snippet, folder: Path) -> list[str]:
    """The command that runs a file of the snippet's language, with its package there."""
    if snippet.language == "bash":
        return ["bash"]
    if snippet.language == "javascript":
        if shutil.which("node") is None or shutil.which("npm") is None:
            pytest.skip("there is no Node.js on this machine")
        done = run([*snippet.install.split(), "--no-audit", "--no-fund"], folder)
        assert done.returncode == 0, done.stderr
        return ["node"]
    if is_here(snippet):
        return [sys.executable, "-P"]
    return [str(python_with(package_of(snippet), folder))]


ORDINARY = [snippet for snippet in snippets() if snippet.name == "openai, Python"]


@pytest.mark.parametrize("snippet", tiered(snippets(), *ORDINARY), ids=lambda snippet: snippet.name)
def test_a_snippet_runs(snippet: Snippet, port: int, tmp_path: Path) -> None:
    suffix = {"python": "py", "javascript": "mjs", "bash": "sh"}[snippet.language]
    command = runner(snippet, tmp_path)
    script = tmp_path / f"snippet.{suffix}"
    script.write_text(snippet.code.replace(":8000", f":{port}"), encoding="utf-8")
    done = run([*command, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    if snippet.language == "bash":
        assert SAID in done.stdout
        return
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert lines["chat"] == lines["stream"] == SAID
    errors = {
        "openai, Python": "context_length_exceeded",
        "openai, JavaScript": "400 context_length_exceeded",
        "anthropic, Python": "invalid_request_error",
    }
    assert lines["error"] == errors.get(snippet.name, "the text is too long")
    more = {
        "openai, Python": {"responses": SAID},
        "openai, JavaScript": {"tool": "look_up string"},
        "LangChain": {"json": "Answer", "tool": "Answer", "batch": str([SAID, SAID])},
    }
    for key, value in more.get(snippet.name, {}).items():
        assert lines[key] == value
