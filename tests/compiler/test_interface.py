"""How transformers' modeling code calls our attention."""

from __future__ import annotations

import torch
from torch import nn

from llmc.compiler.interface import attention_function


def test_attention_of_tokens_to_their_own_states_is_computed_as_it_is() -> None:
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    tokens, queries, states, width = 5, 2, 3, 8
    query = torch.randn(1, tokens, queries, width)
    key, value = torch.randn(2, 1, tokens, states, width).unbind()
    out, _ = attention_function(module, query, key, value, None, scaling=0.5)
    assert out.shape == (1, queries, tokens, width)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, scale=0.5)
    torch.testing.assert_close(out, expected.transpose(1, 2))
