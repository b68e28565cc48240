"""The kernels' team of threads: several users at once, a forked process, work for few or many."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch_threads import torch_threads

import llmc.kernels.cpu  # noqa: F401
from llmc.kernels.cpu.build import load

pytestmark = pytest.mark.skipif(not load(), reason="there are no C++ ops on this machine")


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    """More than there may be cores: members that come late, or not at all, are the case to test."""
    with torch_threads(4):
        yield


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.llmc_cpu.linear(x, weight, None)
    return result


def test_many_short_products_and_pauses_give_the_same() -> None:
    x, weight = torch.randn(1, 512), torch.randn(2048, 512)
    expected = product(x, weight)
    torch.testing.assert_close(expected, F.linear(x, weight), rtol=1e-4, atol=1e-4)
    for i in range(300):
        if i % 100 == 0:
            torch.ones(1 << 22).sum()  # the members fall asleep meanwhile
        assert torch.equal(product(x, weight), expected)


def test_threads_that_use_it_at_once_do_not_disturb_each_other() -> None:
    weights = [torch.randn(1024, 256) for _ in range(6)]
    x = torch.randn(1, 256)
    expected = [product(x, weight) for weight in weights]

    def run(i: int) -> bool:
        torch.set_num_threads(4)  # OpenMP keeps it for each thread
        return all(torch.equal(product(x, weights[i]), expected[i]) for _ in range(200))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(6)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others take no longer for subnormals")
def test_results_that_are_subnormal_are_zeros_on_each_thread_and_in_our_ops_only() -> None:
    tiny = torch.full((64, 1), 1e-20)
    x, weight = (F.pad(tiny, (0, 255)) for _ in range(2))
    for _ in range(20):
        assert not product(x, weight).any()
        assert (tiny @ tiny.T).min() > 0 and (tiny * tiny).min() > 0


def test_a_forked_process_has_a_team_of_its_own() -> None:
    x, weight = torch.randn(1, 512), torch.randn(2048, 512)
    expected = product(x, weight)  # the parent has members
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(product(x, weight), expected)
