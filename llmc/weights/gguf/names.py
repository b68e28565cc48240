"""Which tensors of a GGUF file make up each parameter, by transformers' and gguf's name maps."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gguf
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from llmc.errors import CheckpointError, reason_of
from llmc.weights.gguf.processors import processor_of
from llmc.weights.gguf.reader import GgufHeader, GgufTensorInfo, shown
from llmc.weights.gguf.rules import rule_of, rules, squashed

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_MAX_STACKED = 64
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_POOLER = "pooler."  # of encoders: vectors are made from hidden states, so files do not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMap:
    """`parts`: parameter -> the tensors that make it up, in order.

    `numbers`: the values of parameters that are stored in the metadata.
    """

    parts: Mapping[str, tuple[GgufTensorInfo, ...]]
    numbers: Mapping[str, float]
    shapes: Mapping[str, tuple[int, ...]]


def map_parameters(header: GgufHeader, hf_config: Any, config: Mapping[str, Any]) -> ParameterMap:
    """Map tensors to parameters; builds the model without weights for its names and shapes.

    Raises CheckpointError if the file has tensors that the model has no parameter for: without
    them its output would be wrong.
    """
    import transformers
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    file = header.files[0].name
    rule = rule_of(header)
    maker = getattr(transformers, rule.get("class", "AutoModelForCausalLM"))
    try:
        with torch.device("meta"):
            module: Any = maker.from_config(hf_config)
        with _one_name_map():
            names = get_gguf_hf_weights_map(
                module,
                processor_of(header.architecture, config, rule).inner,
                model_type=_named_as(header),
                num_layers=hf_config.num_hidden_layers,
            )
    except Exception as e:  # constructors and maps raise nearly every type
        raise CheckpointError(
            f"transformers can't build the model that {file} describes: {reason_of(e)}"
        ) from e
    shapes = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    if "lm_head.weight" in shapes:  # for a tied head the map has no name
        names.setdefault("output.weight", "lm_head.weight")
    names |= rule.get("tensors", {})
    if "prefix" in rule:
        _add_prefixed(names, shapes, rule["prefix"], header, hf_config.num_hidden_layers)
    _add_names(names, shapes)
    for stem in rule.get("stacked", {}).values():
        names.update({p[p.index(stem) :]: p for p in shapes if f".{stem}." in p})
    parts: dict[str, list[str]] = {}
    unknown = []
    ranks = {tensor: i for i, tensor in enumerate(names)}
    stored_as = dict(_cut(header.tensors, names, shapes))
    for name in stored_as:
        tensor = _known(names, name)
        if tensor is not None and names[tensor] in shapes:
            parts.setdefault(names[tensor], []).append(name)
        elif not _is_unused(name, hf_config):
            unknown.append(name)
    for tensors in parts.values():
        tensors.sort(key=lambda name: ranks[_known(names, name) or name])
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors of {file} have no place in transformers' model of "
            f"architecture {header.architecture!r}: {', '.join(map(shown, unknown[:5]))}; "
            "use the safetensors checkpoint"
        )
    numbers = dict(_numbers(header, shapes))
    for end, value in rule.get("absent", {}).items():  # of parameters that files may omit
        numbers |= {n: value for n in shapes if n.endswith(end) and n not in parts}
    needed = (n for n, _ in module.named_parameters() if not n.startswith(_POOLER))
    missing = [name for name in needed if name not in parts and name not in numbers]
    if missing:
        raise CheckpointError(
            f"{file} has no tensors for {len(missing)} of the parameters that its metadata "
            f"requires: {', '.join(missing[:5])}"
        )
    for parameter, tensors in parts.items():
        stored = [list(stored_as[name].shape) for name in tensors]
        if sum(math.prod(shape) for shape in stored) != math.prod(shapes[parameter]):
            raise CheckpointError(
                f"{parameter} has shape {', '.join(map(str, stored))} in {file}, but its metadata "
                f"requires {list(shapes[parameter])}"
            )
    return ParameterMap(
        parts={n: tuple(stored_as[t] for t in p) for n, p in parts.items()},
        numbers=numbers,
        shapes=shapes,
    )


@contextlib.contextmanager
def _one_name_map() -> Iterator[None]:
    """Cache gguf's map: transformers rebuilds it for every module, which takes seconds."""
    make = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(make)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = make


def _numbers(
    header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, float]]:
    """The parameters whose values the metadata lists by layer."""
    for parameter, shape in shapes.items():
        layer = _LAYER.search(parameter)
        for end, key in rules()["numbers"].items():
            if layer is not None and parameter.endswith(end) and math.prod(shape) == 1:
                values = header.metadata.get(key)
                at = int(layer[1])
                found = values[at] if isinstance(values, list) and at < len(values) else None
                if not isinstance(found, float):
                    raise CheckpointError(f"{header.files[0].name} has no {key} for layer {at}")
                yield parameter, found


def _known(names: Mapping[str, str], tensor: str) -> str | None:
    """A tensor's name in the map: some parameters, such as experts, have no `.weight` suffix."""
    ends = (name for name in (tensor, tensor.removesuffix(".weight"), tensor.removesuffix(".bias")))
    return next((name for name in ends if name in names), None)


def _is_unused(tensor: str, hf_config: Any) -> bool:
    """Whether a tensor is not needed: rotary factors, which are in the config; layers used only for
    speculation; and keys and values of layers that share those of another."""
    block, layers = _BLOCK.match(tensor), hf_config.num_hidden_layers
    own = layers - (getattr(hf_config, "num_kv_shared_layers", None) or 0)
    if block is not None and int(block[1]) >= own:
        is_shared = re.search(rules()["unused_where_shared"], tensor) is not None
        if is_shared or int(block[1]) >= layers:
            return True
    return any(re.search(pattern, tensor) for pattern in rules()["unused"])


def _named_as(header: GgufHeader) -> str:
    """The gguf package's spelling of the architecture, or of one whose tensors have these names."""
    named_as: str = rule_of(header).get("named_as", header.architecture)
    known = {squashed(name): name for name in MODEL_ARCH_NAMES.values()}
    return known.get(squashed(named_as), named_as)


def _add_prefixed(
    names: dict[str, str], shapes: Iterable[str], prefix: str, header: GgufHeader, layers: int
) -> None:
    """Add names from the gguf package's map, which knows parameters by their checkpoint prefix."""
    [arch] = [a for a, name in MODEL_ARCH_NAMES.items() if name == _named_as(header)]
    known = get_tensor_name_map(arch, layers)
    for parameter in shapes:
        in_files = prefix + parameter.split(".", 1)[-1]
        found = known.get_name(in_files, try_suffixes=(".weight", ".bias"))
        if found is not None:
            names.setdefault(found, parameter)


def unstacked(header: GgufHeader) -> GgufHeader:
    """Split tensors that stack several parameters into one per parameter, with a number each."""
    tensors = dict(header.tensors)
    for name, parameter in rule_of(header).get("stacked", {}).items():
        whole = tensors.get(name)
        if whole is None or len(whole.shape) != 3 or whole.shape[0] > _MAX_STACKED:
            continue  # it is reported as unknown later
        del tensors[name]
        for i in range(whole.shape[0]):
            one = _rows(whole, i, 1, f"{parameter}.{i}.weight")
            tensors[one.name] = replace(one, shape=one.shape[1:])
    return replace(header, tensors=tensors)


def _rows(whole: GgufTensorInfo, start: int, count: int, name: str) -> GgufTensorInfo:
    size = whole.num_bytes // whole.shape[0]
    return replace(
        whole,
        name=name,
        shape=(count, *whole.shape[1:]),
        offset=whole.offset + start * size,
        num_bytes=count * size,
    )


def _cut(
    tensors: Mapping[str, GgufTensorInfo],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, GgufTensorInfo]]:
    """Tensors by name; those that concatenate the rows of several parameters are split."""
    for name, whole in tensors.items():
        found = [
            (part, shapes[names[part]][0])
            for joined, kinds in rules()["cut"].items()
            if f".{joined}." in name and _known(names, name) is None
            for kind in kinds
            if (part := name.replace(joined, kind)) not in tensors and names.get(part) in shapes
        ]
        rows_fit = sum(rows for _, rows in found) == whole.shape[0]
        if not rows_fit or whole.num_bytes % whole.shape[0]:
            yield name, whole  # reported as unknown later, unless the model has it
            continue
        start = 0
        for part, rows in found:
            yield part, _rows(whole, start, rows, part)
            start += rows


def _add_names(names: dict[str, str], shapes: Iterable[str]) -> None:
    """Add names that the gguf package's map lacks, such as those of stacked experts."""
    for parameter in shapes:
        layer = _LAYER.search(parameter)
        if layer is None:
            continue
        for end, tensors in rules()["names"].items():
            if parameter.endswith(end) and parameter[-len(end) - 1] in "._":
                for tensor in tensors:
                    names.setdefault(f"blk.{layer[1]}.{tensor}", parameter)
