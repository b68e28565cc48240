"""Which errors end the engine, and which only the requests of a step."""

from __future__ import annotations

import pytest
import torch

from llmc.errors import EngineDeadError
from llmc.runner.faults import classified

SICK = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """What the device says when it is asked; [None]: it is well."""
    given: list[Exception | None] = [None]

    def synchronize() -> None:
        if given[-1] is not None:
            raise given[-1]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return given


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a request is wrong"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),  # of a graph that is loaded
    ],
)
@pytest.mark.parametrize("has_gpu", [True, False])
def test_errors_that_another_step_may_not_meet(
    error: Exception,
    has_gpu: bool,
    answers: list[Exception | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    assert classified(error) is error


def test_a_fault_of_a_kernel_ends_the_engine_in_whatever_words_it_is_told(
    answers: list[Exception | None],
) -> None:
    """Else every request to come would be ended as the one that makes steps fail."""
    answers.append(RuntimeError(SICK))
    for error in (
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("anything"),
    ):
        found = classified(error)
        assert isinstance(found, EngineDeadError)
        assert "illegal memory access was encountered; restart the engine" in str(found)


@pytest.mark.parametrize(
    "text", [SICK, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "cuDNN error: CUDNN_STATUS_X"]
)
def test_errors_of_a_device_that_seems_well(text: str, answers: list[Exception | None]) -> None:
    assert isinstance(classified(RuntimeError(text)), EngineDeadError)
    dead = EngineDeadError("gone")
    assert classified(dead) is dead
