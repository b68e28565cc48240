"""Each file of examples/ does what its README says, on a tiny random model with a tokenizer."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server's dependencies are not installed")

from live_server import live_server
from scripted_engine import REPLY, make_hf_tokenizer
from tiny_models import save_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("example")
    tokenizer = make_hf_tokenizer()
    save_checkpoint("llama", path, vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.save_pretrained(path)
    return str(path)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRINTED = {
    "offline": r"'The capital of France is' -> '.*\n'Once upon a time' -> ",
    "async_streaming": r"'The capital of France is': '",
    "structured_output": r"\{'name': '.*', 'is_capital': (True|False)\}\n(small|medium|large)\n",
    "speculation": r"the same tokens: True\naccepted \d+ of [1-9]\d* draft tokens",
    "logits_processor": r"\[7, 7, 7\]",
    "user_passes": r"steer",
}


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_the_example_runs(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main(model)
    assert re.search(PRINTED[name], capsys.readouterr().out)


def test_the_client_prints_what_the_server_streams(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server() as live:
        load("server_client").main(f"http://127.0.0.1:{live.port}")
        assert capsys.readouterr().out == REPLY + "\n"
        with pytest.raises(SystemExit, match="no_such_route|not_found"):
            load("server_client").main(f"http://127.0.0.1:{live.port}/nothing")


def test_every_example_is_in_the_readme_and_tested() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == {*PRINTED, "server_client"}
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\[(\w+)\.py\]", text)) == files
