"""read_taps and widen_logits: what a draft head reads, leaves and gives."""

from __future__ import annotations

import torch
from tiny_graphs import Values, apply, roles, run, step, trace, weight
from torch import Tensor, fx

from llmc.kernels.draft_states import CARRIED, LEFT, draft_states
from llmc.passes.base import histogram
from llmc.passes.inputs import StateInput, StepInput, TapInput, input_of
from llmc.passes.read_taps import read_taps
from llmc.passes.widen_logits import ID_MAP, widen_logits
from llmc.pooling import DRAFTED

GEN = torch.Generator().manual_seed(0)
TOKENS, WIDTH, SIZE = 5, 4, 2
HIDDEN = torch.randn(1, TOKENS, WIDTH, generator=GEN)


def head(x: Tensor, token_ids: Tensor) -> Tensor:
    """Two taps; their sum is carried on, and 10 times that is left."""
    fed = draft_states(x, 0) + draft_states(x, 1)
    return draft_states(10 * draft_states(fed, CARRIED), LEFT) + 0 * token_ids[None, :, None]


def made() -> fx.GraphModule:
    graph = trace(head, x=step(HIDDEN, dynamic=1), token_ids=step(torch.arange(TOKENS)))
    fed, (report,) = apply(graph, read_taps(block_size=SIZE))
    assert report.removed["llmc.draft_states.default"] == 4
    return fed


def test_tokens_read_the_other_models_states_or_their_own() -> None:
    """Three requests: two tokens of a text, two of another, and one that the head drew."""
    gm = made()
    taps = [torch.randn(4, 1, SIZE, WIDTH, generator=GEN) for _ in range(2)]
    state = torch.randn(6, WIDTH, generator=GEN)
    before = state.clone()
    given: dict[object, Tensor] = {
        StepInput(name="token_ids"): torch.tensor([3, 7, 8, 2, DRAFTED + 5]),
        StepInput(name="slot_mapping_1"): torch.tensor([5, 6, 0, 1, -1]),
        StepInput(name="row"): torch.tensor([4, 0, 2]),
        StepInput(name="logits_index"): torch.tensor([1, 3, 4]),
        TapInput(number=0): taps[0],
        TapInput(number=1): taps[1],
        StateInput(call=0, op="draft_states"): state,
    }
    inputs = [given[input_of(n)] for n in gm.graph.nodes if n.op == "placeholder"]
    assert len(inputs) == len(given)
    with torch.no_grad():
        out = fx.Interpreter(gm).run(*inputs)
    both = (taps[0] + taps[1]).view(-1, WIDTH)
    want = torch.cat([both[[5, 6, 0, 1]], before[[2]]])
    torch.testing.assert_close(out, 10 * want[None])
    after = before.clone()
    after[[4, 0, 2]] = 10 * want[[1, 3, 4]]
    torch.testing.assert_close(state, after)


def test_nothing_is_fed_to_other_models() -> None:
    graph = trace(lambda x: x * 2, x=step(HIDDEN, dynamic=1))
    same, (report,) = apply(graph, read_taps(block_size=SIZE))
    assert not report.changed and histogram(same) == histogram(graph)


def test_logits_have_the_places_of_the_models_tokens() -> None:
    logits = torch.randn(3, 4, generator=GEN)
    graph = trace(lambda x: x * 1.0, x=step(logits))
    wide, _ = apply(graph, widen_logits(vocab_size=9))
    offsets = torch.tensor([2, 7, 4, -3])  # to tokens 2, 8, 6 and 0
    values = Values.of(x=step(logits), d2t=weight(ID_MAP, offsets))
    out = run(wide, values)
    assert out.shape == (3, 9)
    torch.testing.assert_close(out[:, [2, 8, 6, 0]], logits)
    assert out[:, [1, 3, 4, 5, 7]].eq(float("-inf")).all()
    assert len(roles(wide, StepInput)) == 1
