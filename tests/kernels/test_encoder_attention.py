"""`encoder_attention` by torch's attention of each text, beside the reference."""

from __future__ import annotations

import op_cases
import pytest
import torch

from llmc.kernels.encoder_attention import encoder_attention, make_case

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", op_cases.DTYPES)
def test_equals_the_reference(dtype: torch.dtype) -> None:
    bands = make_case([600, 300], 2, 2, 16, 16, CPU, dtype, window=65)  # of 256 queries
    for case in (*op_cases.cases("encoder_attention", dtype), bands):
        impl = encoder_attention.best(case)
        assert impl is not None and impl.name == "torch"
        got, want = impl.op()(*case), encoder_attention.reference(*case)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, **op_cases.TOLERANCE[dtype])


def test_a_text_does_not_see_another() -> None:
    together = make_case([9, 30], 2, 2, 16, 16, CPU, torch.float32)
    query, key, value, _, scale, window = together
    both = encoder_attention.run(*together)
    for first, last in ((0, 9), (9, 39)):
        bounds = torch.tensor([0, last - first], dtype=torch.int32)
        own = [x[first:last] for x in (query, key, value)]
        alone = encoder_attention.run(*own, bounds, scale, window)
        torch.testing.assert_close(both[first:last], alone)


def test_later_tokens_are_seen_within_the_window() -> None:
    query, key, value, bounds, scale, _ = make_case([12], 1, 1, 8, 8, CPU, torch.float32)
    for window, far in ((0, 11), (4, 7)):
        out = encoder_attention.run(query, key, value, bounds, scale, window)
        changed = value.clone()
        changed[far] += 1
        moved = (encoder_attention.run(query, key, changed, bounds, scale, window) - out).abs()
        reached = moved.amax((1, 2)) > 1e-7
        want = [window == 0 or abs(i - far) < window for i in range(12)]
        assert reached.tolist() == want
