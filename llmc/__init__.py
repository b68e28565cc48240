"""llmc serves any Hugging Face causal language model by compiling its own code.

Public names are loaded on first use, so that `import llmc` is cheap.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.async_llm import AsyncLLM
    from llmc.config import EngineConfig
    from llmc.errors import LlmcError
    from llmc.llm import LLM
    from llmc.lora_request import LoRARequest
    from llmc.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
    )
    from llmc.passes.logits_processors import LogitsBatch, LogitsProcessor, RowTable
    from llmc.pooling import PoolingParams
    from llmc.sampling_params import BeamSearchParams, SamplingParams
    from llmc.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

# OpenMP threads that finish their part of a parallel region spin while they wait for the others: by
# default for several milliseconds (libgomp) or 200 ms (libiomp). If another process preempts one
# thread, the others spin for its whole time slice and occupy the cores that it could move to. Half
# a millisecond bridges the gaps within a step. The variables are read when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("KMP_BLOCKTIME", "1")

_PUBLIC = {
    "LLM": "llmc.llm",
    "AsyncLLM": "llmc.async_llm",
    "EngineConfig": "llmc.config",
    "LoRARequest": "llmc.lora_request",
    "SamplingParams": "llmc.sampling_params",
    "BeamSearchParams": "llmc.sampling_params",
    "StructuredOutputsParams": "llmc.structured_outputs",
    "RequestOutput": "llmc.outputs",
    "CompletionOutput": "llmc.outputs",
    "BeamSearchOutput": "llmc.outputs",
    "BeamSearchSequence": "llmc.outputs",
    "ClassificationOutput": "llmc.outputs",
    "EmbeddingOutput": "llmc.outputs",
    "PoolingOutput": "llmc.outputs",
    "PoolingParams": "llmc.pooling",
    "PoolingRequestOutput": "llmc.outputs",
    "ScoringOutput": "llmc.outputs",
    "Logprob": "llmc.outputs",
    "LlmcError": "llmc.errors",
    "LogitsBatch": "llmc.passes.logits_processors",
    "LogitsProcessor": "llmc.passes.logits_processors",
    "RowTable": "llmc.passes.logits_processors",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "LlmcError",
    "LoRARequest",
    "LogitsBatch",
    "LogitsProcessor",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RowTable",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'llmc' has no attribute {name!r}")
