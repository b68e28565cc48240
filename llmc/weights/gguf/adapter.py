"""LoRA adapters in GGUF files, as convert_lora_to_gguf.py writes them -> PEFT's format.

    <tensor>.lora_a [r, K], .lora_b [N, r] of a tensor [N, K] of the model's file; for E experts
    [E, r, K] and [E, N, r]
    token_embd.weight.lora_a [V, r], .lora_b [H, r] of an embedding
    adapter.lora.alpha: the output gets alpha / r * B A x, or B A x if it is 0

The model must come from a GGUF file too: its index says which parameter a tensor belongs to. What
reorders the rows and columns of the tensor reorders the rows of B and the columns of A.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.weights.gguf.model import open_gguf
from llmc.weights.gguf.reader import GgufTensorInfo, read_adapter, shown
from llmc.weights.gguf.rules import squashed
from llmc.weights.gguf.tensors import GgufTensor, read_values
from llmc.weights.weight_files import ADAPTER, ADAPTER_CONFIG

_A, _B = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"  # ends the names of them all
_INVOCATION = "adapter.alora.invocation_tokens"  # the adapter applies only behind these
_STACKED_SINCE = "0.20.0"  # of PEFT: A of stacked experts is over inputs


class _Pair(NamedTuple):
    a: GgufTensorInfo
    b: GgufTensorInfo


class _Lora(NamedTuple):
    """A and scaled B in PEFT's layout, and their rank."""

    a: Tensor
    b: Tensor
    rank: int


def convert_adapter(file: Path, model: Path, out: Path) -> None:
    """Write a file's adapter into the folder `out`. `model`: the directory made of the model's
    GGUF file.

    CheckpointError if the file can't be read, is no LoRA adapter or does not fit the model.
    """
    from safetensors.torch import save_file

    parameters = [t for t in open_gguf(model).values() if isinstance(t, GgufTensor)]
    alpha, pairs = _read(file, parameters[0].undo.architecture)
    linears: dict[str, _Lora] = {}  # by module
    embeddings: dict[str, _Lora] = {}
    experts: dict[str, dict[str, _Lora]] = {}  # by module, then by parameter in the model's order
    for parameter in parameters:
        own = {part.name: pairs.pop(part.name) for part in parameter.parts if part.name in pairs}
        name = parameter.name.removesuffix(".weight")
        table = next((own[part] for part in own if part.endswith(_EMBEDDING)), None)
        if table is not None:
            embeddings[name] = _of_embedding(table, alpha)
        elif own and len(parameter.shape) == 3:
            module = name.rpartition(".")[0]
            experts.setdefault(module, {})[name] = _of_weight(parameter, own, alpha)
        elif own:
            linears[name] = _of_weight(parameter, own, alpha)
    if pairs:
        raise CheckpointError(
            f"{file.name} adapts {', '.join(map(shown, list(pairs)[:5]))}, which the model's file "
            "does not have"
        )
    stacked = {name: lora for found in experts.values() for name, lora in found.items()}
    tensors: dict[str, Tensor] = {}
    for name, lora in linears.items():
        tensors |= {f"{name}.lora_A.weight": lora.a, f"{name}.lora_B.weight": lora.b}
    for name, lora in embeddings.items():
        tensors |= {f"{name}.lora_embedding_A": lora.a, f"{name}.lora_embedding_B": lora.b}
    for module, found in experts.items():
        for outside, lora in enumerate(reversed(found.values())):  # the first is the innermost
            name = module + ".base_layer" * outside
            tensors |= {f"{name}.lora_A.weight": lora.a, f"{name}.lora_B.weight": lora.b}
    ranks = {name: lora.rank for name, lora in (linears | embeddings | stacked).items()}
    [(usual, _)] = Counter(ranks.values()).most_common(1)
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    config = {
        "peft_type": "LORA",
        "peft_version": _STACKED_SINCE,
        "r": usual,
        "rank_pattern": others,
        "lora_alpha": usual,  # B is scaled already
        "alpha_pattern": others,
        "target_parameters": list(stacked),
    }
    save_file({key: t.contiguous() for key, t in tensors.items()}, out / f"{ADAPTER}.safetensors")
    (out / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _read(file: Path, architecture: str) -> tuple[float, dict[str, _Pair]]:
    """Alpha, and each adapted tensor's A and B."""
    metadata, tensors = read_adapter(file)
    stated = metadata.get("general.architecture")
    if not isinstance(stated, str) or squashed(stated) != squashed(architecture):
        raise CheckpointError(
            f"{file.name} is for models of architecture {shown(stated)}, and this model's is "
            f"{shown(architecture)}"
        )
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{file.name} has adapter.lora.alpha {shown(alpha)}, not a number")
    if metadata.get(_INVOCATION):
        raise CheckpointError(
            f"{file.name} applies only after certain tokens ({_INVOCATION}), which is not supported"
        )
    halves: dict[str, dict[str, GgufTensorInfo]] = {}
    for name, tensor in tensors.items():
        base, end = name[: -len(_A)], name[-len(_A) :]
        if end not in (_A, _B):
            raise CheckpointError(
                f"{file.name} has tensor {shown(name)}, which is not the lora_a or lora_b of one"
            )
        halves.setdefault(base, {})[end] = tensor
    if not halves:
        raise CheckpointError(f"{file.name} has no tensors")
    for base, found in halves.items():
        if len(found) != 2:
            raise CheckpointError(
                f"{file.name} has only one of lora_a and lora_b for {shown(base)}"
            )
    return float(alpha), {base: _Pair(found[_A], found[_B]) for base, found in halves.items()}


def _of_embedding(pair: _Pair, alpha: float) -> _Lora:
    a, b = read_values(pair.a), read_values(pair.b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise _misfit(pair)
    rank = a.shape[1]
    return _Lora(a.mT, b * _scale(alpha, rank), rank)


def _of_weight(parameter: GgufTensor, pairs: Mapping[str, _Pair], alpha: float) -> _Lora:
    """For a parameter of several tensors, each pair has ranks of its own, and B is zero elsewhere.

    Of experts, A is [E r, K] expert by expert, and B [N, r E] rank by rank.
    """
    order, experts = parameter.row_order, parameter.shape[0] if len(parameter.shape) == 3 else 1
    if order is None:
        raise CheckpointError(
            f"adapters on {', '.join(map(shown, pairs))} are not supported: converting the model "
            "did more than reorder its rows and columns"
        )
    rows = [part.shape[-2] for part in parameter.parts]
    a_parts, b_parts, start = [], [], 0
    for part, count in zip(parameter.parts, rows, strict=True):
        pair = pairs.get(part.name)
        start += count
        if pair is None:
            continue
        a, b = (read_values(half) for half in pair)
        if a.shape[:-2] != part.shape[:-2] or a.shape[-1] != part.shape[-1]:
            raise _misfit(pair)
        if b.shape != (*part.shape[:-1], a.shape[-2]):
            raise _misfit(pair)
        rank = a.shape[-2]
        whole = torch.zeros(experts, sum(rows), rank)
        whole[:, start - count : start] = b * _scale(alpha, rank)
        a_parts.append(a.reshape(experts, rank, -1))
        b_parts.append(whole)
    a, b = torch.cat(a_parts, 1), torch.cat(b_parts, 2)[:, order]
    if parameter.columns is not None:
        a = a[:, :, parameter.columns]
    return _Lora(a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), a.shape[1])


def _scale(alpha: float, rank: int) -> float:
    return alpha / rank if alpha else 1.0


def _misfit(pair: _Pair) -> CheckpointError:
    halves = " and ".join(f"{half.name!r:.120} is {list(half.shape)}" for half in pair)
    return CheckpointError(f"{halves}, which does not fit the model's tensor")
