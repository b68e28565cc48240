"""llmc run-batch: every line has a row, and the output is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server's dependencies are not installed")

from tiny_chat import tiny_chat_model

from llmc.async_llm import AsyncLLM
from llmc.cli import run_batch_run
from llmc.cli.main import main

OPTIONS = ["-O0", "--dtype", "float32", "--kv-cache-memory", "4M", "--max-num-seqs", "4"]


def run(folder: Path, lines: list[str], *options: str) -> int:
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return main(["run-batch", str(tiny_chat_model()), *files, *OPTIONS, *options])


def request(name: str, url: str, body: dict[str, Any]) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_rows_of_all_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = {"prompt": "Licensed", "max_tokens": 4, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    lines = [
        *(request(f"r{i}", "/v1/completions", ask) for i in range(12)),
        request("chat", "/v1/chat/completions", chat),
        request("long", "/v1/completions", {**ask, "max_tokens": 10**6}),
        "",
        request("vector", "/v1/embeddings", {"input": "x"}),
        "nonsense",
        request("other", "/v1/models", {}),
    ]
    assert run(tmp_path, lines) == 0
    assert "13 answered, 4 failed" in capsys.readouterr().err.replace("\n", " ")
    found = {}
    for text in (tmp_path / "out.jsonl").read_text().splitlines():
        row = json.loads(text)
        found[row["custom_id"]] = row
    assert len(found) == 17
    texts = {found[f"r{i}"]["response"]["body"]["choices"][0]["text"] for i in range(12)}
    assert len(texts) == 1
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    error = found["long"]["response"]["body"]["error"]
    assert found["long"]["response"]["status_code"] == 400
    assert error["code"] == "context_length_exceeded"
    assert "--task embed" in found["vector"]["response"]["body"]["error"]["message"]
    assert found["line-17"]["error"]["code"] == "invalid_json"
    assert "url '/v1/models'" in found["line-18"]["error"]["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_vectors(tmp_path: Path) -> None:
    lines = [
        request("e", "/v1/embeddings", {"input": ["a", "b"]}),
        request("s", "/score", {"text_1": "a", "text_2": "a"}),
    ]
    assert run(tmp_path, lines, "--task", "embed") == 0
    rows = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["data"] for row in rows}
    assert len(found["e"]) == 2
    assert found["s"][0]["score"] == pytest.approx(1)


def test_an_output_that_was_there_stays_when_a_run_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.jsonl").write_text("old")

    async def interrupted(llm: AsyncLLM, *_: Any) -> int:
        await llm.shutdown()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_batch_run, "_answer", interrupted)
    assert run(tmp_path, ["{}"]) == 130
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("none.jsonl", "out.jsonl", "is not a file"),
        ("in.jsonl", "none/out.jsonl", "folder does not exist"),
        ("in.jsonl", ".", "is a folder"),
        ("in.jsonl", "in.jsonl", "must differ"),
    ],
)
def test_wrong_files_are_told_before_a_model_loads(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    target: str,
    message: str,
) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    files = ["-i", str(tmp_path / source), "-o", str(tmp_path / target)]
    assert main(["run-batch", "no/such-model", *files]) == 2
    assert message in capsys.readouterr().err
