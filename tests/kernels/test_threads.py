"""The number of threads follows the quota of the container."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch_threads import torch_threads

from llmc.kernels.cpu import threads
from llmc.kernels.cpu.threads import limit_threads


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with torch_threads(2):
        yield


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("cores", "taken"), [(None, 2), (0.5, 1), (1.9, 1), (2.0, 2), (64.0, 2)])
def test_threads_are_no_more_than_the_quota(
    monkeypatch: pytest.MonkeyPatch, cores: float | None, taken: int
) -> None:
    monkeypatch.setattr(threads, "quota_cores", lambda: cores)
    limit_threads()
    assert torch.get_num_threads() == taken


@pytest.mark.usefixtures("two_threads")
def test_a_number_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quota_cores", lambda: 1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    limit_threads()
    assert torch.get_num_threads() == 2
