"""transformers' replaceable functions lead to ours while a model is captured, and only then."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers as tf

from llmc.compiler.recurrent import FUNCTIONS, public_name, replaced_functions

CODE = "transformers.models.qwen3_next.modeling_qwen3_next"


def test_a_replaceable_function_is_known_by_its_public_name() -> None:
    code = importlib.import_module(CODE)
    assert public_name(code.torch_chunk_gated_delta_rule) == "chunk_gated_delta_rule"
    assert public_name(code.causal_conv1d_fn) == "causal_conv1d_fn"
    assert public_name(code.rotate_half) == public_name(torch.softmax) == ""


def test_only_while_a_model_is_captured() -> None:
    code = importlib.import_module(CODE)
    before = code.torch_chunk_gated_delta_rule
    config = tf.Qwen3NextConfig(num_hidden_layers=1, num_experts=2, layer_types=["full_attention"])
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(KeyError), replaced_functions(model):
        assert code.torch_chunk_gated_delta_rule is FUNCTIONS["chunk_gated_delta_rule"]
        raise KeyError
    assert code.torch_chunk_gated_delta_rule is before


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention", "chunk_kda"),
        ("mamba2", "mamba2_chunk_scan", "_chunk_scan_combined"),
        ("mamba", "mamba_selective_scan", "selective_scan_fn"),
        ("lfm2", "causal_conv1d_fn", "causal_conv1d_fn"),
    ],
)
def test_ours_computes_what_theirs_does(module: str, function: str, name: str) -> None:
    """On one sequence, with every argument that modelling code gives."""
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    theirs, ours = getattr(code, function).__wrapped__, FUNCTIONS[name]
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=gen)

    tokens, same = 70, None
    if name == "causal_conv1d_fn":
        args, kwargs = (rand(1, 6, tokens), rand(6, 4), rand(6)), {"activation": "silu"}
    elif name == "selective_scan_fn":
        args = (rand(1, 6, tokens), rand(1, 6, tokens), -rand(6, 3), rand(1, 3, tokens))
        args = (*args, rand(1, 3, tokens))
        kwargs = {"D": rand(6), "z": rand(1, 6, tokens), "delta_bias": rand(6)}
        kwargs |= {"delta_softplus": True}
    elif name == "_chunk_scan_combined":
        args = (rand(1, tokens, 4, 8), rand(1, tokens, 4), -rand(4), rand(1, tokens, 2, 5))
        args = (*args, rand(1, tokens, 2, 5))
        kwargs = {"D": rand(4), "dt_bias": rand(4), "dt_softplus": True, "chunk_size": 16}
    else:
        key_heads = 2 if name == "chunk_gated_delta_rule" else 4
        args = (rand(1, tokens, key_heads, 8), rand(1, tokens, key_heads, 8), rand(1, tokens, 4, 6))
        decay = -rand(1, tokens, 4, 8) if name == "chunk_kda" else -rand(1, tokens, 4)
        kwargs = {"g": decay, "beta": rand(1, tokens, 4), "use_qk_l2norm_in_kernel": True}
        same = [a.repeat_interleave(4 // a.shape[2], 2) for a in args]  # 5.17 takes no fewer keys
    want = theirs(*(args if same is None else same), **kwargs)
    got = ours(*args, **kwargs)
    want, got = (r[0] if isinstance(r, tuple) else r for r in (want, got))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
