"""Checks which of transformers' encoders are served: `python -m bench.encoders [TYPE ...]`.

For every model type that has a masked language model in transformers, a shrunken copy of its
default config gets random weights, and its vectors, scores and token scores are compared with
transformers' own (`llmc.check.encoder`). Prints the table of docs/encoders.md; takes about 15 min
on two slow cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Container
from typing import Any, Literal

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from llmc.check.architecture import make_config, shrunken_configs
from llmc.check.encoder import LIMIT, TASKS, check_encoder
from llmc.compiler.heads import is_masked_lm
from llmc.config import EngineConfig
from llmc.errors import CompileError
from llmc.pooling import Head

Kind = Literal["hidden", "score", "token_score"]

# The kinds of heads whose output is compared, and the types that have one.
COLUMNS: tuple[tuple[Kind, Container[str]], ...] = (
    ("hidden", MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("score", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    ("token_score", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
)


def measure(model_type: str, kind: Kind) -> str:
    """One cell: "yes", the size of the difference, or why it is rejected."""
    config: Any = AutoConfig.for_model(model_type)
    if not is_masked_lm(config) or getattr(config, "is_encoder_decoder", False):
        return "no encoder"
    reason = "its config can't be made small"
    head = Head(kind=kind, encoder=True)
    for shrunken in shrunken_configs(config, head):
        try:
            small = make_config(config, shrunken.config)
            error = check_encoder(EngineConfig(model=""), small, TASKS[kind])
        except CompileError as e:  # of its code, whatever its sizes
            return f"no: {_in_words(e)}"
        except Exception as e:  # a row of the table, whatever it is
            reason = _in_words(e)
            continue
        return "yes" if error <= LIMIT else f"**differs** by {error:.0e}"
    return f"no: {reason}"


def _in_words(error: Exception) -> str:
    """The error's first sentence, shortened, with file names only inside packages."""
    return re.sub(r"/\S*/(?=(transformers|llmc)/)", "", " ".join(str(error).split()))[:120]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    chosen = parser.parse_args().types or sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    print("| model type | vectors | scores | scores of tokens |\n| --- | --- | --- | --- |")
    for model_type in chosen:
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                cells = [
                    measure(model_type, kind) if model_type in types else ""
                    for kind, types in COLUMNS
                ]
            except Exception as e:  # transformers' own default config can't be created
                cells = [f"no: {_in_words(e)}", "", ""]
        if cells[0].startswith("no: "):
            cells[1:] = ["no" if cell.startswith("no: ") else cell for cell in cells[1:]]
        if cells[0] != "no encoder":
            print(f"| {model_type} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
