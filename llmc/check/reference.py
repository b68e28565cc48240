"""The reference side of the comparison: the model as transformers runs it, unmodified and eager.

It runs one sequence at a time, so that nothing is padded, and without a cache; then one sequence
with the model's own cache, which must not change its logits. Hooks on the decoder layers record
hidden states.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmc.check.compare import deviation
from llmc.check.tokens import TokenSequence
from llmc.compiler.build import switch_off
from llmc.compiler.heads import taken, without_head
from llmc.errors import CheckpointError
from llmc.host_memory import host_memory
from llmc.passes.inputs import AdaptedOp
from llmc.pooling import Task
from llmc.weights.load import CheckpointWeights, DummyWeights, WeightSource
from llmc.weights.lora import LoraWeights
from llmc.weights.lora_places import LoraPlace
from llmc.weights.quantized.quantization_config import StoredQuantization
from llmc.weights.tensors import open_tensors

log = logging.getLogger(__name__)

_FLOAT32_SHARE = 0.8  # of free memory that a float32 copy may use
_PREFILLED = 4  # tokens that are computed at once before others are decoded with a cache
_CACHES = ("cache", "past_key_values", "cache_params")  # transformers' names for it, new to old
_SPREAD = 0.85  # standard deviation of random weights, times the square root of their inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results in float32: logits [T, V] by sequence, hidden states [T, N] by layer and sequence."""

    logits: list[Tensor]
    hidden: list[list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`exact` is what the step is compared with; `rounded` is the model's own run in its dtype.

    They are the same object if the dtype is float32 or a float32 copy does not fit in memory.
    `cached_error`: how far the logits are from those that the model's code computes with its own
    cache, as `generate` does; relative, in float32. None if that is not known.
    """

    exact: Run
    rounded: Run
    cached_error: float | None = None

    @property
    def has_noise(self) -> bool:
        return self.exact is not self.rounded


def run_reference(
    path: Path,
    hf_config: Any,
    stored: StoredQuantization | None,
    sequences: Sequence[TokenSequence],
    *,
    dtype: torch.dtype,
    device: torch.device,
    layers: str,
    dummy_seed: int | None,
    trust_remote_code: bool,
    tables: Mapping[str, Tensor],
    constructed: Mapping[str, Tensor] | None = None,
    adapters: Sequence[LoraWeights] = (),
    experts: Mapping[str, Sequence[str]] | None = None,
) -> Reference:
    """Run the model's own code on the sequences.

    `layers` is the name of the module's list of decoder layers, "" if there is none.
    `tables`: buffers computed from the config, which `exact` uses without rounding.
    `constructed`: buffers that the model's own code computes when it is constructed, which
    transformers leaves uninitialized: it constructs models without data.
    `adapters`: the LoRA adapters that sequences refer to, numbered from 1. `experts`: for stacks of
    experts, the names of the linears of one (`Parameters.experts`); the model may have those.

    With `dummy_seed` the weights are random, the same as the step's. Weights `stored` quantized are
    passed dequantized, because a quantizer's own kernels would compute different values.
    """
    hf_config = copy.deepcopy(hf_config)
    switch_off(hf_config)
    if dummy_seed is not None:
        module = _make(hf_config, dtype, trust_remote_code)
        _fill(DummyWeights(dummy_seed), dict(module.named_parameters()))
    elif stored is not None:
        module = _make(hf_config, dtype, trust_remote_code)
        weights = open_tensors(path, stored, dtype)
        _fill(CheckpointWeights(module, weights), module.state_dict())
    else:
        module = _load(path, hf_config, dtype, trust_remote_code)
    saved = module.state_dict().keys()
    unset = {name: v for name, v in (constructed or {}).items() if name not in saved}
    for name, value in unset.items():
        module.get_buffer(name).copy_(value)
    module = module.to(device).eval()
    own = {name: buffer.clone() for name, buffer in module.named_buffers()}
    adapters = [_for_module(module, adapter, experts or {}) for adapter in adapters]
    rounded = _run(module, sequences, layers, device, adapters)
    exact = rounded
    if dtype != torch.float32 and _float32_fits(module, device):
        module = module.float()
        for name, buffer in module.named_buffers():  # the run may have rounded them in place
            if name in own and own[name].shape == buffer.shape:
                buffer.copy_(own[name])
        for name, table in {**tables, **unset}.items():
            module.get_buffer(name).copy_(table)
        exact = _run(module, sequences, layers, device, adapters)
    is_float32 = dtype == torch.float32 or exact is not rounded
    error = _cached_error(module, sequences, exact, device) if is_float32 else None
    del module
    gc.collect()
    return Reference(exact=exact, rounded=rounded, cached_error=error)


def save_random(config: Any, path: Path, maker: Any = None, *, seed: int = 0) -> None:
    """Write a random float32 checkpoint in which every layer matters: attention is far from
    uniform, and no norm, bias or decay has its neutral value.

    `maker`: the transformers class that creates the module, if not that of causal language models.
    Raises whatever the model's class raises.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for the class's own initial values
        module: Any = (
            _make(config, torch.float32, trust_remote_code=False)
            if maker is None
            else maker.from_config(config, dtype=torch.float32)
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and not name.endswith(("A_log", "norm.weight")):
                parameter.copy_(noise * (_SPREAD / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(0.1 * noise)
    with _no_progress_bar():
        module.save_pretrained(path)


def _load(path: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        with _no_progress_bar():
            module: nn.Module = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise CheckpointError(
            f"transformers can't load the model to compare with: {_reason(e)}"
        ) from e
    return module


def _reason(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def encoder_maker(hf_config: Any, task: Task) -> Any:
    """The transformers auto class that creates the part of an encoder that a task serves."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    makers = {
        "classify": AutoModelForSequenceClassification,
        "token_classify": AutoModelForTokenClassification,
    }
    return makers.get(task) or without_head(hf_config)


def load_encoder(path: Path, hf_config: Any, task: Task) -> Any:
    """An encoder loaded in float32, with eager attention."""
    maker = encoder_maker(hf_config, task)
    with _no_progress_bar():
        module = maker.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return module.eval()


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Disable transformers' progress bar, which would disturb the output of our phases."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _make(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    module: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
    )
    return module


def _fill(source: WeightSource, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        source.fill(name, tensor.data)


def _for_module(
    module: nn.Module, adapter: LoraWeights, experts: Mapping[str, Sequence[str]]
) -> LoraWeights:
    """The adapter with places in the module: it may have its experts one by one."""
    own = {name for name, _ in module.named_parameters()}
    placed: dict[LoraPlace, tuple[Tensor, Tensor]] = {}
    for place, (a, b) in adapter.items():
        if place.op != "experts" or place.weight in own:
            placed[place] = a, b
            continue
        for number, (own_a, own_b) in enumerate(zip(a, b, strict=True)):
            first = 0
            for template in experts[place.weight]:
                name = f"{template.format(number)}.weight"
                last = first + module.get_parameter(name).shape[0]
                placed[LoraPlace(name)] = own_a, own_b[first:last]
                first = last
    return placed


@contextlib.contextmanager
def _adapted(module: nn.Module, adapter: LoraWeights | None) -> Iterator[None]:
    """Apply an adapter to the module: add B A of the input to the output of each linear or
    embedding, and B A to the weights of experts while they compute, as PEFT does."""

    def added(op: AdaptedOp, a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            a_there, b_there = (m.to(output.device, output.dtype) for m in (a, b))
            if op == "linear":
                return output + nn.functional.linear(
                    nn.functional.linear(args[0], a_there), b_there
                )
            low = nn.functional.embedding(args[0], a_there.T)
            # some embeddings scale their output
            return output + nn.functional.linear(low, b_there) * getattr(layer, "embed_scale", 1)

        return hook

    def on_experts(experts: nn.Module, name: str, a: Tensor, b: Tensor) -> list[Any]:
        plain = experts.get_parameter(name)

        def add(layer: nn.Module, args: Any) -> None:
            change = b.to(plain.device, torch.float32) @ a.to(plain.device, torch.float32)
            if getattr(layer, "is_transposed", change.shape != plain.shape):
                change = change.mT
            adapted = (plain.float() + change).to(plain.dtype)
            layer._parameters[name] = nn.Parameter(adapted, requires_grad=False)

        def restore(layer: nn.Module, args: Any, output: Any) -> None:
            layer._parameters[name] = plain

        return [
            experts.register_forward_pre_hook(add),
            experts.register_forward_hook(restore, always_call=True),
        ]

    handles = []
    for place, (a, b) in (adapter or {}).items():
        if place.op == "experts":
            owner, _, name = place.weight.rpartition(".")
            handles += on_experts(module.get_submodule(owner), name, a, b)
        else:
            layer = module.get_submodule(place.weight.removesuffix(".weight"))
            handles.append(layer.register_forward_hook(added(place.op, a, b)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run(
    module: nn.Module,
    sequences: Sequence[TokenSequence],
    layers: str,
    device: torch.device,
    adapters: Sequence[LoraWeights],
) -> Run:
    last: dict[nn.Module, Tensor] = {}  # each layer's last output: models may loop over layers

    def hook(layer: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple | list) else output
        last[layer] = value.detach()[0].to("cpu", torch.float32, copy=True)

    members = list(module.get_submodule(layers).children()) if layers else []
    handles = [member.register_forward_hook(hook) for member in members]
    logits: list[Tensor] = []
    hidden: list[list[Tensor]] = [[] for _ in members]
    try:
        for sequence in sequences:
            last.clear()
            ids = torch.tensor([sequence.token_ids], device=device)
            adapter = adapters[sequence.adapter - 1] if sequence.adapter else None
            try:
                with torch.inference_mode(), _adapted(module, adapter):
                    out: Any = module(**taken(module.forward, ids, use_cache=False))
            except Exception as e:  # the model's code can raise anything
                raise CheckpointError(
                    f"transformers can't run the model to compare with: {_reason(e)}"
                ) from e
            logits.append(out.logits[0].to("cpu", torch.float32, copy=True))
            for values, member in zip(hidden, members, strict=True):
                if member in last:
                    values.append(last[member])
    finally:
        for handle in handles:
            handle.remove()
    return Run(logits=logits, hidden=hidden)


def _cached_error(
    module: nn.Module, sequences: Sequence[TokenSequence], run: Run, device: torch.device
) -> float | None:
    """Decode the shortest sequence with the model's own cache; the relative error of its logits."""
    plain = [i for i, s in enumerate(sequences) if not s.adapter and len(s.token_ids) > _PREFILLED]
    if not plain:
        return None
    index = min(plain, key=lambda i: len(sequences[i].token_ids))
    ids = torch.tensor([sequences[index].token_ids], device=device)
    found: list[Tensor] = []
    given: dict[str, Any] = {}
    try:
        with torch.inference_mode():
            for part in (ids[:, :_PREFILLED], *ids[:, _PREFILLED:].split(1, dim=1)):
                out: Any = module(**taken(module.forward, part, use_cache=True, **given))
                found.append(out.logits[0].to("cpu", torch.float32, copy=True))
                name = next((n for n in _CACHES if out.get(n) is not None), None)
                if name is None:
                    return None
                given = {name: out[name]}
    except Exception as e:  # the model's code can raise anything; it is not what is served
        log.debug("the model's own cache can't be used: %s", e)
        return None
    return deviation([run.logits[index]], [torch.cat(found)]).relative


def _float32_fits(module: nn.Module, device: torch.device) -> bool:
    needed = 4 * sum(p.numel() for p in module.parameters())
    is_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if is_cuda else host_memory().available
    return needed < _FLOAT32_SHARE * free
