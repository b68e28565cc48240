"""The op tests and a part of parity, at every level of this processor but the one in use here.

At the lowest level, which most users have, this part is larger.

The level of a process is chosen once, so each runs in a process with LLMC_CPU_TARGET set. On a
machine that has x86-64-v3 alone the ordinary tests are that already.
"""

from __future__ import annotations

import op_cases
import pytest
from pytest_process import passed_alone

from llmc.kernels.cpu.levels import VARIABLE, pick_level, supported

TESTS = (
    "tests/kernels/test_ops_cpu.py",
    "tests/kernels/test_linear_cpu.py",
    "tests/kernels/test_expert_linear_cpu.py",
    "tests/kernels/test_quantized_linear.py",
    "tests/kernels/test_pack_gguf.py",
    *(
        f"tests/parity/test_greedy_parity.py::test_whole_prompts_in_one_batch[{family}]"
        for family in ("qwen3", "gpt_oss")
    ),
)
# of when they are loaded, in a process of its own; at another level it is the same
OF_ANY_LEVEL = "tests/kernels/test_pack_gguf.py::test_a_start_loads_the_cpp_ops_before_the_weights"
LOWEST = "tests/parity/test_mechanisms.py"
OTHERS = [level.name for level in supported() if level != pick_level()]

pytestmark = pytest.mark.slow


ALONE = pytest.param("", marks=pytest.mark.skip(reason="this processor has one level alone"))


@pytest.mark.parametrize("level", OTHERS or [ALONE])
def test_ops_and_parity_at_another_level(level: str) -> None:
    op_cases.require_cpu_ops()
    tests = (*TESTS, LOWEST) if level == supported()[0].name else TESTS
    options = ("-m", "not exhaustive", "--deselect", OF_ANY_LEVEL)
    assert passed_alone(*options, *tests, variables={VARIABLE: level}) > 2000
