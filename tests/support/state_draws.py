"""Random steps and sizes for stateful ops, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from llmc.kernels import (
    causal_conv,
    conv_recurrence,
    decayed_softmax,
    delta_rule,
    linear_recurrence,
    pool_windows,
    selective_scan,
)
from llmc.kernels.registry import Case
from llmc.kernels.state_cases import make_step

STATE_OPS = (
    "causal_conv",
    "delta_rule",
    "selective_scan",
    "linear_recurrence",
    "decayed_softmax",
    "pool_windows",
)
CONV_OPS = ("conv_delta_rule", "conv_scan")
_PADDING = (1, 0)
_REQUEST = st.tuples(st.integers(1, 19), st.integers(0, 3)).map(lambda x: (x[0], sum(x)))


@st.composite
def state_cases(draw: st.DrawFn, name: str, dtype: torch.dtype) -> Case:
    """Arguments of op `name`: new, continued and padding requests."""
    requests = draw(st.lists(_REQUEST, min_size=1, max_size=4))
    if name in CONV_OPS and draw(st.booleans()):  # as in a step without prompts
        requests = [(1, total) for _, total in requests]
    if draw(st.booleans()):
        requests.append(_PADDING)
    gen = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    step = make_step(requests, gen, torch.device("cpu"))
    heads = draw(st.sampled_from([1, 2, 3]))
    if name == "causal_conv":
        channels, width = draw(st.sampled_from([5, 33, 300])), draw(st.integers(2, 6))
        act = draw(st.sampled_from([None, "silu"]))
        biased, gated = draw(st.booleans()), draw(st.booleans())
        return causal_conv.make_case(step, gen, dtype, channels, width, biased, act, gated)
    if name == "delta_rule":
        dim, v_dim = draw(st.sampled_from([4, 7, 40])), draw(st.sampled_from([6, 16, 48, 70]))
        per_channel, raw = draw(st.booleans()), draw(st.booleans())
        group = draw(st.sampled_from([1, heads]))
        return delta_rule.make_case(step, gen, dtype, heads, dim, v_dim, per_channel, group, raw)
    if name == "selective_scan":
        groups, width = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 70]))
        size, per_state = draw(st.sampled_from([5, 16, 72])), draw(st.booleans())
        raw = draw(st.booleans())
        return selective_scan.make_case(
            step, gen, dtype, heads * groups, width, groups, size, per_state, raw
        )
    if name == "conv_delta_rule":
        sizes = draw(st.sampled_from([4, 7, 40])), draw(st.sampled_from([6, 16, 70]))
        per_channel, group = draw(st.booleans()), draw(st.sampled_from([1, heads]))
        taps = draw(st.integers(2, 5))
        return conv_recurrence.make_delta_case(
            step, gen, dtype, heads, *sizes, per_channel, group, taps
        )
    if name == "conv_scan":
        groups, width = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 70]))
        size, per_state = draw(st.sampled_from([5, 16, 72])), draw(st.booleans())
        taps = draw(st.integers(2, 5))
        return conv_recurrence.make_scan_case(
            step, gen, dtype, heads * groups, width, groups, size, per_state, taps
        )
    if name == "pool_windows":
        dim, width = draw(st.sampled_from([3, 37, 130])), draw(st.integers(1, 7))
        series = draw(st.sampled_from([1, 2]))
        return pool_windows.make_case(step, gen, dtype, dim, width, series)
    of_vectors = linear_recurrence if name == "linear_recurrence" else decayed_softmax
    return of_vectors.make_case(step, gen, dtype, draw(st.sampled_from([1, 37, 130])))
