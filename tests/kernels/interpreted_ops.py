"""The Triton ops against their references, under Triton's interpreter, on CPU tensors.

Run by test_ops_triton.py in a separate process, since TRITON_INTERPRET must be set before triton
is imported; or by hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted_ops.py`.
New memory is filled with NaN, so an element that a kernel forgets to write fails its test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import fast_interpreter  # noqa: F401 - the tests take a fraction of the time
import numpy as np
import op_cases
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from state_draws import CONV_OPS, STATE_OPS, state_cases
from tiers import tiered
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels import conv_recurrence, delta_rule
from llmc.kernels.cache_dtype import (
    FP8,
    cache_dtypes,
    rotate,
    row_scales,
    to_cache,
    to_int8,
    zero_blocks,
)
from llmc.kernels.paged_attention import make_case, paged_attention
from llmc.kernels.registry import OPS, Impl, Op
from llmc.kernels.rope_attention import make_rope_case
from llmc.kernels.sample import filter_logits, gumbel
from llmc.kernels.state_cases import make_step
from llmc.kernels.triton import act_mul, define, sample_rows
from llmc.kernels.triton import delta_rule as triton_delta_rule
from llmc.kernels.triton import launch as launch_module
from llmc.kernels.triton import paged_attention as triton_attention
from llmc.kernels.triton import rope_attention as triton_rope
from llmc.kernels.triton.attention_tiles import TRITON_SPECIALIZES
from llmc.kernels.triton.configs import AttentionConfig
from llmc.kernels.triton.launch import KernelError, Launch, interpreted

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NAMES = sorted(name for name, op in OPS.items() if any(i.name == "triton" for i in op.impls))
few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def no_kernel_is_replaced(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """A kernel that cannot be interpreted would be replaced with the reference, which equals it."""
    yield
    if "cannot_be_compiled" not in request.node.name:
        replaced = [r.getMessage() for r in caplog.get_records("call") if r.name == define.__name__]
        assert not replaced


@pytest.fixture
def cut_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tiles and ranges, so that short contexts are divided as long ones are."""
    config = AttentionConfig(
        block_m=16,
        block_n=16,
        num_warps=4,
        num_stages=1,
        waves=4,
        min_tiles=1,
        combine_rows=4,
        combine_splits=2,
    )
    monkeypatch.setattr(triton_attention, "attention_config", lambda *args: config)


def triton_impl(op: Op) -> Impl:
    return next(impl for impl in op.impls if impl.name == "triton")


def copies(case: tuple[Any, ...]) -> list[Any]:
    """Clones that keep the strides: some cases are views of a packed projection."""
    return [
        a.clone(memory_format=torch.preserve_format) if isinstance(a, Tensor) else a for a in case
    ]


def check(op: Op, case: tuple[Any, ...], dtype: torch.dtype) -> None:
    want_args, args = copies(case), copies(case)
    for i, given_arg in enumerate(case):
        if isinstance(given_arg, Tensor) and not given_arg.is_contiguous():
            args[i] = given_arg  # as strided as the model makes it; such arguments are only read
    impl = triton_impl(op)
    assert impl.available()
    assert impl.supports(**op.bind(args))
    want = op.reference(*want_args)
    got = impl.op()(*args)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    if want is not None:
        torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
    for mine, theirs in zip(args, want_args, strict=True):
        if not isinstance(mine, Tensor):
            continue
        if op_cases.is_narrowed(mine, dtype):
            op_cases.assert_same_codes(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerance)


def test_the_interpreter_is_on_and_memory_is_poisoned() -> None:
    assert interpreted()
    assert torch.empty(4).isnan().all()
    assert torch.zeros(1).new_empty(4).isnan().all()


@triton.jit
def cast_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def test_the_interpreter_rounds_as_gpus_do() -> None:
    exact = torch.randn(1016).bfloat16().float()
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-40, 0.0])
    for step in (0, 1 << 14, 1 << 15, 3 << 14):  # exact, below a tie, ties, above one
        between = (exact.view(torch.int32) + step).view(torch.float32)
        x = torch.cat((between, special, -special[-1:]))
        out = torch.empty(1024, dtype=torch.bfloat16)
        cast_kernel[(1,)](x, out, x.numel())
        want = x.bfloat16()
        same = out.view(torch.int16) == want.view(torch.int16)
        assert (same | (out.isnan() & want.isnan())).all()


def test_the_interpreter_makes_masks_of_comparisons() -> None:
    """Of a scalar's too, which is made a block where the tests' own interpreter does not."""
    builder = interpreter.interpreter_builder
    one = builder.get_int32(1)
    positive = builder.create_icmpSGT(one, builder.get_int32(0))
    assert positive.dtype == tl.int1
    assert builder.create_splat(tl.block_type(tl.int1, [4]), positive).data.dtype == bool


def test_every_op_of_a_step_has_a_triton_version() -> None:
    assert set(OPS) - set(NAMES) == op_cases.WITHOUT_TRITON


@pytest.mark.parametrize("dtype", tiered(TOLERANCE, torch.float32), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_registered_cases(name: str, dtype: torch.dtype) -> None:
    # float16 differs from bfloat16 by its conversions alone: one case of each kind shows them
    most = 1 if dtype == torch.float16 else None
    cases = [case for maker in OPS[name].case_makers for case in islice(maker(CPU, dtype), most)]
    cases = [case for case in cases if not op_cases.rounds(name, case)]  # which is x86's alone
    assert cases
    # where a tanh is 1, an exponential may overflow to infinity, of which NumPy warns
    overflow: Literal["ignore", "warn"] = "ignore" if name == "activate" else "warn"
    with np.errstate(over=overflow):
        for case in cases:
            check(OPS[name], case, dtype)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sort_experts"])  # torch's
def test_an_op_whose_kernel_cannot_be_compiled_runs_its_reference(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of its kernels that is, also where an earlier one has changed an argument."""
    op = OPS[name]
    case = next(op.case_makers[0](CPU, torch.float32))
    call = triton_impl(op).op()
    want = op_cases.effect(op.reference, case)
    queue = Launch._queue
    queued: list[Launch] = []
    fails_at = -1

    def counted(launch: Launch) -> None:
        queued.append(launch)
        if len(queued) - 1 == fails_at:
            raise OutOfResources(300_000, 232_448, "shared memory")
        queue(launch)

    monkeypatch.setattr(Launch, "_queue", counted)
    op_cases.effect(call, case)
    num_launches = len(queued)
    assert num_launches > 0
    for fails_at in range(num_launches):
        monkeypatch.setattr(launch_module, "_uncompilable", {})
        queued.clear()
        for got, expected in zip(op_cases.effect(call, case), want, strict=True):
            assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
        assert len(queued) == fails_at + 1
        op_cases.effect(call, case)
        assert len(queued) <= 2 * fails_at + 1, "the compiler was asked again"
    records = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(records) == 1 and name in records[0].getMessage()
    assert "Required: 300000" in records[0].getMessage()


def test_too_few_registers_are_no_fault_of_the_same_kernel_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search for launch options goes back to the code's own after those that do not compile."""
    case = next(OPS["act_mul"].case_makers[0](CPU, torch.float32))
    (launch,) = act_mul.plan(*case).launches
    queued: list[int | None] = []

    def queue(launch: Launch) -> None:
        queued.append(launch.max_registers)
        if launch.max_registers == 16:
            raise PTXASError("Insufficient registers (24) to compile instruction")

    monkeypatch.setattr(Launch, "_queue", queue)
    monkeypatch.setattr(launch_module, "_uncompilable", {})
    for _ in range(2):
        with pytest.raises(KernelError, match="Insufficient registers"):
            replace(launch, max_registers=16).run()
        replace(launch, max_registers=128).run()
        launch.run()
    assert queued == [16, 128, None, 128, None]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        InterpreterError("an illegal memory access: these tests must see what is wrong"),
    ],
    ids=["of a GPU", "of the interpreter"],
)
def test_only_errors_of_the_compiler_are_for_the_reference(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access, the GPU computes nothing anymore, and the reference can't either."""
    op = OPS["act_mul"]
    case = next(op.case_makers[0](CPU, torch.float32))

    def illegal(launch: Launch) -> None:
        raise error

    monkeypatch.setattr(Launch, "_queue", illegal)
    with pytest.raises(type(error), match="illegal memory access"):
        triton_impl(op).op()(*case)


@pytest.mark.parametrize("name", NAMES)
def test_schema_and_fake(name: str) -> None:
    op = OPS[name]
    case = next(op.case_makers[0](CPU, torch.float32))
    overload = triton_impl(op).op()
    assert str(overload._schema) == str(op.overload._schema).replace("llmc::", "llmc_triton::")
    report = torch.library.opcheck(overload, case, test_utils=("test_schema", "test_faketensor"))
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_whole_sampler_over_chunks_of_tokens_and_of_history(ahead: int) -> None:
    """Three chunks of tokens, more history than is counted at a time, and every kind of change."""
    gen = torch.Generator().manual_seed(ahead)
    rows, vocab, context = 4, 5000, 2500
    history = torch.randint(-1, vocab + 9, (rows, context), generator=gen).int()
    history[2, 1998:2000] = torch.tensor([7, 4999])
    bias_token = torch.tensor([[-1, -1], [4999, 3], [4100, 4100], [0, 2047]]).int()
    words = torch.full((rows, 2, 3), -1).int()
    words[1, 0, 2], words[2, 0], words[2, 1, 2] = 12, torch.tensor([7, 4999, 4100]), vocab + 1
    case = (
        torch.randn(rows, vocab, generator=gen),
        torch.tensor([3, 0, 2, 1]),
        torch.tensor([2500, 1, 2000, 1500]).int(),
        history,
        torch.tensor([1, 700, 1998, 30]).int(),
        torch.tensor([1.0, 1.3, 0.8, 1.0]),
        torch.tensor([0.0, 0.5, 0.0, 0.0]),
        torch.tensor([0.0, 0.2, -0.4, 0.0]),
        torch.tensor([0, 1100, 1, 9]).int(),
        bias_token,
        torch.tensor([9.0, 8.0]).repeat(rows, 1),
        torch.full((rows, 2), 10_000).int(),
        torch.tensor([0, 0, 1, 0]).int(),
        torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32), generator=gen).int(),
    )
    sampling = (
        words.flatten(1), 3, torch.tensor([0.0, 0.9, 1.0, 0.0]), torch.tensor([0, 40, 0, 0]).int(),
        torch.tensor([1.0, 0.9, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.05, 0.0]),
        torch.arange(rows) + 5, ahead,
    )  # fmt: skip
    check(OPS["process_logits"], case, torch.float32)
    check(OPS["sample_rows"], (*case, *sampling), torch.float32)
    banned = (*case[:-2], torch.zeros(rows).int(), case[-1])
    plan = sample_rows.plan(*banned, *sampling)
    plan.run()
    processed = plan.launches[1].args["logits"]
    want = OPS["process_logits"].reference(*banned)
    OPS["ban_words"].reference(want, *case[1:5], words.flatten(1), 3)
    torch.testing.assert_close(processed, want, rtol=2e-5, atol=2e-5)
    assert processed.isinf().sum() == 2


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[Any, ...]:
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        context = draw(st.one_of(st.just(0), st.integers(1, 90)))
        lengths.append((draw(st.integers(0, min(context, 21))), context))
    if not any(new for new, _ in lengths):
        lengths.append((1, 5))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    v_dim, shared = draw(st.sampled_from([16, 40, 64])), draw(st.booleans())
    caches = cache_dtypes(torch.float32)
    return make_case(
        lengths,
        kv_heads * draw(st.sampled_from([1, 2, 3, 5, 20])),
        kv_heads,
        draw(st.sampled_from([16, 24, 48, 80, 112])) + v_dim * shared,
        v_dim,
        draw(st.sampled_from([8, 16, 32])),
        CPU,
        torch.float32,
        window=draw(st.sampled_from([0, 0, 1, 7, 30])),
        chunk=draw(st.sampled_from([0, 0, 12, 16])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        token_sinks=draw(st.booleans()),
        distances=draw(st.sampled_from([0, 0, 1, 9, 60])),
        cache=draw(st.sampled_from(caches[:-1] if shared else caches)),
        shared=shared,
        seed=draw(st.integers(0, 99)),
    )


@few
@given(case=attention_cases())
def test_attention_over_random_shapes(case: tuple[Any, ...], cut_fine: None) -> None:
    check(OPS["paged_attention"], case, torch.float32)


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 50},
        {"chunk": 64},
        {"sinks": True, "softcap": 3.0},
        {"alibi": True},
        {"distances": 300, "token_sinks": True},
    ],
    ids=str,
)
def test_attention_divides_a_long_context_among_short_ones(
    features: dict[str, Any], cut_fine: None
) -> None:
    lengths = [(1, 3), (1, 400), (0, 0), (6, 250), (1, 17)]
    case = make_case(lengths, 4, 2, 32, 32, 16, CPU, torch.float32, **features)
    bound = paged_attention.bind(case)
    plan = triton_attention.plan(*case[:14], distance_bias=bound["distance_bias"])
    (launch,) = plan.launches
    assert launch.constants["SPLIT"]
    check(OPS["paged_attention"], case, torch.float32)


def test_parts_are_combined_alike_whichever_is_last(
    cut_fine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([(1, 400), (1, 3), (6, 250)], 6, 2, 32, 32, 16, CPU, torch.float32)
    want = triton_attention.plan(*case).run()
    builder = interpreter.interpreter_builder
    forward = builder.set_grid_idx

    def backward(x: int, y: int, z: int) -> None:
        forward(builder.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", backward)
    plan = triton_attention.plan(*case)
    assert torch.equal(plan.run(), want)
    assert not plan.launches[0].args["counters"].any()
    assert torch.equal(plan.run(), want)  # as a graph does when it is replayed


@st.composite
def rope_cases(draw: st.DrawFn) -> tuple[Any, ...]:
    """At most as many tokens as requests, of which one request may have several."""
    contexts = draw(st.lists(st.one_of(st.just(0), st.integers(1, 120)), min_size=1, max_size=5))
    lengths = [(min(1, context), context) for context in contexts]
    several = draw(st.integers(0, 6))
    if several:
        lengths += [(several, several + draw(st.integers(0, 80))), *[(0, 0)] * (several - 1)]
    if not any(new for new, _ in lengths):
        lengths.append((1, 5))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    dim = draw(st.sampled_from([16, 48, 80]))
    return make_rope_case(
        lengths,
        kv_heads * draw(st.sampled_from([1, 3, 20])),
        kv_heads,
        dim,
        draw(st.sampled_from([16, 40])),
        draw(st.sampled_from([8, 16])),
        CPU,
        torch.float32,
        width=draw(st.sampled_from([8, dim])),
        interleaved=draw(st.booleans()),
        normed=draw(st.booleans()),
        padding=draw(st.integers(0, 1)),
        window=draw(st.sampled_from([0, 0, 1, 7, 30])),
        chunk=draw(st.sampled_from([0, 0, 12, 16])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        cache=draw(st.sampled_from(cache_dtypes(torch.float32))),
        seed=draw(st.integers(0, 99)),
    )


@few
@given(case=rope_cases())
def test_one_launch_writes_and_attends_as_two_do(case: tuple[Any, ...], cut_fine: None) -> None:
    check(OPS["rope_attention"], case, torch.float32)
    (launch,) = triton_rope.plan(*copies(case)).launches
    assert launch.constants["ROPE"]
    one, two = copies(case), copies(case)
    got = triton_rope.plan(*one).run()
    given_two = OPS["rope_attention"].bind(two)
    names = [name for name in OPS["rope_write"].defaults if name in given_two]
    query = triton_impl(OPS["rope_write"]).op()(*(given_two[name] for name in names))
    names = [name for name in OPS["paged_attention"].defaults if name in given_two]
    want = triton_impl(OPS["paged_attention"]).op()(query, *(given_two[name] for name in names[1:]))
    assert torch.equal(got, want)
    for mine, theirs in zip(one, two, strict=True):
        if isinstance(mine, Tensor):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_more_tokens_than_requests_take_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    run = Launch.run

    def recorded(launch: Launch) -> None:
        launched.append((launch.kernel.__name__, launch.constants.get("ROPE", False)))
        run(launch)

    monkeypatch.setattr(Launch, "run", recorded)
    for lengths in ([(1, 20), (1, 3)], [(2, 20), (1, 3)]):
        case = make_rope_case(lengths, 4, 2, 32, 32, 16, CPU, torch.float32)
        triton_impl(OPS["rope_attention"]).op()(*case)
    decode, *verify = launched
    assert decode == ("attention_kernel", True)
    assert verify == [("rope_write_kernel", False), ("attention_kernel", False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (40, 24)])
@pytest.mark.parametrize(("block_size", "rows"), [(16, 16), (64, 16), (16, 64)])
@pytest.mark.usefixtures("cut_fine")
def test_tiles_of_keys_come_through_descriptors(
    block_size: int, rows: int, dims: tuple[int, int], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`rows` of queries in a tile: with 64, loops that a GPU's compiler divides among warps."""
    config = replace(
        triton_attention.attention_config(), block_m=rows, descriptors=True, warp_specialize=True
    )
    monkeypatch.setattr(triton_attention, "attention_config", lambda *args: config)
    lengths = [(9, 200), (1, 1), (0, 0), (21, 21), (1, 70)]
    case = make_case(lengths, 6, 2, *dims, block_size, CPU, dtype, softcap=5.0, sinks=True)
    of = paged_attention.bind(case)
    for r, (_, context) in enumerate(lengths):  # slots after the last token can hold anything
        block = int(of["block_table"][r, max(context - 1, 0) // block_size])
        if context % block_size:
            of["key_cache"][block, :, context % block_size :] = float("nan")
            of["value_cache"][block, :, context % block_size :] = float("nan")
    (launch,) = triton_attention.plan(*case).launches
    assert launch.constants["DESCRIPTORS"] and isinstance(
        launch.args["key_cache"], TensorDescriptor
    )
    assert launch.constants["SPECIALIZE"] == (rows == 64 and TRITON_SPECIALIZES)
    check(OPS["paged_attention"], case, dtype)


@pytest.mark.parametrize(
    "features", [{"window": 20}, {"chunk": 32}, {"shared": True}, {"cache": FP8[0]}], ids=str
)
@pytest.mark.usefixtures("cut_fine")
def test_other_tiles_are_loaded_by_pointers(
    features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(triton_attention.attention_config(), descriptors=True)
    monkeypatch.setattr(triton_attention, "attention_config", lambda *args: config)
    dim = 48 if "shared" in features else 32
    case = make_case([(9, 100), (1, 30)], 4, 2, dim, 32, 16, CPU, torch.float32, **features)
    of = paged_attention.bind(case)
    plan = triton_attention.plan(
        *case[:12], k_scale=of["k_scale"], v_scale=of["v_scale"], v_dim=of["v_dim"]
    )
    assert not plan.launches[0].constants["DESCRIPTORS"]
    check(OPS["paged_attention"], case, torch.float32)


@pytest.mark.parametrize("requests", [15, 16])
def test_a_full_vector_of_requests_leaves_room_for_the_tail(requests: int, cut_fine: None) -> None:
    """Queries past the last request get zeros, also where the requests fill their vector."""
    case = make_case([(1, 40), *[(1, 9)] * (requests - 1)], 2, 1, 16, 16, 16, CPU, torch.float32)
    query = torch.cat((case[0], torch.full((21, 2, 16), float("nan"))))
    plan = triton_attention.plan(query, *case[1:12])
    assert plan.launches[0].constants["ROWS"] == 16
    check(OPS["paged_attention"], (query, *case[1:]), torch.float32)


def test_attention_launches_depend_on_shapes_only(cut_fine: None) -> None:
    one, other = (
        make_case(lengths, 4, 2, 32, 32, 16, CPU, torch.float32)
        for lengths in ([(1, 300), (1, 1), (1, 2)], [(1, 1), (1, 299), (1, 300)])
    )
    for first, second in zip(
        triton_attention.plan(*one).launches, triton_attention.plan(*other).launches, strict=True
    ):
        assert (first.grid, first.constants) == (second.grid, second.constants)


def test_attention_writes_zeros_for_padding(cut_fine: None) -> None:
    case = list(make_case([(2, 20), (1, 30)], 4, 2, 32, 32, 16, CPU, torch.float32))
    case[0] = torch.cat([case[0], torch.full((3, 4, 32), float("nan"))])  # past query_start[R]
    case[4] = torch.tensor([20, 0], dtype=torch.int32)  # a request of no context
    out = triton_attention.plan(*case).run()
    assert out[:2].isfinite().all()
    assert torch.equal(out[2:], torch.zeros(4, 4, 32))


@pytest.mark.parametrize("cache", FP8, ids=str)
def test_every_code_of_a_float8_cache_is_written_and_read(cache: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(cache).float()
    finite = codes[codes.isfinite()].sort().values
    values = torch.cat([codes, (finite[1:] + finite[:-1]) / 2, torch.tensor([1e6, -1e9, 1e-9])])
    key = torch.nn.functional.pad(values, (0, 512 + 32 - values.numel())).view(17, 2, 16)
    made = [torch.zeros(17, 2, 1, 16).to(cache) for _ in range(2)]
    triton_impl(OPS["write_kv"]).op()(key, key, *made, torch.arange(17))
    for got in made:
        op_cases.assert_same_codes(got[:, :, 0], to_cache(key, cache, None))
    ones = torch.arange(17, dtype=torch.int32) + 1
    starts = torch.cat([ones[:1] * 0, ones])
    for native in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_attention, "converts", lambda device, native=native: native)
            read = triton_impl(OPS["paged_attention"]).op()(
                torch.zeros_like(key), torch.zeros_like(made[0]), made[1], starts, ones // ones,
                ones[:, None] - 1, 1.0, 0, 0, 0.0, None, None,
            )  # fmt: skip
        want = made[1][:, :, 0].float()
        if native:  # the interpreter's own conversion, not a GPU's, knows no NaN in this format
            read, want = read[want.isfinite()], want[want.isfinite()]
        torch.testing.assert_close(read, want, rtol=0, atol=0, equal_nan=True)


def test_rows_of_an_int8_cache_are_written_as_by_the_reference() -> None:
    key = torch.tensor(op_cases.INT8_ROWS).view(-1, 1, 4)
    made = [zero_blocks(1, 1, 8, 4, torch.int8) for _ in range(2)]
    triton_impl(OPS["write_kv"]).op()(key, key, *made, torch.arange(len(key)))
    for got, rows in zip(made, (rotate(key), key), strict=True):
        want, scales = to_int8(rows[:, 0])
        assert torch.equal(got[0, 0, : len(key)], want)
        torch.testing.assert_close(
            row_scales(got)[0, 0, : len(key)], scales, rtol=2e-7, atol=0, equal_nan=True
        )


def test_attention_reads_a_strided_query_and_a_sliced_table() -> None:
    case = list(make_case([(1, 33), (4, 9)], 4, 2, 32, 32, 8, CPU, torch.float32))
    packed = torch.cat([case[0].flatten(1), torch.randn(5, 77)], dim=1)
    case[0] = packed[:, :128].unflatten(1, (4, 32))
    case[5] = torch.nn.functional.pad(case[5], (0, 6))[:, : case[5].shape[1]]
    assert not case[0].is_contiguous() and not case[5].is_contiguous()
    check(OPS["paged_attention"], tuple(case), torch.float32)


def sample_case(rows: int, vocab: int, seed: int, *, rounded: bool) -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=gen) * 3

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), (rows,), generator=gen)]

    return (
        logits.round() if rounded else logits,  # rounded: many equal logits
        pick(0.0, 0.3, 0.8, 1.0, 2.5),
        pick(0, 0, 1, 2, 5, 40, vocab, vocab + 3).int(),
        pick(1.0, 1.0, 0.9, 0.5, 0.05),
        pick(0.0, 0.0, 0.02, 0.4),
        torch.randint(-(2**62), 2**62, (rows,), generator=gen),
        torch.randint(0, 2**33, (rows,), generator=gen),
    )


@few
@given(vocab=st.integers(1, 5000), seed=st.integers(0, 99), rounded=st.booleans())
def test_sample_gives_the_tokens_of_the_reference(vocab: int, seed: int, rounded: bool) -> None:
    case = sample_case(5, vocab, seed, rounded=rounded)
    got = triton_impl(OPS["sample"]).op()(*case)
    assert torch.equal(got, OPS["sample"].reference(*case))


def test_sample_gives_the_tokens_of_the_reference_for_many_rows() -> None:
    case = sample_case(80, 50, 7, rounded=False)
    got = triton_impl(OPS["sample"]).op()(*case)
    assert torch.equal(got, OPS["sample"].reference(*case))
    assert got.unique().numel() > 20, "the rows hardly differ: this test would show little"


@pytest.mark.parametrize("top_k,top_p,min_p", [(0, 1.0, 0.0), (4, 0.9, 0.1)], ids=str)
def test_draws_follow_the_references_distribution(top_k: int, top_p: float, min_p: float) -> None:
    draws, temperature = 80, 0.9  # few: the interpreter takes a tenth of a second for each
    logits = torch.tensor([1.2, 1.5, 0.5, 1.2, 0.0])
    column = torch.ones(draws)
    tokens = triton_impl(OPS["sample"]).op()(
        logits.expand(draws, -1).contiguous(),
        column * temperature, (column * top_k).int(), column * top_p, column * min_p,
        torch.arange(draws) * 7919 + 3, torch.arange(draws) % 11,
    )  # fmt: skip
    one = column[:1]
    kept = filter_logits(logits[None] / temperature, (one * top_k).int(), one * top_p, one * min_p)
    probability = kept[0].softmax(-1).double()
    counts = torch.bincount(tokens, minlength=logits.numel())
    live = probability > 0
    assert int(counts[~live].sum()) == 0
    expected = probability[live] / probability[live].sum() * draws
    assert stats.chisquare(counts[live].numpy(), expected.numpy()).pvalue > 1e-3


def test_sample_refuses_bad_rows_alone() -> None:
    logits = torch.randn(6, 3000)
    logits[0, 2999] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = float("-inf")
    logits[3, ::2] = float("-inf")
    zero, one = torch.zeros(6), torch.ones(6)
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    ids = torch.arange(6)
    case = (logits, temperature, torch.zeros(6, dtype=torch.int32), one, zero, ids, ids)
    got = triton_impl(OPS["sample"]).op()(*case)
    assert got[:3].tolist() == [-1, -1, -1]
    assert got[3:].min() >= 0
    assert torch.equal(got, OPS["sample"].reference(*case))


def test_noise_is_the_references_word_for_word() -> None:
    """Flat logits: the token is the argmax of the noise alone, over several chunks."""
    rows, vocab = 8, 4101
    seed, position = torch.arange(rows) * 2**40 - 3, torch.arange(rows) + 2**31
    one, zero = torch.ones(rows), torch.zeros(rows)
    got = triton_impl(OPS["sample"]).op()(
        torch.zeros(rows, vocab), one, zero.int(), one, zero, seed, position
    )
    assert torch.equal(got, gumbel(seed, position, vocab).argmax(-1))


@few
@given(vocab=st.integers(1, 5000), k=st.integers(0, 12), seed=st.integers(0, 99))
def test_token_logprobs_over_random_rows(vocab: int, k: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, vocab, generator=gen) * 6).round() / 2
    logits[1, ::2] = float("-inf")
    token = torch.randint(0, vocab, (3,), generator=gen)
    check(OPS["token_logprobs"], (logits, token, k), torch.float32)


@few
@given(
    vocab=st.integers(1, 3000),
    length=st.integers(1, 700),
    seed=st.integers(0, 99),
    biases=st.integers(1, 9),
)
def test_process_logits_over_random_tables(vocab: int, length: int, seed: int, biases: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows, samples = 4, 3

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen).int()

    prompt = ints(0, length + 1, rows)
    row = torch.randperm(rows, generator=gen)[:samples]
    case = (
        torch.randn(samples, vocab, generator=gen),
        row,
        torch.maximum(prompt[row], ints(0, length + 1, samples)),
        ints(-1, vocab + 2, rows, length),  # some tokens outside the vocabulary
        prompt,
        torch.tensor([1.0, 1.3, 0.7, 1.0]),
        torch.tensor([0.0, 0.5, 0.0, -0.3]),
        torch.tensor([0.2, 0.0, 0.0, 0.0]),
        ints(0, length + 2, rows),
        ints(-1, min(vocab, 5) + 1, rows, biases),  # often the same token twice
        torch.randn(rows, biases, generator=gen),
        ints(0, length + 1, rows, biases),
        torch.tensor([1, 0, 1, 0], dtype=torch.int32),
        ints(-(2**31), 2**31 - 1, rows, (vocab + 31) // 32),
    )
    check(OPS["process_logits"], case, torch.float32)


@settings(few, max_examples=4)
@pytest.mark.parametrize("name", [*STATE_OPS, *CONV_OPS])
@given(data=st.data())
def test_state_ops_over_random_steps(name: str, data: st.DataObject) -> None:
    check(OPS[name], data.draw(state_cases(name, torch.float32)), torch.float32)


@pytest.mark.parametrize("name", CONV_OPS)
@pytest.mark.parametrize("lengths", [[(1, 9), (1, 1), (1, 30)], [(1, 5), (2, 7), (0, 0)]], ids=str)
def test_a_recurrence_takes_its_convolution_over(
    name: str, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch, and whichever program comes last: it gives what both kernels give, bit for
    bit, and all counters are zero again."""
    gen = torch.Generator().manual_seed(0)
    make = conv_recurrence.make_delta_case, conv_recurrence.make_scan_case
    sizes = ((6, 32, 80, False, 3, 4), (4, 80, 2, 32, False, 4))
    which = CONV_OPS.index(name)
    case = make[which](make_step(lengths, gen, CPU), gen, torch.bfloat16, *sizes[which])
    parts = (
        (OPS["delta_rule"], conv_recurrence.delta_arguments),
        (OPS["selective_scan"], conv_recurrence.scan_arguments),
    )[which]
    want = op_cases.effect(conv_recurrence.in_turn(*parts, "triton"), case)
    launched = []
    queue = Launch._queue
    monkeypatch.setattr(Launch, "_queue", lambda launch: (launched.append(launch), queue(launch)))
    builder = interpreter.interpreter_builder
    forward = builder.set_grid_idx

    def backward(x: int, y: int, z: int) -> None:
        forward(*(size - 1 - i for size, i in zip(builder.grid_dim, (x, y, z), strict=True)))

    for order in (forward, backward):
        monkeypatch.setattr(builder, "set_grid_idx", order)
        got = op_cases.effect(triton_impl(OPS[name]).op(), case)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        assert not launched[-1].args["counter"].any()
    assert len(launched) == 2 and launched[0].grid[2] > 1


def test_expert_linear_gives_zeros_for_unknown_experts() -> None:
    gen = torch.Generator().manual_seed(0)
    expert = torch.tensor([2, -1, 0, 3, 2, 9, 2])
    case = (torch.randn(7, 20, generator=gen), torch.randn(3, 24, 20, generator=gen), None, expert)
    check(OPS["expert_linear"], (*case, False), torch.float32)


def test_no_tokens_launch_nothing() -> None:
    case = next(OPS["write_kv"].case_makers[0](CPU, torch.float32))
    key, value, key_cache, value_cache, slots, *_ = case
    triton_impl(OPS["write_kv"]).op()(key[:0], value[:0], key_cache, value_cache, slots[:0])
    assert not key_cache.any()


@pytest.mark.parametrize("kind", ["drawn", "one key", "fades at once", "never fades", "raw"])
def test_the_delta_rule_by_chunks(kind: str) -> None:
    """Prompts of several chunks, one continued, beside a decode row: as token after token."""
    gen = torch.Generator().manual_seed(0)
    step = make_step([(1, 9), (37, 37), (18, 40), (1, 0)], gen, CPU)
    group, raw = (2, True) if kind == "raw" else (1, False)
    case = list(delta_rule.make_case(step, gen, torch.float32, 2, 20, 40, False, group, raw))
    query, key, value, decay, beta = case[:5]
    if kind == "one key":  # the corrections' system is as far from the identity as it can be
        key[:] = key[:1]
        beta.fill_(1.0)
        decay.fill_(0.0)
    elif kind == "fades at once":
        decay.fill_(-90.0)
    elif kind == "never fades":
        decay.fill_(0.0)
    plan = triton_delta_rule.plan(*copies(tuple(case)))
    assert plan.launches[-1].kernel.__name__ == "delta_chunks_kernel"
    check(OPS["delta_rule"], tuple(case), torch.float32)
    in_steps = triton_delta_rule.plan(*delta_rule.make_case(make_step([(1, 5)] * 3, gen, CPU), gen,
                                      torch.float32, 2, 20, 40, False))  # fmt: skip
    assert in_steps.launches[0].kernel.__name__ == "delta_rule_kernel"
