"""Config -> the unmodified model on the meta device, wired to llmc's attention.

First stage of the compiler. No weights are read here: parameters only have shapes. Buffers that
the model computes from its config (such as rotary frequencies) get their real values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from llmc.compiler import interface
from llmc.compiler.compressors import use_compressors
from llmc.compiler.expert_blocks.use import use_expert_blocks
from llmc.compiler.expert_loops import use_expert_loops
from llmc.compiler.experts import use_sorted_experts
from llmc.compiler.first_calls import make_first_calls
from llmc.compiler.heads import make_module
from llmc.compiler.rotary import use_tables
from llmc.errors import CheckpointError, reason_of
from llmc.pooling import LM, Head

# Raised by models' constructors; ImportError: a required package is not installed.
_BUILD_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ZeroDivisionError,
    RuntimeError,
    ImportError,
)
_KINDS = {
    "lm": "language model",
    "hidden": "language model",
    "score": "classifier",
    "token_score": "classifier of tokens",
}
# Side outputs, and `rescale_every`, which divides weights in place to keep float16 from
# overflowing; other dtypes give the same result without it.
_SWITCHED_OFF = {
    "output_router_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "rescale_every": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """The model's module on meta, and the buffers that it computes from its config."""

    module: nn.Module
    config: Any  # the module's own, with llmc's settings
    source_config: Any  # what it was built from
    dtype: torch.dtype
    buffers: dict[str, Tensor]  # name -> value, for buffers that are not read from checkpoints
    constructed: dict[str, Tensor]  # those of them that only the module's constructor computes
    context: int | None  # maximum sequence length, if a table depends on it
    head: Head = LM
    apart: tuple[str, ...] = ()  # parameters that the config ties to others, but not here
    trust_remote_code: bool = False
    own_code: bool = False  # the class is not one of transformers
    not_understood: tuple[str, ...] = ()  # loops over experts, and why
    left: frozenset[str] = frozenset()  # buffers for what loops over experts leave in attributes


def switch_off(config: Any) -> None:
    """Switch off in a config what llmc does not compute and what does not change results."""
    for field, off in _SWITCHED_OFF.items():
        if getattr(config, field, off):
            setattr(config, field, off)


def build(
    config: Any,
    dtype: torch.dtype,
    attention: str = interface.NAME,
    head: Head = LM,
    context: int | None = None,
    apart: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> BuiltModel:
    """Build a model. Raises CheckpointError if the config is not a decoder-only causal LM.

    `attention` is a name in transformers' attention interface: ours, or `eager` for models that
    implement attention in their own code. `context`: maximum sequence length; None: the config's.
    `apart`: names of parameters that are not tied, whatever the config says. With
    `trust_remote_code`, code that the config names is run.
    """
    source, config = config, copy.deepcopy(config)  # the copy's fields are set below
    if not head.encoder:
        _check_causal(config)
    interface.register()
    config._attn_implementation = attention
    switch_off(config)

    def make(dtype: torch.dtype) -> nn.Module:
        try:
            return make_module(
                config,
                head,
                trust_remote_code=trust_remote_code,
                attn_implementation=attention,
                dtype=dtype,
            )
        except _BUILD_ERRORS as e:
            raise CheckpointError(
                f"transformers can't build a causal {_KINDS[head.kind]} from this config "
                f"({type(config).__name__}): {reason_of(e)}"
            ) from e

    with torch.device("meta"):
        module = make(dtype)
    module.eval()
    for name in apart:  # not by the config, which may tie shared layers by the same field
        path, _, leaf = name.rpartition(".")
        own = torch.empty_like(module.get_parameter(name))
        module.get_submodule(path).register_parameter(leaf, nn.Parameter(own))
    _keep_float32(module, dtype)
    interface.use_experts(module)
    interface.choose_all_keys(module)
    use_sorted_experts(module)
    use_expert_loops(module)
    if attention == interface.NAME:  # other attention would see rows that are not entries
        use_compressors(module)
    buffers = materialize_buffers(module) | computed_tables(module)
    constructed: dict[str, Tensor] = {}
    not_understood: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()
    own_code = not type(module).__module__.startswith("transformers.")
    if own_code:  # the loops of transformers' code are known (experts.py, expert_loops.py)
        constructed = _constructed_buffers(module, buffers, make)
        buffers |= constructed
        make_first_calls(module, buffers)
        before = set(buffers)
        not_understood = use_expert_blocks(module, dtype, buffers)
        left = frozenset(buffers.keys() - before)
    text = getattr(config, "get_text_config", lambda: config)()
    context = context or getattr(text, "max_position_embeddings", None) or 0
    has_tables = use_tables(module, buffers, context)
    _keep_frequencies(module)
    # Which modules attend is only known once their code has run; unused buffers cost nothing.
    for child in module.modules():
        for cache in (interface.KEY_CACHE, interface.VALUE_CACHE):
            child.register_buffer(cache, torch.empty(0, device="meta"), persistent=False)
    return BuiltModel(
        module=module,
        config=config,
        source_config=source,
        dtype=dtype,
        buffers=buffers,
        constructed=constructed,
        head=head,
        context=context if has_tables else None,
        apart=tuple(apart),
        trust_remote_code=trust_remote_code,
        own_code=own_code,
        not_understood=not_understood,
        left=left,
    )


def _check_causal(config: Any) -> None:
    """Check `is_causal`, which transformers' masks follow but our mask markers cannot express."""
    text = getattr(config, "get_text_config", lambda: config)()
    if getattr(text, "is_causal", True) is False:
        raise CheckpointError(
            f"this model ({type(text).__name__}) attends to later tokens (is_causal is false in "
            "config.json), as encoders do; it can only be served for its vectors (--task embed)"
        )


def _keep_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """Widen what transformers' loader keeps in float32 in a 16-bit model: parameters for expert
    selection, some routers and norms."""
    plan: Any = getattr(module, "_get_dtype_plan", None)
    kept = plan(dtype) if plan is not None else {}
    if not kept:
        return
    pattern = re.compile("|".join(name.replace("*", ".*") for name in kept))
    saved = set(module.state_dict())
    wide: dict[int, Tensor] = {}  # tied parameters stay tied
    for path, owner in module.named_modules():
        for own in (owner._parameters, owner._buffers):
            for leaf, value in own.items():
                name = f"{path}.{leaf}" if path else leaf
                if value is None or name not in saved or not pattern.search(name):
                    continue
                if value.is_floating_point() and id(value) not in wide:
                    made = value.detach().float()
                    is_parameter = isinstance(value, nn.Parameter)
                    wide[id(value)] = nn.Parameter(made, False) if is_parameter else made
                own[leaf] = wide.get(id(value), value)


def _keep_frequencies(module: nn.Module) -> None:
    """Make rotary embeddings that recompute frequencies for longer sequences keep the initial ones.

    These are right for every context that is served: `dynamic` frequencies change only beyond the
    model's own context.
    """
    child: Any
    for child in module.modules():
        kinds = getattr(child, "rope_type", None)
        if isinstance(kinds, str) and "dynamic" in kinds:
            child.rope_type = "default"
        elif isinstance(kinds, dict):
            child.rope_type = {k: "default" if "dynamic" in v else v for k, v in kinds.items()}


def materialize_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Values of the buffers that are not in state_dict, from the model's own initializer.

    transformers' loader also relies on `_init_weights` to fill them after a meta build. They are
    moved back to meta afterwards, so that the module can be traced on one device.
    """
    persistent = set(module.state_dict())
    owners = dict(module.named_modules(remove_duplicate=False))
    old = {
        name: (owners[name.rpartition(".")[0]], buffer)
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if name not in persistent
    }
    for name, (owner, buffer) in old.items():
        owner._buffers[name.rpartition(".")[2]] = _unset_like(buffer)
    with torch.no_grad():
        for prefix in dict.fromkeys(name.rpartition(".")[0] for name in old):
            _initialize(owners, prefix)
        for name in old:  # those that an enclosing module initializes
            prefix = name.rpartition(".")[0]
            while prefix and is_unset(module.get_buffer(name)):
                prefix = prefix.rpartition(".")[0]
                _initialize(owners, prefix)
    values = {name: module.get_buffer(name) for name in old}
    for name, (owner, buffer) in old.items():
        # a plain tensor: Dynamo can't follow code that assigns to an nn.Buffer
        owner._buffers[name.rpartition(".")[2]] = buffer.detach()
    return values


def computed_tables(module: nn.Module) -> dict[str, Tensor]:
    """Buffers in state_dict whose values follow from the config, such as tables of decays.

    These are the buffers that the model's initializer computes without random numbers. Buffers with
    only one or two distinct values are excluded, as they are initial values of training statistics.
    The result is float32, since stored tables are rounded. Checkpoints may have them too
    (`weights/load.py` compares).
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    state = module.state_dict()
    found: dict[str, Tensor] = {}
    by_owner: dict[str, list[str]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in state and buffer.is_floating_point():
            by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    for prefix, names in by_owner.items():
        owner = owners[prefix]
        old = {name: owner._buffers[name.rpartition(".")[2]] for name in names}
        for name in names:
            owner._buffers[name.rpartition(".")[2]] = _unset_like(state[name].float())
        random = torch.get_rng_state()
        with torch.no_grad():
            _initialize(owners, prefix)
        if torch.equal(random, torch.get_rng_state()):
            values = {name: module.get_buffer(name) for name in names}
            found |= {name: v for name, v in values.items() if _is_table(v)}
        torch.set_rng_state(random)
        for name, buffer in old.items():
            owner._buffers[name.rpartition(".")[2]] = None if buffer is None else buffer.detach()
    return found


def _constructed_buffers(
    module: nn.Module, known: Mapping[str, Tensor], make: Callable[[torch.dtype], nn.Module]
) -> dict[str, Tensor]:
    """Values of the buffers that a model's own code computes when it is constructed. Code written
    before transformers built all models on meta relies on that: its initializer sets no buffers.

    They are float32, as the graph rounds them like the code. Buffers in state_dict are excluded if
    they are random, or all elements are equal, as they are initial values of what is trained.
    """
    saved = set(module.state_dict())
    names = [
        name
        for name, _ in module.named_buffers(remove_duplicate=False)
        if (_may_be_unset(known[name]) if name in known else name in saved)
    ]
    if not names:
        return {}
    one, other = (_construct(make, seed) for seed in (0, 1))
    found: dict[str, Tensor] = {}
    for name in names:
        value = one[name].detach()
        if value.is_meta or is_unset(value) or not torch.equal(value, other[name]):
            continue
        if name not in saved or len(value.unique()) > 1:
            found[name] = value
    return found


def _may_be_unset(value: Tensor) -> bool:
    return is_unset(value) or (value.dtype == torch.bool and not value.any())


def _construct(make: Callable[[torch.dtype], nn.Module], seed: int) -> dict[str, Tensor]:
    """The buffers of a module with parameters on meta, which take no memory and no time. What
    `torch.empty` leaves uninitialized is NaN."""
    register, strict = nn.Module.register_parameter, torch.are_deterministic_algorithms_enabled()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    torch.use_deterministic_algorithms(True)
    try:
        with (
            mock.patch.object(nn.Module, "register_parameter", on_meta),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            torch.manual_seed(seed)
            return dict(make(torch.float32).named_buffers(remove_duplicate=False))
    finally:
        torch.use_deterministic_algorithms(strict)


def _is_table(value: Tensor) -> bool:
    return not is_unset(value) and len(value.unique()) > 2


def _initialize(modules: dict[str, nn.Module], prefix: str) -> None:
    """Initialize a module with the nearest enclosing model's initializer, as transformers does."""
    from transformers import PreTrainedModel

    around = prefix
    while around and not isinstance(modules[around], PreTrainedModel):
        around = around.rpartition(".")[0]
    modules[around]._init_weights(modules[prefix])  # type: ignore[operator]


def _unset_like(buffer: Tensor) -> Tensor:
    """A CPU tensor of the same shape, filled with NaN (the lowest value for integers)."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.full(buffer.shape, float("nan"), dtype=buffer.dtype)
    low = 0 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
    return torch.full(buffer.shape, low, dtype=buffer.dtype)


def is_unset(value: Tensor) -> bool:
    """Whether the model's initializer left a buffer as `_unset_like` made it."""
    if value.numel() == 0:
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return value.dtype != torch.bool and bool((value == torch.iinfo(value.dtype).min).any())
