"""`decayed_softmax` in Triton: a program handles some channels of a request, token by token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.decayed_softmax import decayed_softmax
from llmc.kernels.triton.configs import STATE_CHANNELS
from llmc.kernels.triton.define import define
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.state import dense, span, step_args, takes_slots


@triton.jit
def decayed_softmax_kernel(
    key, value, decay, bonus, state, out, query_start, context_len, request_row,
    key_token, value_token, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, last, slot, kept = span(query_start, context_len, request_row, tl.program_id(0))
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    place = state + slot * 3 * CHANNELS + c
    above = tl.load(place, mask=live & kept, other=0.0)
    below = tl.load(place + CHANNELS, mask=live & kept, other=0.0)
    highest = tl.load(place + 2 * CHANNELS, mask=live & kept, other=-1e38)
    fade = tl.load(decay + c, mask=live, other=0.0).to(tl.float32)
    more = tl.load(bonus + c, mask=live, other=0.0).to(tl.float32)
    for i in range(last - first):
        token = first.to(tl.int64) + i
        k = tl.load(key + token * key_token + c, mask=live, other=0.0).to(tl.float32)
        v = tl.load(value + token * value_token + c, mask=live, other=0.0).to(tl.float32)
        top = tl.maximum(highest, k + more)
        old, own = tl.exp(highest - top), tl.exp(k + more - top)
        y = (old * above + own * v) / (old * below + own)
        tl.store(out + token * CHANNELS + c, y.to(out.dtype.element_ty), mask=live)
        top = tl.maximum(highest + fade, k)
        old, own = tl.exp(highest + fade - top), tl.exp(k - top)
        above = old * above + own * v
        below = old * below + own
        highest = top
    tl.debug_barrier()  # all threads of the program have read the state
    tl.store(place, above, mask=live)
    tl.store(place + CHANNELS, below, mask=live)
    tl.store(place + 2 * CHANNELS, highest, mask=live)


def plan(
    key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor, state: Tensor, *step: Tensor
) -> Plan[Tensor]:
    channels, requests = state.shape[2], step[-1].shape[0]
    key, value, decay, bonus = (dense(x) for x in (key, value, decay, bonus))
    out = value.new_empty(value.shape)
    block = min(power_of_2(channels), STATE_CHANNELS)
    launch = Launch(
        kernel=decayed_softmax_kernel,
        grid=(requests, cdiv(channels, block)),
        args={
            "key": key, "value": value, "decay": decay, "bonus": bonus, "state": state,
            "out": out, **step_args(*step),
            "key_token": key.stride(0), "value_token": value.stride(0),
        },
        constants={"CHANNELS": channels, "BLOCK": block},
        num_warps=1,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


define(decayed_softmax, plan=plan, supports=takes_slots)
