"""The examples of docs/python.md, run one after the other as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from real_model import needs_model

from llmc.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
)
from llmc.sampling_params import BeamSearchParams

TEXT = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@needs_model
@pytest.mark.exhaustive
def test_the_examples_run(tmp_path: Path) -> None:
    assert len(EXAMPLES) >= 8
    marked = [f"{code}\nprint('== example {i} ran')\n" for i, code in enumerate(EXAMPLES)]
    script = tmp_path / "examples.py"
    script.write_text("\n".join(marked), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error::ResourceWarning", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for i in range(len(EXAMPLES)):
        assert f"== example {i} ran" in done.stdout, done.stdout
    said = done.stdout
    assert "[True, True, True]" in said
    assert "None | This model's maximum context length is" in said  # the good one and the bad one
    assert "top_p must be a number in (0, 1], got 1.5" in said
    assert re.search(r"Paris.* stop$", said, re.MULTILINE), said  # the chat's answer


def test_every_field_of_an_output_is_described() -> None:
    kinds = (RequestOutput, CompletionOutput, RequestMetrics)
    for kind in (*kinds, BeamSearchParams, BeamSearchOutput, BeamSearchSequence):
        for field in fields(kind):
            assert f"`{field.name}`" in TEXT, f"{kind.__name__}.{field.name}"
