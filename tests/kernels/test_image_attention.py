"""image_attention: only tokens with a span change, and they see their image and what is before."""

from __future__ import annotations

import pytest
import torch

from llmc.kernels.attention import attend
from llmc.kernels.image_attention import image_attention
from llmc.kernels.paged_attention import make_case, paged_attention

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [0, 5])
def test_equals_attention_under_a_mask(window: int) -> None:
    new, context, block = 8, 10, 4
    case = make_case([(1, 3), (new, context)], 4, 2, 8, 8, block, CPU, torch.float32, window=window)
    query, key_cache, value_cache, query_start, context_len, table = case[:6]
    common = (query, key_cache, value_cache, query_start, context_len, table)
    causal = paged_attention.overload(*common, 0.3, window, 0, 0.0, None, None)
    span = torch.zeros(2, 1 + new, dtype=torch.int64)
    span[:, 3:7] = torch.tensor([[4], [8]])  # tokens 4 to 7 of the second request
    got = image_attention.overload(causal, *common, 0.3, window, 0.0, None, None, None, span)

    blocks = table[1, : -(-context // block)].long()
    keys, values = (
        cache[blocks].transpose(1, 2).flatten(0, 1)[:context].nan_to_num()
        for cache in (key_cache, value_cache)
    )
    places = torch.arange(context)
    own = places[context - new :]
    image = (places >= 4) & (places < 8)
    want = attend(
        *(query[1:], keys, values, own, places, 0.3, window, 0, 0.0, None, None),
        also=image[own, None] & image[None, :],
    )
    torch.testing.assert_close(got[1:], want)
    assert torch.equal(got[[0, 1, 2, 7, 8]], causal[[0, 1, 2, 7, 8]])
    assert not torch.allclose(got[3:6], causal[3:6])  # the last token of an image sees no more
