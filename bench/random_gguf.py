"""Writes a GGUF file of a middle-sized model with random weights, to compare engines on.

    python -m bench.random_gguf NAME FILE.gguf [--type Q8_0]

Only the default model is at hand as a file. This makes models of other kinds: experts, recurrent
layers, windows, and one whose matrices K-quants fit. bench/configs/random_gguf.json lists them;
tests/support writes files as llama.cpp's converter does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import converted_gguf
from converted_cases import CASES

_CONFIG = Path(__file__).parent / "configs" / "random_gguf.json"
_MERGES = ("! !",)
_SMALL = 0.1  # so that the states of many layers stay finite


def case_of(rule: dict[str, Any], sizes: dict[str, Any]) -> converted_gguf.Case:
    if "case" in rule:
        case = CASES[rule["case"]]
    else:
        case = converted_gguf.Case(
            architecture=rule["architecture"], name=rule["name"], fields=sizes
        )
    known = {name: size for name, size in sizes.items() if name in case.fields}
    return dataclasses.replace(
        case,
        fields={**case.fields, **known, **rule["fields"]},
        metadata={**case.metadata, **rule.get("metadata", {})},
    )


def main() -> None:
    config = json.loads(_CONFIG.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=config["models"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q8_0", help="of the matrices")
    args = parser.parse_args()
    rule = config["models"][args.name]
    case = case_of(rule, config["sizes"])
    module = converted_gguf.make_module(case)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_SMALL)
    named = {**rule.get("types", {}), config["matrices"]: args.type}
    types = {pattern: GGMLQuantizationType[name] for pattern, name in named.items()}
    converted_gguf.write_converted(args.file, case, module, types, merges=_MERGES)
    count = sum(parameter.numel() for parameter in module.parameters())
    print(f"{args.file}: {count / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
