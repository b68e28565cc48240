"""Loading takes at most one copy of the weights plus 15 percent; quantizing them, little more than
what stays. Measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import make_config

from llmc.compiler.build import build

pytestmark = pytest.mark.slow
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 64,
}
LIMIT = 1.15
NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)

CHILD = """
import gc, json, sys
from pathlib import Path
import torch
from transformers import AutoConfig
from llmc.weights.checkpoint import open_checkpoint
from llmc.compiler.attention_fallback import build_model, capture_model
from llmc.compiler.program import RewriteOptions, load_weights, rewrite
from llmc.weights.load import CheckpointWeights
from llmc.passes.options import PipelineOptions
from llmc.startup.sizing import PeakMemory

path = Path(sys.argv[1])
device = torch.device("cpu")
options = PipelineOptions(
    block_size=16, max_positions=64, device_type="cpu", quantization=sys.argv[2] or None
)
built = build_model(AutoConfig.from_pretrained(path), torch.bfloat16)
captured = capture_model(built, device)
program = rewrite(captured, RewriteOptions(pipeline=options, switches={}))
gc.collect()
peak = PeakMemory(device)
peak.start()
source = CheckpointWeights(built.module, open_checkpoint(path))
weights = load_weights(program, source)
grown = peak.grown_by()
ops = [str(n.target) for n in program.graph.graph.nodes]
print(json.dumps({
    "grown": grown,
    "kept": sum(weight.nbytes for weight in weights.values()),
    "merged": sum(len(role.parts) > 1 for _, role in program.weight_inputs()),
    "packed": sum("_linear_pointwise" in op for op in ops),
}))
"""


def save_big_checkpoint(path: Path, **sizes: int) -> int:
    """About 400 MB in two shards; the number of bytes of all tensors."""
    config = make_config("qwen3", **{**SIZES, **sizes})
    config.save_pretrained(path)
    state = build(config, torch.bfloat16).module.state_dict()
    noise = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight_map, total = {}, 0
    for shard in (0, 1):
        names = [n for i, n in enumerate(state) if i % 2 == shard]
        tensors = {}
        for name in names:
            shape, count = state[name].shape, state[name].numel()
            tensors[name] = noise.repeat(-(-count // noise.numel()))[:count].view(shape)
            total += count * 2
            weight_map[name] = f"shard{shard}.safetensors"
        save_file(tensors, path / f"shard{shard}.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def load(path: Path, quantization: str = "") -> Any:
    """What a process that loads the checkpoint printed."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, str(path), quantization],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=path,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@NEEDS_PROC
def test_peak_memory_is_one_copy_and_a_little(tmp_path: Path) -> None:
    total = save_big_checkpoint(tmp_path)
    assert total > 350e6
    seen = load(tmp_path)
    assert seen["merged"] == 2 * SIZES["num_hidden_layers"]
    # Less than one copy would mean that the measurement misses the weights.
    assert 0.95 * total < seen["grown"] <= LIMIT * total, seen["grown"] / total


@NEEDS_PROC
def test_a_weight_that_is_quantized_is_never_whole_in_memory(tmp_path: Path) -> None:
    vocab = 6 * SIZES["vocab_size"]
    save_big_checkpoint(tmp_path, vocab_size=vocab)
    head = vocab * SIZES["hidden_size"] * 2  # bytes, of the largest one
    seen = load(tmp_path, "int4")
    assert 0.95 * seen["kept"] < seen["grown"] < seen["kept"] + 0.6 * head, seen
