"""What a start imports: nothing heavy for a wrong path, and no compiler once the graph is known."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="the server's dependencies are not installed")
pytest.importorskip("msgspec", reason="the server's dependencies are not installed")

from gguf import GGMLQuantizationType
from live_command import Served
from packed_checkpoints import PACKINGS, write_packed
from tiers import tiered
from tiny_chat import tiny_chat_model
from tiny_gguf import write_gguf
from tiny_models import save_checkpoint

from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.startup.start import start_engine

HEAVY = ("torch", "numpy", "transformers", "uvicorn")
COMPILERS = (
    *("torch._dynamo", "torch._inductor", "transformers", "tokenizers", "sympy"),
    *("llmc.passes.pipeline", "llmc.compiler.build"),
)
IMPORTED_ONCE = ("torch._dynamo", "torch._inductor", "transformers", "sympy")

WRONG_PATH = """
import json, sys
from llmc.cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""
START = """
import json, os, sys
from llmc.config import EngineConfig
from llmc.startup.start import start_engine
path, length = sys.argv[1:]
config = EngineConfig(
    model=path, device="cpu", max_model_len=int(length), max_num_seqs=2, kv_cache_memory=2**20
)
started = start_engine(config)
info = started.info
print(json.dumps([
    [phase.name for phase in started.phases], sorted(sys.modules), info.eos_token_ids, info.dtype
]))
sys.stdout.flush()
os._exit(0)  # without waiting for what is compiled in the background
"""


def run(code: str, *words: str, cache: Path) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env={**os.environ, "LLMC_CACHE_DIR": str(cache), "CXX": "/nothing"},  # no C++ is built
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
        cwd=cache,
    )
    answer: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("command", [["serve"], ["check"], ["inspect"], ["chat", "hi", "--model"]])
@pytest.mark.parametrize("wrong", ["no directory", "no config", "broken config"])
def test_a_wrong_path_is_reported_before_anything_heavy_is_imported(
    command: Sequence[str], wrong: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if wrong != "no directory":
        model.mkdir()
    if wrong == "broken config":
        (model / "config.json").write_text("{", encoding="utf-8")
    code, modules = run(WRONG_PATH, *command, str(model), cache=tmp_path)
    assert code == 2
    assert isinstance(modules, list)
    assert [name for name in HEAVY if name in modules] == []


def test_missing_weights_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    code, modules = run(WRONG_PATH, "chat", str(model), "hello", cache=tmp_path)
    assert code == 2
    assert isinstance(modules, list)
    assert [name for name in ("torch", "transformers") if name in modules] == []


@pytest.mark.parametrize("flag", ["--extra-pass", "--logits-processor"])
@pytest.mark.parametrize("wrong", ["nothing", "gone:x", "gone.py:x", "mine.py:gone"])
def test_a_wrong_name_of_users_code_is_reported_before_anything_heavy_is_imported(
    flag: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("raise AssertionError('it was run')\n", encoding="utf-8")
    code, modules = run(WRONG_PATH, "serve", flag, wrong, cache=tmp_path)
    assert code == 2
    assert isinstance(modules, list)
    assert [name for name in HEAVY if name in modules] == []


def test_a_warm_start_imports_neither_transformers_nor_a_compiler(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model", num_hidden_layers=1)
    cold_phases, _, *cold = run(START, str(path), "32", cache=tmp_path)
    warm_phases, modules, *warm = run(START, str(path), "32", cache=tmp_path)
    assert isinstance(cold_phases, list) and isinstance(warm_phases, list)
    assert "import transformers" in cold_phases and "read config" in warm_phases
    assert isinstance(modules, list)
    assert [name for name in COMPILERS if name in modules] == []
    assert warm == cold

    config = path / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**fields, "eos_token_id": 7}), encoding="utf-8")
    (path / "generation_config.json").unlink()
    phases, _, eos, _ = run(START, str(path), "32", cache=tmp_path)
    assert isinstance(phases, list) and "import transformers" in phases, "its config changed"
    assert eos == [7]


def checkpoint_with_tokenizer(form: str, folder: Path) -> Path:
    """A model that can chat, in one of the stored forms."""
    if form == "GGUF":
        template = "{{ messages[0]['content'] }}"
        return write_gguf(
            folder / "model.gguf",
            "llama",
            GGMLQuantizationType.Q8_0,
            edit=lambda writer: writer.add_chat_template(template),
        )
    plain = tiny_chat_model()
    if form == "safetensors":
        return plain
    stored, _ = write_packed(plain, folder, PACKINGS["int-quantized"]())
    for file in plain.glob("tokenizer*"):
        shutil.copy(file, stored)
    shutil.copy(plain / "chat_template.jinja", stored)
    return stored


# Keeps a list of what every process of a command imports, engines and API servers included.
NOTE_IMPORTS = """
import os, sys
class Note:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            with open({noted!r}, "a") as file:
                file.write(name + chr(10))
sys.meta_path.insert(0, Note())
"""
GENERATE = """
import sys
from llmc import LLM, SamplingParams
LLM(sys.argv[1]).generate(["hi"], SamplingParams(max_tokens=2), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", tiered(["safetensors", "GGUF", "quantized"], "safetensors", "GGUF")
)
def test_the_first_token_of_any_command_needs_no_compiler(form: str, tmp_path: Path) -> None:
    model = str(checkpoint_with_tokenizer(form, tmp_path))
    noted, log = tmp_path / "noted", tmp_path / "log"
    text = NOTE_IMPORTS.format(names=IMPORTED_ONCE, noted=str(noted))
    (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "llmc.cli"]
    environ = {
        **os.environ,
        "LLMC_CACHE_DIR": str(tmp_path / "cache"),
        "CXX": "/nothing",  # no C++ is built
        "PYTHONPATH": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    chat = [*command, "chat", "hi", "--model", model, "--max-tokens", "2"]
    subprocess.run(chat, env=environ, cwd=tmp_path, timeout=300, check=True)
    assert {"transformers", "torch._dynamo"} <= {*noted.read_text().split()}

    noted.write_text("")
    subprocess.run(chat, env=environ, cwd=tmp_path, timeout=300, check=True)
    llm = [sys.executable, "-P", "-c", GENERATE, model]
    subprocess.run(llm, env=environ, cwd=tmp_path, timeout=300, check=True)
    serve = [*command, "serve", "--model", model, "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(serve, env=environ, cwd=tmp_path, stderr=stderr)
    try:
        answer = Served(process, log, tmp_path).complete(prompt="hi", max_tokens=2)
        assert answer.status_code == 200, answer.text
    finally:
        process.terminate()
        process.wait(60)
    assert noted.read_text() == ""


@pytest.mark.parametrize("enabled", [True, False])
def test_starting_leaves_garbage_collection_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ConfigError):
            start_engine(EngineConfig(model="/nothing"))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
