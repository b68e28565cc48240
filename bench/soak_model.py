"""The model of a soak test: a tiny one with random weights and the default model's tokenizer.

Steps take a millisecond, so minutes are enough for thousands of requests; the output is nonsense.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from llmc.config import EngineConfig
from llmc.startup.model_files import resolve_model

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 49152,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
BYTES_PER_TOKEN = 2 * 2 * 4 * 64 * 4  # keys and values of each layer, float32


@cache
def model_folder() -> Path:
    """Created once per process, and removed when it ends. Serve it with load_format "dummy"."""
    folder = Path(tempfile.mkdtemp(prefix="llmc-soak-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    source = resolve_model(EngineConfig()).path
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    return folder
