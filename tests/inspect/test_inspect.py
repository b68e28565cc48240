"""What inspection says of tiny models is what a start finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType
from tiny_configs import tiny_config
from tiny_gguf import write_gguf
from tiny_models import make_config

from llmc.config import EngineConfig
from llmc.engine.kv.layout import WHOLE
from llmc.errors import CheckpointError
from llmc.inspect.fit import Sizes, cache_kinds, contexts, fit
from llmc.inspect.inspect import Inspection, inspect_model
from llmc.startup.start import start_engine


def save_config(family: str, path: Path, **changes: Any) -> Path:
    make_config(family, **changes).save_pretrained(path)
    return path


def options(path: Path, **changes: Any) -> EngineConfig:
    given = {"dtype": "float32", "device": "cpu", "block_size": 4} | changes
    return EngineConfig(model=str(path), **given)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Inspection]:
    """Six layers of two kinds: a window in all but every third."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    path = save_config(
        "gemma3",
        tmp_path_factory.mktemp("mixed"),
        num_hidden_layers=6,
        layer_types=kinds,
        dtype=torch.float32,
    )
    return path, inspect_model(options(path))


def test_config_json_is_enough_and_one_layer_of_each_kind_is_captured(
    mixed: tuple[Path, Inspection],
) -> None:
    path, found = mixed
    assert [p.name for p in path.iterdir() if p.suffix != ".json"] == []
    assert (found.num_layers, found.num_captured) == (6, 4)
    kinds = [found.layers[i].attention[0].kind for i in range(6)]
    assert kinds == ["window 8", "window 8", "full"] * 2
    first = found.layers[0].attention[0]
    assert (first.heads, first.kv_heads, first.head_dim) == (4, 2, 8)


def test_each_rank_has_its_part(mixed: tuple[Path, Inspection]) -> None:
    path, one = mixed
    two = inspect_model(options(path, tensor_parallel_size=2))
    # a sum for the embedding, two for each layer; the logits, and what was drawn
    assert (one.num_collectives, two.num_collectives) == (0, 1 + 2 * 6 + 2)
    assert two.sizes.kv_bytes_per_token == one.sizes.kv_bytes_per_token // 2
    assert two.num_parameters == one.num_parameters
    norms = 4 * (6 * (4 * 32 + 2 * 8) + 32)  # of hidden states and of heads: on both ranks
    assert 2 * two.sizes.weight_bytes == one.sizes.weight_bytes + norms


def test_short_and_whole_captures_agree(mixed: tuple[Path, Inspection]) -> None:
    path, short = mixed
    whole = inspect_model(options(path), all_layers=True)
    assert whole.num_captured == 6
    for name in ("layers", "passes", "kernels", "num_parameters", "vocab_size"):
        assert getattr(short, name) == getattr(whole, name), name
    assert short.sizes.weight_bytes == whole.sizes.weight_bytes


def test_a_quantized_head_that_is_the_embedding_counts_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma2", GGMLQuantizationType.Q8_0)
    started = start_engine(options(path, opt_level=0, max_num_seqs=2, block_size=16))
    assert inspect_model(options(path)).sizes.weight_bytes == started.info.weight_bytes


def test_bytes_are_those_of_a_start(mixed: tuple[Path, Inspection]) -> None:
    path, found = mixed
    started = start_engine(options(path, load_format="dummy", opt_level=0, max_num_seqs=2))
    assert found.sizes.weight_bytes == started.info.weight_bytes
    assert found.sizes.kv_bytes_per_token == started.info.kv_bytes_per_token
    assert found.vocab_size == started.info.vocab_size
    assert [p.name for p in found.passes] == [
        r.partition(":")[0] for r in started.info.pass_reports
    ]


def test_parameters_are_counted_as_transformers_counts(tmp_path: Path) -> None:
    path = save_config("mixtral", tmp_path)
    module = tf.AutoModelForCausalLM.from_config(make_config("mixtral"))
    found = inspect_model(options(path))
    assert found.num_parameters == sum(p.numel() for p in module.parameters())
    experts = sum(p.numel() for n, p in module.named_parameters() if ".experts." in n)
    assert found.num_active_parameters == found.num_parameters - experts // 2  # 2 of 4
    facts = found.layers[0].experts
    assert facts is not None and (facts.num_experts, facts.num_chosen) == (4, 2)


def test_recurrent_layers_keep_state_and_no_cache(tmp_path: Path) -> None:
    tiny_config("lfm2").save_pretrained(tmp_path)
    found = inspect_model(options(tmp_path))
    first, second = found.layers[0], found.layers[1]
    assert first.other_ops == ("causal conv",) and first.state_bytes > 0
    assert first.kv_bytes_per_token == 0 and first.attention == ()
    assert second.kv_bytes_per_token > 0 and second.state_bytes == 0
    assert (
        found.sizes.request_bytes(4) == 4 * found.sizes.kv_bytes_per_token + 2 * first.state_bytes
    )


# Dynamo makes an instance of an autograd function that a model defines
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_attention_of_the_models_own_is_captured_as_it_is_for_serving(tmp_path: Path) -> None:
    tiny_config("bloom").save_pretrained(tmp_path)
    found = inspect_model(options(tmp_path))
    assert [len(found.layers[i].attention) for i in range(found.num_layers)] == [1, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_can_be_asked_about_without_one(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    path = save_config("llama", tmp_path)
    found = inspect_model(options(path, device="cuda", tensor_parallel_size=ranks))
    runs = {choice.op: choice.runs for choice in found.kernels}
    assert runs["rope_attention"] == "Triton"
    assert all(found.layers[i].kv_bytes_per_token > 0 for i in range(found.num_layers))
    assert found.device == "cuda"


def test_passes_say_where_they_match_and_why_not(tmp_path: Path) -> None:
    path = save_config("gpt2", tmp_path)
    found = {
        p.name: p for p in inspect_model(options(path, passes={"merge_linears": False})).passes
    }
    assert found["page_attention"].layers == (0, 1)
    assert found["append_sampler"].layers == (2,), "behind the layers"
    assert not found["merge_linears"].enabled
    assert found["fuse_gated_norms"].layers == () and found["fuse_gated_norms"].removed == 0
    assert found["split_prompts"].notes, "it says why it rests"


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        inspect_model(options(tmp_path))


SIZES = Sizes(
    weight_bytes=1000,
    read_bytes=800,
    expert_bytes=400,
    num_experts=4,
    num_chosen=1,
    caches=cache_kinds([(WHOLE, 10)]),
    state_bytes=7,
    activation_bytes=100,
    block_size=16,
    step_tokens=64,
    max_model_len=5000,
)


def test_what_fits_is_whole_requests_in_what_is_left() -> None:
    assert contexts(5000) == [1024, 4096, 5000]
    assert contexts(1024) == [1024]
    [first, *_] = fit(SIZES, 1100 + 3 * (10 * 1024 + 7) + 5, None)
    assert (first.request_bytes, first.num_requests) == (10 * 1024 + 7, 3)
    assert SIZES.request_bytes(1025) == 10 * 1040 + 7, "whole blocks"
    assert fit(SIZES, 50, None)[0].num_requests == 0


def test_a_bandwidth_bounds_the_tokens_a_second() -> None:
    [row, *_] = fit(SIZES, None, 1e6)
    one, eight, _ = row.tokens_per_s
    cache = 10 * 1024 + 7
    assert one == pytest.approx(1e6 / (800 + 400 / 4 + cache))
    assert eight == pytest.approx(8e6 / (800 + 400 * (1 - 0.75**8) + 8 * cache))
    assert fit(SIZES, 1100 + 2 * cache, 1e6)[0].tokens_per_s[1] is None, "8 do not fit"
