"""The library must load where no server dependency is installed."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = (
    *("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"),
    *("zmq", "msgspec"),
)
CODE = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Refuse())
from llmc import LLM, AsyncLLM, SamplingParams
import llmc.text.chat, llmc.text.detokenizer
print("torch" in sys.modules, LLM.__name__, AsyncLLM.__name__)
"""


def test_library_needs_no_server_dependency_and_no_torch_to_import() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "LLM", "AsyncLLM"]
