"""The kernels that a decode step launches in each further layer, as on a GPU.

Two tiny models that differ by one layer start with the passes for GPUs and every op in Triton. Then
a step of each runs without its kernels: they are counted together with torch's own ops that
compute, of which each launches at least one kernel (Inductor fuses some of them, from -O2 on). The
numbers in LAUNCHES may only become lower.

The same steps show which launch options a model asks for: those that bench.tune measures.

Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import bench_package  # noqa: F401 - makes `bench` importable
import fast_interpreter  # noqa: F401 - the tests take a fraction of the time
import pytest
import tiny_engine
import torch
from shared_captures import sharing  # noqa: F401 - bench.tune captures the models too
from tiers import tiered
from tiny_configs import save_random, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from bench import linear_work, tune
from bench.program_work import program_work
from llmc.kernels.quantized_linear import FORMATS
from llmc.kernels.registry import OPS
from llmc.kernels.triton import (
    dependent_launch,
    expert_linear,
    fused_linear,
    paged_attention,
    quantized_linear,
)
from llmc.kernels.triton.launch import Launch
from llmc.passes.options import PipelineOptions
from llmc.runner.graphs import StepShape
from llmc.runner.model_runner import ModelRunner
from llmc.startup import compile as compile_module
from llmc.startup import profile

DEEP = 1100  # inputs of a linear that is split along its depth
DIVISIBLE = {"intermediate_size": 64, "moe_intermediate_size": 32}  # for all formats
BLOCKS = 1024  # of a context that is long enough for attention to divide it
MULTIPROCESSORS = 132  # of an H100
FEW, FUSED, MANY = 3, 9, 17  # up to FEW_ROWS, up to FUSED_ROWS, and more
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"intermediate_size": DEEP, **SIZES}),
    "dense, normed twice": ("gemma3_text", {"intermediate_size": DEEP, **SIZES}),
    "dense, normed after": ("exaone4", {"intermediate_size": DEEP, **SIZES}),
    "dense, rotated first": ("hunyuan_v1_dense", {"intermediate_size": DEEP, **SIZES}),
    "dense, heads normed together": ("olmo2", {"intermediate_size": DEEP, **SIZES}),
    "dense, ungated": ("arcee", {"intermediate_size": DEEP, **SIZES}),
    "dense, centered": ("starcoder2", {"intermediate_size": DEEP, **SIZES}),
    "dense, centered, parallel": ("gpt_neox", {"intermediate_size": DEEP}),
    "routed": ("qwen3_moe", {**SIZES}),
    "routed, clamped": ("gpt_oss", {}),
    "routed, heads normed together": (
        "olmoe",
        {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "routed, corrected": ("glm4_moe", {"n_group": 4, "topk_group": 2, "n_routed_experts": 8}),
    "latent": ("deepseek_v3", {}),
    "hybrid": ("qwen3_next", {"mlp_only_layers": [0, 1, 2], **SIZES}),
    "hybrid, routed": ("qwen3_next", {**SIZES}),
    "recurrent": ("mamba2", {}),
    "hybrid, gated convolution": ("lfm2", {**SIZES}),
}
LAYERS = {
    "dense": "full_attention",
    "dense, normed twice": "full_attention",
    "dense, normed after": "full_attention",
    "routed, clamped": "full_attention",
    "hybrid": "linear_attention",
    "hybrid, routed": "linear_attention",
    "hybrid, gated convolution": "conv",
}
QUANTIZED = (
    "dense in int4", "dense, normed twice in int4", "dense, centered in int4",
    "routed, corrected in int4",
)  # fmt: skip
EXACT = {"dtype": "bfloat16", "activation_bits": 32}  # inputs are not rounded, as on GPUs
ROWS = (1, FEW, FUSED, MANY)
# what a further layer launches for each number of rows; "step": what every step launches besides
LAUNCHES: dict[str, tuple[str, ...]] = {
    "dense": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        ("8: act_mul_kernel, 2 aten.addmm_, 2 aten.linear, attention_kernel, 2 norm_kernel"),
    ),
    "dense, normed twice": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "7: attention_kernel, 4 few_rows_kernel, 2 norm_kernel",
        "8: act_mul_kernel, 4 aten.linear, attention_kernel, 2 norm_kernel",
    ),
    "dense, normed after": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "7: attention_kernel, 4 few_rows_kernel, 2 norm_kernel",
        "8: act_mul_kernel, 4 aten.linear, attention_kernel, 2 norm_kernel",
    ),
    "dense, rotated first": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        ("8: act_mul_kernel, 2 aten.addmm_, 2 aten.linear, attention_kernel, 2 norm_kernel"),
    ),
    "dense, heads normed together": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "7: attention_kernel, 4 few_rows_kernel, 2 norm_kernel",
        "8: act_mul_kernel, 4 aten.linear, attention_kernel, 2 norm_kernel",
    ),
    "dense, ungated": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        ("8: act_mul_kernel, 2 aten.addmm_, 2 aten.linear, attention_kernel, 2 norm_kernel"),
    ),
    "dense, centered": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "7: attention_kernel, 4 few_rows_kernel, 2 norm_kernel",
        ("10: act_mul_kernel, 2 aten.add_, 4 aten.linear, attention_kernel, 2 norm_kernel"),
    ),
    "dense, centered, parallel": (
        "5: attention_kernel, 4 few_rows_kernel",
        "5: attention_kernel, 4 few_rows_kernel",
        "7: attention_kernel, 4 few_rows_kernel, 2 norm_kernel",
        ("10: act_mul_kernel, 2 aten.add_, 4 aten.linear, attention_kernel, 2 norm_kernel"),
    ),
    "step": (
        (
            "7: aten.embedding, aten.index_select, draw_kernel, few_rows_kernel, "
            "norm_kernel, process_kernel, record_tokens_kernel"
        ),
        (
            "7: aten.embedding, aten.index_select, draw_kernel, few_rows_kernel, "
            "norm_kernel, process_kernel, record_tokens_kernel"
        ),
        (
            "7: aten.embedding, aten.index_select, draw_kernel, few_rows_kernel, "
            "norm_kernel, process_kernel, record_tokens_kernel"
        ),
        (
            "7: aten.embedding, aten.index_select, aten.linear, draw_kernel, norm_kernel, "
            "process_kernel, record_tokens_kernel"
        ),
    ),
    "routed": (
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        (
            "9: attention_kernel, choose_experts_kernel, 2 expert_kernel, 3 few_rows_kernel, "
            "norm_kernel, sum_experts_kernel"
        ),
        (
            "10: aten.addmm_, 2 aten.linear, attention_kernel, choose_experts_kernel, "
            "2 expert_kernel, 2 norm_kernel, sum_experts_kernel"
        ),
    ),
    "routed, heads normed together": (
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        (
            "9: attention_kernel, choose_experts_kernel, 2 expert_kernel, 3 few_rows_kernel, "
            "norm_kernel, sum_experts_kernel"
        ),
        (
            "10: aten.addmm_, 2 aten.linear, attention_kernel, choose_experts_kernel, "
            "2 expert_kernel, 2 norm_kernel, sum_experts_kernel"
        ),
    ),
    "routed, clamped": (
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        (
            "9: attention_kernel, choose_experts_kernel, 2 expert_kernel, 3 few_rows_kernel, "
            "norm_kernel, sum_experts_kernel"
        ),
        (
            "11: aten.add_, 3 aten.linear, attention_kernel, choose_experts_kernel, "
            "2 expert_kernel, 2 norm_kernel, sum_experts_kernel"
        ),
    ),
    "routed, corrected": (
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        "6: attention_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        (
            "9: attention_kernel, choose_experts_kernel, 2 expert_kernel, 3 few_rows_kernel, "
            "norm_kernel, sum_experts_kernel"
        ),
        (
            "10: aten.addmm_, 2 aten.linear, attention_kernel, choose_experts_kernel, "
            "2 expert_kernel, 2 norm_kernel, sum_experts_kernel"
        ),
    ),
    "latent": (
        (
            "9: attention_kernel, 2 expert_kernel, 3 few_rows_kernel, head_product_kernel, "
            "latent_query_kernel, route_kernel"
        ),
        (
            "9: attention_kernel, 2 expert_kernel, 3 few_rows_kernel, head_product_kernel, "
            "latent_query_kernel, route_kernel"
        ),
        (
            "12: attention_kernel, choose_experts_kernel, 2 expert_kernel, 4 few_rows_kernel, "
            "head_product_kernel, latent_query_kernel, norm_kernel, sum_experts_kernel"
        ),
        (
            "16: aten.addmm_, 2 aten.bmm, aten.copy_, 3 aten.linear, attention_kernel, "
            "choose_experts_kernel, 2 expert_kernel, 3 norm_kernel, rope_write_latent_kernel, "
            "sum_experts_kernel"
        ),
    ),
    "hybrid": (
        "5: delta_rule_kernel, 4 few_rows_kernel",
        "5: delta_rule_kernel, 4 few_rows_kernel",
        "5: delta_rule_kernel, 4 few_rows_kernel",
        (
            "9: act_mul_kernel, 2 aten.addmm_, 2 aten.linear, "
            "delta_rule_kernel, gated_norm_kernel, 2 norm_kernel"
        ),
    ),
    "hybrid, routed": (
        "6: delta_rule_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        "6: delta_rule_kernel, 2 expert_kernel, 2 few_rows_kernel, route_kernel",
        (
            "9: choose_experts_kernel, delta_rule_kernel, 2 expert_kernel, 3 few_rows_kernel, "
            "norm_kernel, sum_experts_kernel"
        ),
        (
            "11: aten.addmm_, 2 aten.linear, choose_experts_kernel, delta_rule_kernel, "
            "2 expert_kernel, gated_norm_kernel, 2 norm_kernel, sum_experts_kernel"
        ),
    ),
    "hybrid, gated convolution": (
        "5: causal_conv_kernel, 4 few_rows_kernel",
        "5: causal_conv_kernel, 4 few_rows_kernel",
        "5: causal_conv_kernel, 4 few_rows_kernel",
        "8: act_mul_kernel, 2 aten.addmm_, 2 aten.linear, causal_conv_kernel, 2 norm_kernel",
    ),
    "dense in int4": (
        "5: attention_kernel, 4 low_bit_kernel",
        "5: attention_kernel, 4 low_bit_kernel",
        "5: attention_kernel, 4 low_bit_kernel",
        "8: act_mul_kernel, attention_kernel, 4 low_bit_kernel, 2 norm_kernel",
    ),
    "dense, normed twice in int4": (
        "5: attention_kernel, 4 low_bit_kernel",
        "5: attention_kernel, 4 low_bit_kernel",
        "7: attention_kernel, 4 low_bit_kernel, 2 norm_kernel",
        "8: act_mul_kernel, attention_kernel, 4 low_bit_kernel, 2 norm_kernel",
    ),
    "dense, centered in int4": (
        "5: attention_kernel, 4 low_bit_kernel",
        "5: attention_kernel, 4 low_bit_kernel",
        "7: attention_kernel, 4 low_bit_kernel, 2 norm_kernel",
        "7: attention_kernel, 4 low_bit_kernel, 2 norm_kernel",
    ),
    "routed, corrected in int4": (
        "6: attention_kernel, 2 low_bit_expert_kernel, 2 low_bit_kernel, route_kernel",
        "6: attention_kernel, 2 low_bit_expert_kernel, 2 low_bit_kernel, route_kernel",
        (
            "10: aten.to, attention_kernel, choose_experts_kernel, few_rows_kernel, "
            "2 low_bit_expert_kernel, 2 low_bit_kernel, norm_kernel, sum_experts_kernel"
        ),
        (
            "11: aten.linear, aten.to, attention_kernel, choose_experts_kernel, "
            "2 low_bit_expert_kernel, 2 low_bit_kernel, 2 norm_kernel, sum_experts_kernel"
        ),
    ),
    "recurrent": (
        "3: 2 few_rows_kernel, selective_scan_kernel",
        "3: 2 few_rows_kernel, selective_scan_kernel",
        "3: 2 few_rows_kernel, selective_scan_kernel",
        ("5: aten.addmm_, aten.linear, gated_norm_kernel, norm_kernel, selective_scan_kernel"),
    ),
}


class Recorded(TorchDispatchMode):
    """The names of kernels and of torch ops that compute, in order, also inside our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.late: set[str] = set()  # kernels that start when the previous one has ended

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func.name().partition("::")
        if namespace != "aten":
            op = OPS[name]
            # called directly: the dispatcher would come back here
            [run] = [impl.run for impl in op.impls if impl.op() is func] or [op.reference]
            assert run is not None
            with self:
                return run(*op.bind(args, kwargs).values())
        out = func(*args, **kwargs)
        if func._schema.is_mutable or not _is_view(args, out) and "empty" not in name:
            self.names.append(f"aten.{func.__name__.partition('.')[0]}")
        if name == "addmm" and args[0].dim() == 2:
            self.names.append("aten.copy")  # of the matrix to which the product is added
        return out

    def record(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.names.append(launch.kernel.__name__)
            if not (launch.pdl and launch.constants["PDL"]):
                self.late.add(launch.kernel.__name__)


def _is_view(args: Any, out: Any) -> bool:
    given, made = (
        {t.untyped_storage().data_ptr() for t in tree_leaves(tree) if isinstance(t, Tensor)}
        for tree in (args, out)
    )
    return made <= given


def start(path: Path, **options: Any) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compile_module,
            "PipelineOptions",
            lambda **given: PipelineOptions(**{**given, "device_type": "cuda"}),
        )
        # Before it serves, an engine runs steps, which take the interpreter seconds.
        patch.setattr(Launch, "run", lambda launch: None)
        patch.setattr(profile, "_PROFILE_TOKENS_CPU", 16)
        patch.setattr(profile, "verify_packing", lambda *given, **named: None)
        return tiny_engine.start(path, max_num_seqs=MANY, **options).started.runner


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], ModelRunner]:
    """Starts a kind with so many layers, once for all tests: a start takes seconds."""

    @cache
    def once(kind: str, layers: int) -> ModelRunner:
        name, _, format = kind.partition(" in ")
        sizes = DIVISIBLE if format else {}
        path = save(name, layers, tmp_path_factory.mktemp("model"), **sizes)
        return start(path, **({**EXACT, "quantization": format} if format else {}))

    return once


def launches(runner: ModelRunner, rows: int) -> Counter[str]:
    """What a decode step of `rows` requests launches."""
    return Counter(recorded_step(runner, rows).names)


def recorded_step(runner: ModelRunner, rows: int) -> Recorded:
    recorded = Recorded()
    run_without_kernels(runner, StepShape.decode(rows), recorded, recorded.record)
    return recorded


def run_without_kernels(
    runner: ModelRunner,
    shape: StepShape,
    within: AbstractContextManager[object],
    record: Callable[[Launch], None],
) -> None:
    """Run a step of dummies, with `record` instead of each launch."""
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        inputs = runner._dummies(shape)
        inputs = {**inputs, "block_table": inputs["block_table"].new_zeros(shape.requests, BLOCKS)}
        for module in (fused_linear, quantized_linear, paged_attention):
            patch.setattr(module, "multiprocessors", lambda device: MULTIPROCESSORS)
        patch.setattr(Launch, "run", lambda launch: record(launch))
        with within:
            runner._run(runner.step, inputs)


def save(kind: str, layers: int, path: Path, **sizes: int) -> Path:
    family, fields = MODELS[kind]
    fields = {**fields, **sizes, "num_hidden_layers": layers}
    if kind in LAYERS:
        fields["layer_types"] = ["full_attention", *[LAYERS[kind]] * (layers - 1)]
    return save_random(tiny_config(family, **fields), path)


def described(names: Counter[str]) -> str:
    return f"{names.total()}: " + ", ".join(
        name if times == 1 else f"{times} {name}" for name, times in sorted(names.items())
    )


@pytest.mark.parametrize(
    "kind", tiered((*MODELS, *QUANTIZED), "dense", "routed", "hybrid", "dense in int4")
)
def test_launches_of_a_further_layer(kind: str, started: Callable[[str, int], ModelRunner]) -> None:
    less, more = (started(kind, layers) for layers in (2, 3))
    made, besides = [], []
    for rows in ROWS:
        few, many = launches(less, rows), launches(more, rows)
        assert not few - many
        made.append(described(many - few))
        besides.append(described(few - (many - few) - (many - few)))
    assert tuple(made) == LAUNCHES[kind]
    if kind == "dense":
        assert tuple(besides) == LAUNCHES["step"]


@pytest.mark.parametrize("kind", ["routed, corrected", "recurrent"])
def test_float32_within_bfloat16_takes_no_launch_for_a_cast(kind: str, tmp_path: Path) -> None:
    """A router's weight, or the residual stream."""
    less, more = (
        start(save(kind, layers, tmp_path / str(layers)), dtype="bfloat16") for layers in (2, 3)
    )
    for rows in (1, FEW):
        made = described(launches(more, rows) - launches(less, rows))
        assert made == LAUNCHES[kind][ROWS.index(rows)]


@pytest.mark.parametrize("kind", tiered(MODELS, "dense", "routed", "hybrid"))
def test_the_kernels_of_a_layer_are_launched_before_the_previous_one_ends(
    kind: str, started: Callable[[str, int], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs since sm_90."""
    runner = started(kind, 2)
    monkeypatch.setattr(dependent_launch, "applies_to", lambda device: True)
    for rows in (1, MANY):
        recorded = recorded_step(runner, rows)
        assert len(recorded.names) > 10
        assert recorded.late <= {"record_tokens_kernel"}, "which nothing of the step follows"


# The linears of the others are those of dense models.
WAYS = (
    *(f"{kind} in bfloat16" for kind in MODELS),
    *(f"{kind} in {format}" for kind in ("dense", "routed") for format in FORMATS),
)


@pytest.mark.parametrize(
    "way",
    tiered(WAYS, "dense in int4", "routed in bfloat16", "routed in fp8", "recurrent in bfloat16"),
)
def test_the_options_that_a_model_asks_for_are_measured(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _, format = way.partition(" in ")
    path = save(kind, 2, tmp_path, **DIVISIBLE)
    formats = [format] if format in FORMATS else []
    options = {"quantization": format} if formats else {}
    runner = start(path, **EXACT, **options)
    asked = tune.Asked()
    shapes = [StepShape.decode(rows) for rows in ROWS]
    shapes += [StepShape(tokens, rows, rows) for tokens, rows in ((24, 1), (24, 2), (150, 2))]
    for shape in shapes:
        run_without_kernels(runner, shape, tune.using(asked), lambda launch: None)
    monkeypatch.setattr(linear_work, "_COLD_BYTES", 0)
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    configs = tune.model_configs([str(path)], formats)
    works = program_work(configs, torch.device("cpu"), tune.TINY)
    measured = tune.asked_options(works)
    assert len(asked) > 3 and set(asked) <= set(measured)


def test_many_rows_are_sorted_by_expert_once_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, 18 are many."""
    monkeypatch.setattr(expert_linear, "are_sorted", lambda rows, experts: rows > 6)
    less, more = (start(save("routed", layers, tmp_path / str(layers))) for layers in (2, 3))
    for rows, sorts in ((FEW, 0), (MANY, 1)):
        made = launches(more, rows) - launches(less, rows)
        assert made["expert_kernel"] == 2
        assert made["aten.sort"] == made["aten.searchsorted"] == sorts
