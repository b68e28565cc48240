"""Stages -> plain data for the page: every node once, and each stage as a list of node numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from llmc.inspect.facts import num_bytes
from llmc.inspect.inspect import Inspection, title_of
from llmc.inspect.stages import Stage
from llmc.inspect.words import bare_name, words_of
from llmc.passes.base import op_name
from llmc.passes.inputs import (
    AdapterInput,
    CacheInput,
    ConstantInput,
    StateInput,
    StepInput,
    WeightInput,
    input_of,
)

Json = dict[str, Any]


def page_data(inspection: Inspection) -> Json:
    """`ops`: records; `stages`: title, notes and the numbers of their ops in order."""
    pool: dict[str, int] = {}
    stages = []
    for stage in inspection.stages:
        numbers = []
        for node in stage.graph.graph.nodes:
            if node.op == "call_function":
                text = json.dumps(_record(node, stage), sort_keys=True)
                numbers.append(pool.setdefault(text, len(pool)))
        stages.append({**_about(stage), "ops": numbers})
    ops = [json.loads(text) for text in pool]
    return {
        "model": inspection.model,
        "layers": inspection.num_captured,
        "allLayers": inspection.num_layers,
        "ops": ops,
        "stages": stages,
    }


def _about(stage: Stage) -> Json:
    if stage.rewrite is None or stage.report is None:
        return {
            "name": "captured",
            "title": "The model's own code from transformers, recorded as one list of ops.",
        }
    before, after = _drawing(stage.rewrite.doc)
    return {
        "name": stage.report.name,
        "title": title_of(stage.rewrite.doc),
        "before": before,
        "after": after,
        "notes": list(stage.report.notes),
        "enabled": stage.report.enabled,
        "required": stage.rewrite.required,
    }


def _drawing(doc: str) -> tuple[str, str]:
    """The two parts of a pass's docstring, without their indentation."""
    before, _, after = doc.partition("Before:")[2].partition("After:")
    return _dedent(before), _dedent(after)


def _dedent(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "\n".join(line[indent:] for line in lines)


def _record(node: fx.Node, stage: Stage) -> Json:
    """The record of an op for the page: with short keys, since there are thousands."""
    target = op_name(node)
    bare = bare_name(target)
    group, says = words_of(bare)
    weights = [n for n in node.all_input_nodes if isinstance(input_of(n), WeightInput)]
    return {
        "id": node.name,
        "op": bare,
        "of": "getitem" if bare == "getitem" else target,
        "group": group,
        "says": says,
        "layer": stage.layers.of[node],
        "shape": _shape(node.meta.get("val")),
        "args": [_arg(a) for a in node.args],
        "from": [n.name for n in node.all_input_nodes if n.op == "call_function"],
        "bytes": sum(num_bytes(n) for n in weights),
    }


def _shape(value: object) -> str:
    """`T x 1024 bfloat16`: T is the number of tokens; leading dimensions of size 1 are omitted."""
    if isinstance(value, list | tuple):
        return " and ".join(filter(None, map(_shape, value)))
    if not isinstance(value, torch.Tensor):
        return ""
    sizes = ["T" if not isinstance(s, int) else str(s) for s in value.shape]
    while len(sizes) > 1 and sizes[0] == "1":
        del sizes[0]
    return f"{' x '.join(sizes)} {str(value.dtype).removeprefix('torch.')}"


def _arg(arg: object) -> str:
    if isinstance(arg, fx.Node):
        return _input_name(arg)
    if isinstance(arg, list | tuple):
        return "[" + ", ".join(map(_arg, arg)) + "]"
    if isinstance(arg, float):
        return f"{arg:g}"
    return str(arg).removeprefix("torch.")


def _input_name(node: fx.Node) -> str:
    role = input_of(node)
    if isinstance(role, WeightInput):
        return " + ".join(_short_names(role.parts))
    if isinstance(role, CacheInput):
        return f"{role.part} cache {role.layer}"
    if isinstance(role, StateInput):
        return f"state {role.call}"
    if isinstance(role, StepInput):
        return role.name
    if isinstance(role, AdapterInput):
        return (
            f"lora {role.matrix} of "
            + {"linear": "", "embedding": "rows of ", "experts": "experts "}[role.op]
            + " + ".join(_short_names(role.weights))
        )
    return f"constant {node.name}" if isinstance(role, ConstantInput) else node.name


def _short_names(parts: Sequence[str]) -> list[str]:
    """`model.layers.0.self_attn.q_proj.weight` -> `0.self_attn.q_proj`."""
    return [
        ".".join(p.removesuffix(".weight").removeprefix("model.").split(".")[-3:]) for p in parts
    ]
