"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors -> A and B.

    base_model.model.<module>.lora_A.weight [r, K], .lora_B.weight [N, r] of the parameter
    <module>.weight [N, K]; the module's output gets scale * B A x
    .lora_embedding_A [r, V], .lora_embedding_B [H, r] of an embedding [V, H]; x is one-hot
    .base_layer.weight, .weight (save_embedding_layers=True): a copy of the model's own, which must
    equal the served one
    for E routed experts in one parameter (lora_places.py): .lora_A.weight [E r, K], expert by
    expert, and .lora_B.weight [N, r E], rank by rank. Transposed, as PEFT stored many models
    before 0.20: [E r, N] and [K, r E], and the output gets scale * A^T B^T x

Adapters that use any other feature are rejected, because their output would be wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmc.errors import CheckpointError, InvalidRequestError, reason_of
from llmc.lora_request import LoRARequest
from llmc.passes.inputs import AdaptedOp
from llmc.weights.checkpoint import StoredTensor, open_file
from llmc.weights.lora_places import AdaptedModule, AdaptedModules, LoraPlace, LoraSize
from llmc.weights.parameters import Parameters
from llmc.weights.patterns import linear

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 4 << 20
_WAY_OUT = "serve the model that PEFT's merge_and_unload makes of it, if it can be merged"
_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(?:lora_(A|B)\.weight|lora_embedding_(A|B)|base_layer\.weight)",
    re.ASCII,
)
_COPY = re.compile(r"(?:base_model\.model\.)?((?:(?!lora_).)+)\.weight", re.ASCII)
_PLAIN = re.compile(r"[\w.]+")  # a name, or part of one
_MOST = 1e6  # the largest rank or alpha
_SINCE_0_20 = re.compile(r"0\.[2-9]\d|[1-9]")
_MAX_PARAMETERS = 4096  # named in target_parameters
# Initializations of A and B; others, such as PiSSA, subtract something from the model's weights.
_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_COMPARED_AT_ONCE = 16 << 20  # bytes
# Fields that do not affect the output, or that the tensors already reflect.
_HARMLESS = frozenset(
    (
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
        "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
        "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version",
        "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
        "target_parameters", "task_type", "use_rslora",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPart:
    """The stored A and B of a module; their ranks start at `first_rank` of the place's ranks."""

    module: AdaptedModule
    a: StoredTensor
    b: StoredTensor
    scale: float
    rank: int
    first_rank: int = 0
    is_transposed: bool = False


class FileVersion(NamedTuple):
    """What tells a file from one that replaced it, or from itself before it was written again."""

    inode: int
    size: int
    written_ns: int

    @staticmethod
    def of(file: Path) -> FileVersion:
        found = file.stat()
        return FileVersion(found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """An adapter's parts for each place, and its copies of the model's parameters.

    `version`: of the file, to whose header the places in it belong.
    """

    version: FileVersion
    parts: Mapping[LoraPlace, Sequence[LoraPart]]
    sizes: Mapping[LoraPlace, LoraSize]
    copies: Mapping[str, StoredTensor]


class PlainWeight(NamedTuple):
    """A parameter of the model as stored, except for its dtype. `rows(start, count)` returns some
    of its rows."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> PlainWeight:
        return PlainWeight(tuple(tensor.shape), partial(tensor.narrow, 0))


# A [r, K] and scale * B [N, r]; for experts [E, r, K] and [E, N, r].
LoraWeights = dict[LoraPlace, tuple[Tensor, Tensor]]


def open_adapter(
    adapter: LoRARequest,
    targets: Mapping[LoraPlace, LoraSize],
    parameters: Parameters,
    max_expert_rank: int = 0,
) -> StoredAdapter:
    """Open an adapter without reading weights. `targets`: the parameters that adapters can target;
    `max_expert_rank`: 0 if they can't target routed experts.

    Raises InvalidRequestError for an adapter that does not fit the model or can't be opened.
    """
    path = Path(adapter.lora_path)
    config = _read_config(adapter, path)
    _check_features(adapter, config)
    if not (path / _WEIGHTS).is_file():
        raise _refused(adapter, f"its directory has no {_WEIGHTS}; save it as safetensors")
    try:
        version = FileVersion.of(path / _WEIGHTS)  # before its header
        tensors = open_file(path / _WEIGHTS)
    except (CheckpointError, OSError) as error:
        raise _refused(adapter, reason_of(error)) from error
    pairs: dict[tuple[str, AdaptedOp], dict[str, StoredTensor]] = {}
    copies: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        copy = _COPY.fullmatch(key)
        if copy is not None and (name := _weight(copy[1], parameters)) in parameters.shapes:
            copies[name] = tensor
            continue
        match = _KEY.fullmatch(key)
        if match is None:
            raise _refused(
                adapter,
                f"it has {key!r:.120}, which is not a lora_A or lora_B of a linear or an embedding",
            )
        module, linear, embedding = match.groups()
        module = _weight(module, parameters).removesuffix(".weight")
        if linear or embedding:
            op: AdaptedOp = "linear" if linear else "embedding"
            pairs.setdefault((module, op), {})[linear or embedding] = tensor
        else:
            copies[f"{module}.weight"] = tensor
    if not pairs:
        raise _refused(adapter, f"{_WEIGHTS} is empty")
    modules = AdaptedModules(targets, parameters, config.get("target_parameters") or ())
    found = [
        (_module(adapter, modules, *key, targets, max_expert_rank), pair)
        for key, pair in pairs.items()
    ]
    found.sort(key=lambda one: one[0].expert is not None)
    is_transposed = _is_turned(adapter, config, found, targets)
    parts: dict[LoraPlace, list[LoraPart]] = {}
    ranks: Counter[tuple[LoraPlace, int | None]] = Counter()
    for module, pair in found:
        place, expert = module.place, module.expert
        first = ranks[place, None] + (0 if expert is None else ranks[place, expert])
        part = _part(adapter, config, module, pair, targets[place], first, is_transposed)
        ranks[place, expert] += part.rank
        parts.setdefault(place, []).append(part)
    if config.get("ensure_weight_tying"):
        _check_ties(adapter, parts, targets)
    return StoredAdapter(
        version=version,
        parts=parts,
        sizes={place: targets[place] for place in parts},
        copies=copies,
    )


def _weight(module: str, parameters: Parameters) -> str:
    """The parameter that is a module's weight. Adapters can have the names that modules had when
    they were trained."""
    if f"{module}.weight" in parameters.shapes:
        return f"{module}.weight"
    return f"{parameters.former_names.get(module, module)}.weight"


def read_adapter(
    adapter: LoRARequest,
    stored: StoredAdapter,
    dtype: torch.dtype,
    plain: Mapping[str, PlainWeight],
) -> LoraWeights:
    """A and B in `dtype`. `plain`: the model's parameters that are served as stored.

    Raises InvalidRequestError if a weight is not finite, its file has changed, or a copy of a
    parameter differs from the model's.
    """
    weights: LoraWeights = {}
    try:
        _check_version(adapter, stored)
        for name, copy in stored.copies.items():
            _check_copy(adapter, name, copy, plain.get(name))
        for place, parts in stored.parts.items():
            made = _joined(parts, stored.sizes[place], dtype)
            if not all(bool(t.isfinite().all()) for t in made):
                raise _refused(
                    adapter, f"its weights on {place.weight} are not finite (NaN or infinity)"
                )
            weights[place] = made
        _check_version(adapter, stored)  # it may have been replaced meanwhile
    except (CheckpointError, OSError) as error:
        raise _refused(adapter, reason_of(error)) from error
    return weights


def _check_version(adapter: LoRARequest, stored: StoredAdapter) -> None:
    if FileVersion.of(Path(adapter.lora_path) / _WEIGHTS) != stored.version:
        raise _refused(
            adapter,
            f"its {_WEIGHTS} has changed since it was first used; load it again under another "
            "number (over HTTP: unload it, then load it)",
        )


def _joined(parts: Sequence[LoraPart], size: LoraSize, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A and B of a place. An expert's part for some channels is zero for the others."""
    if not size.experts:
        (part,) = parts
        return part.a.read().to(dtype), (part.scale * part.b.read().float()).to(dtype)
    rank = max(part.first_rank + part.rank for part in parts)
    joined_a = torch.zeros(size.experts, rank, size.depth, dtype=dtype)
    joined_b = torch.zeros(size.experts, size.channels, rank, dtype=dtype)
    for part in parts:
        ranks = slice(part.first_rank, part.first_rank + part.rank)
        a, b = part.a.read().float(), part.b.read().float()
        if part.module.expert is None:
            a = a.unflatten(0, (size.experts, -1))
            b = b.unflatten(1, (-1, size.experts)).permute(2, 0, 1)
            a, b = (b.mT, a.mT) if part.is_transposed else (a, b)
            joined_a[:, ranks] = a
            joined_b[:, :, ranks] = part.scale * b
        else:
            first = part.module.part * b.shape[0]
            joined_a[part.module.expert, ranks] = a.to(dtype)
            joined_b[part.module.expert, first : first + b.shape[0], ranks] = part.scale * b
    return joined_a, joined_b


def _check_ties(
    adapter: LoRARequest, parts: Iterable[LoraPlace], targets: Iterable[LoraPlace]
) -> None:
    """Reject tied adapters without a part for the head, which old PEFT versions do not save."""
    tied = {place.weight for place in targets if place.op == "embedding"}
    tied &= {place.weight for place in targets if place.op == "linear"}
    ties = {place.op for place in parts if place.weight in tied}
    if ties == {"embedding"}:
        raise _refused(
            adapter,
            "it has ensure_weight_tying and nothing on the head, which is tied to the embedding; "
            "load it with the newest PEFT and save it again",
        )


def _check_copy(
    adapter: LoRARequest, name: str, copy: StoredTensor, own: PlainWeight | None
) -> None:
    """Check that a copy, which PEFT would use instead, equals the model's, some rows at a time."""
    if own is None:
        why = "is not served as stored, so the two can't be compared"
    elif copy.shape != own.shape:
        if (added := copy.shape[0] - own.shape[0]) > 0 and copy.shape[1:] == own.shape[1:]:
            raise _refused(
                adapter,
                f"it was trained with {added} more rows of {name!r:.120}, for tokens added to the "
                f"model's {own.shape[0]}; {_WAY_OUT}",
            )
        why = f"is {list(own.shape)} and not {list(copy.shape)}"
    else:
        why = "has other values"
        count = max(1, _COMPARED_AT_ONCE * copy.shape[0] // max(1, copy.num_bytes))
        for start in range(0, copy.shape[0], count):
            ours = own.rows(start, min(count, copy.shape[0] - start))
            theirs = copy.rows(start, ours.shape[0]).read().to(ours.dtype)
            if not torch.equal(theirs, ours.cpu()):
                break
        else:
            return
    raise _refused(
        adapter,
        f"it has its own copy of {name!r:.120}, and the model's {why}; save it with "
        "save_pretrained(..., save_embedding_layers=False) if the weight was not trained",
    )


def _refused(adapter: LoRARequest, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the LoRA adapter {adapter.lora_name!r} can't be used: {reason}", param="lora_request"
    )


def _read_config(adapter: LoRARequest, path: Path) -> dict[str, Any]:
    file = path / _CONFIG
    try:
        if not file.is_file():
            raise _refused(
                adapter,
                f"{adapter.lora_path!r:.200} is not a directory with an {_CONFIG}; pass a local "
                "directory written by PEFT's save_pretrained",
            )
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise _refused(adapter, f"{_CONFIG} has {file.stat().st_size} bytes")
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise _refused(adapter, f"{_CONFIG} can't be read: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise _refused(adapter, f"{_CONFIG} is not a JSON object")
    return config


def _check_features(adapter: LoRARequest, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _refused(
            adapter, f"its peft_type is {config.get('peft_type')!r:.40}, not 'LORA'; {_WAY_OUT}"
        )
    if config.get("bias", "none") != "none":
        raise _refused(adapter, f"it trains biases (bias={config['bias']!r:.40}); {_WAY_OUT}")
    asked = config.get("target_parameters") or []
    if not isinstance(asked, list) or not all(isinstance(one, str) for one in asked):
        raise _refused(adapter, f"target_parameters in {_CONFIG} is not a list of names")
    if len(asked) > _MAX_PARAMETERS:
        raise _refused(
            adapter, f"target_parameters has {len(asked)} names; the limit is {_MAX_PARAMETERS}"
        )
    start = config.get("init_lora_weights", True)
    if start is not None and start not in _STARTS:
        raise _refused(
            adapter,
            f"its init_lora_weights is {start!r:.40}, which changes weights of the model; convert "
            "it with save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    unknown = sorted(name for name, value in config.items() if value and name not in _HARMLESS)
    if unknown:
        raise _refused(
            adapter,
            f"it uses {', '.join(map(str, unknown))[:200]}; only plain LoRA on linears and "
            f"embeddings is supported, with use_rslora, rank_pattern and alpha_pattern; {_WAY_OUT}",
        )


def _module(
    adapter: LoRARequest,
    modules: AdaptedModules,
    name: str,
    op: AdaptedOp,
    targets: Mapping[LoraPlace, LoraSize],
    max_expert_rank: int,
) -> AdaptedModule:
    """The target of a module of the file; InvalidRequestError if it can't be adapted."""
    found = modules.find(name, op)
    if found is not None and found.place in targets:
        return found
    if modules.is_shared(name):
        why = "one of several layers that share their weights; adapters can't target these"
    elif found is None or found.place.op != "experts":
        why = f"not one of this model's {op} layers that support adapters"
    elif max_expert_rank:
        why = "part of routed experts, whose code in this model does not support adapters"
    else:
        why = (
            "part of routed experts, for which adapters are disabled: set max_lora_expert_rank "
            "(--max-lora-expert-rank) to its rank, or to the sum of the ranks of gate and up if "
            "they are separate (some models' experts do not support adapters: docs/lora.md)"
        )
    raise _refused(adapter, f"it is on {name!r:.120}, which is {why}")


def _is_turned(
    adapter: LoRARequest,
    config: Mapping[str, Any],
    found: Sequence[tuple[AdaptedModule, Mapping[str, StoredTensor]]],
    targets: Mapping[LoraPlace, LoraSize],
) -> bool:
    """Whether A of stacked experts is over outputs (transposed), judged by non-square weights."""
    stacks = [
        (targets[module.place], pair["A"].shape)
        for module, pair in found
        if module.place.op == "experts" and module.expert is None and "A" in pair
    ]
    seen = [shape[-1:] == (size.channels,) for size, shape in stacks if size.channels != size.depth]
    if stacks and not seen and not _SINCE_0_20.match(str(config.get("peft_version"))):
        raise _refused(
            adapter,
            "it adapts only square weights of routed experts and was saved before PEFT 0.20, so "
            "inputs and outputs can't be distinguished; train it with a newer PEFT",
        )
    return any(seen)


def _part(
    adapter: LoRARequest,
    config: Mapping[str, Any],
    module: AdaptedModule,
    pair: Mapping[str, StoredTensor],
    size: LoraSize,
    first_rank: int,
    is_transposed: bool,
) -> LoraPart:
    name = module.name
    if pair.keys() != {"A", "B"}:
        raise _refused(adapter, f"for {name!r:.120} it has only lora_{next(iter(pair))}")
    a, b = pair["A"], pair["B"]
    rank = _number(adapter, config, "r", "rank_pattern", name)
    alpha = _number(adapter, config, "lora_alpha", "alpha_pattern", name)
    if first_rank + rank > size.max_rank:
        option = "max_lora_expert_rank" if size.experts else "max_lora_rank"
        raise _refused(
            adapter,
            f"its rank is {first_rank + rank:g}, but the limit is {size.max_rank}; raise {option} "
            f"(--{option.replace('_', '-')})",
        )
    if module.expert is not None and module.expert >= size.experts:
        raise _refused(adapter, f"it is on {name!r:.120}, but there are {size.experts} experts")
    is_stack = size.experts > 0 and module.expert is None
    count = size.experts if is_stack else 1
    depth, channels = size.depth, size.channels // module.parts
    if is_stack and is_transposed:
        depth, channels = channels, depth
    shapes = (rank * count, depth), (channels, rank * count)
    if a.shape != shapes[0] or b.shape != shapes[1]:
        wanted = " and ".join(f"[{rows:g}, {columns:g}]" for rows, columns in shapes)
        raise _refused(
            adapter,
            f"for {name!r:.120} it has lora_A {list(a.shape)} and lora_B {list(b.shape)}, but "
            f"rank {rank:g} and this model require {wanted}",
        )
    for tensor in (a, b):
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise _refused(adapter, f"its tensors are {tensor.dtype}; save it in bfloat16")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraPart(
        module=module, a=a, b=b, scale=scale, rank=int(rank), first_rank=first_rank,
        is_transposed=is_transposed,
    )  # fmt: skip


def _number(
    adapter: LoRARequest, config: Mapping[str, Any], name: str, patterns: str, module: str
) -> float:
    """A number of the config, or the value of the first pattern that matches the module."""
    value, given = config.get(name), config.get(patterns) or {}
    if not isinstance(given, dict):
        raise _refused(adapter, f"{patterns} in {_CONFIG} is not an object")
    for key, other in given.items():
        try:
            if _ends_with(key, module):
                value = other
                break
        except ValueError as error:
            raise _refused(adapter, f"{patterns} has {key!r:.80}: {reason_of(error)}") from error
    if isinstance(value, int | float) and not isinstance(value, bool):
        least = 1 if name == "r" else -_MOST
        if least <= value <= _MOST and (name != "r" or value == int(value)):  # NaN is neither
            return float(value)
    raise _refused(adapter, f"{name} in {_CONFIG} is {value!r:.80}, which is not a valid value")


def _ends_with(pattern: str, module: str) -> bool:
    """Whether a pattern matches whole components at the end of a module's name. ValueError for one
    that can't be used."""
    if _PLAIN.fullmatch(pattern):
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    return linear(rf"^(.*\.)?({pattern})$")(module)
