"""As a user does it: the installed `llmc` command on the default model, in separate processes.

Everything greedy must agree: the answer of the one-shot chat, of piped stdin, of HTTP with and
without streaming, and of `LLM` in Python.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from real_model import MODEL_NAME, needs_model

pytestmark = [
    pytest.mark.e2e,
    needs_model,
]
needs_server = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")),
    reason="the server's dependencies are not installed",
)

QUESTION = "What is the capital of France?"
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
LLMC = shutil.which("llmc", path=PATH) or "llmc"  # as installed beside this Python
GREEDY_IN_PYTHON = f"""
from llmc import LLM, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=300)
[output] = LLM(opt_level=0).chat([{{"role": "user", "content": {QUESTION!r}}}], greedy)
print(output.outputs[0].text)
"""
START_S = 240.0  # a loaded machine, with the C++ kernels being built meanwhile


def environment() -> dict[str, str]:
    """The user's own, without llmc's variables that this run may have."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LLMC_") or "CACHE" in k}
    return {**kept, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def run(
    *command: str | Path, stdin: str | None = None, cwd: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=START_S,
        cwd=cwd,
        env=environment(),
        check=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What the commands said that need nobody else; they ran side by side."""

    asked: subprocess.CompletedProcess[str]
    piped: subprocess.CompletedProcess[str]
    python: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cwd = tmp_path_factory.mktemp("user")
    with ThreadPoolExecutor(3) as pool:
        asked = pool.submit(run, LLMC, "chat", QUESTION, "--temperature", "0", cwd=cwd)
        piped = pool.submit(run, LLMC, "chat", "--temperature", "0", stdin=QUESTION + "\n", cwd=cwd)
        python = pool.submit(run, sys.executable, "-P", "-c", GREEDY_IN_PYTHON, cwd=cwd)
        return Runs(asked=asked.result(), piped=piped.result(), python=python.result())


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    process: subprocess.Popen[str]
    url: str
    log: Path
    client: Any  # httpx.Client, which a machine without the server may lack


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`llmc serve --port 0`, found by the URL that it prints."""
    import httpx

    cwd = tmp_path_factory.mktemp("server")
    log = cwd / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [LLMC, "serve", "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            cwd=cwd,
            env=environment(),
        )
    try:
        url = wait_for_url(process, log)
        with httpx.Client(base_url=url, timeout=START_S, trust_env=False) as client:
            yield Served(process=process, url=url, log=log, client=client)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"URL +(http://\S+)", log.read_text())
        if found:
            return found[1]
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        time.sleep(0.05)
    raise AssertionError(f"the server did not start in {START_S:g} s:\n{log.read_text()}")


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_chat_answers_a_question(runs: Runs) -> None:
    assert runs.asked.returncode == 0, runs.asked.stderr
    assert "Paris" in runs.asked.stdout and runs.asked.stdout.endswith("\n")
    assert "Traceback" not in runs.asked.stderr


def test_chat_answers_what_is_piped_in(runs: Runs) -> None:
    assert runs.piped.returncode == 0, runs.piped.stderr
    assert runs.piped.stdout == runs.asked.stdout


def test_python_says_the_same(runs: Runs) -> None:
    assert runs.python.returncode == 0, runs.python.stderr
    assert runs.python.stdout.strip() == runs.asked.stdout.strip()


@needs_server
def test_http_says_the_same(runs: Runs, served: Served) -> None:
    response = served.client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200, response.text
    answer = response.json()
    [choice] = answer["choices"]
    assert choice["message"]["content"].strip() == runs.asked.stdout.strip()
    assert choice["finish_reason"] == "stop" and answer["model"] == MODEL_NAME
    assert answer["usage"]["completion_tokens"] > 5

    pieces = events(served, "/v1/chat/completions", CHAT)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in pieces)
    assert text == choice["message"]["content"] and len(pieces) > 3
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


@needs_server
def test_completions_whole_and_streamed_agree(served: Served) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    whole = served.client.post("/v1/completions", json=body).json()
    pieces = events(served, "/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in pieces) == whole["choices"][0]["text"]
    assert whole["choices"][0]["text"] and 0 < whole["usage"]["completion_tokens"] <= 12


@needs_server
def test_the_server_says_what_it_is(served: Served) -> None:
    [card] = served.client.get("/v1/models").json()["data"]
    assert card["id"] == MODEL_NAME and card["max_model_len"] > 0
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/ready").json() == {"status": "ready"}
    metrics = served.client.get("/metrics").text
    [generated] = re.findall(r"^llmc:generation_tokens_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert float(generated) >= 0 and "llmc:time_to_first_token_seconds_bucket" in metrics


@needs_server
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"prompt": ', 400, None),
        (b'{"prompt": "x", "temperature": -1}', 400, "temperature"),
        (b'{"prompt": "x", "colour": "red"}', 400, "colour"),
        (b'{"prompt": "x", "model": "other"}', 404, "model"),
        (b'{"prompt": "x", "max_tokens": 1000000}', 400, "max_tokens"),
    ],
)
def test_a_bad_body_gets_an_error_in_openais_shape(
    served: Served, body: bytes, status: int, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    response = served.client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param


@needs_server
def test_bench_serve_measures_the_server(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    words = ["--num-prompts", "4", "--input-len", "16", "--output-len", "4", "--output-json", out]
    done = run(LLMC, "bench", "serve", "--base-url", served.url, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["completed"] == 4 and result["model_id"] == MODEL_NAME


@needs_server
def test_sigterm_ends_the_server_cleanly(served: Served) -> None:
    """The last of this file that needs the server."""
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0, served.log.read_text()
    assert "Traceback" not in served.log.read_text()


def test_bench_throughput_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "throughput.json"
    words = ["--num-prompts", "4", "--input-len", "16", "--output-len", "8", "--num-warmups", "1"]
    done = run(
        *(LLMC, "bench", "throughput", *words, "--no-bandwidth", "--output-json", out),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Throughput: " in done.stdout
    result = json.loads(out.read_text())
    assert result["num_requests"] == 4 and result["tokens_per_second"] > 0
