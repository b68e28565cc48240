"""A wheel with the C++ ops in an empty environment: they are there at once, with no compiler.

Built for this machine's lowest level and one more, which it may lack, since what holds several is
put together otherwise than what holds one (compile.py). Not optimized: what is tested is that.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import quick_compiler
from quick_compiler import WHEEL_LEVELS

from llmc.kernels.cpu.compile import find_toolchain
from llmc.kernels.cpu.levels import VARIABLE, ladder, supported

ROOT = Path(__file__).parents[2]
NEEDED = ("llmc", "passes", "kernels", "cli", "setup.py", "pyproject.toml", "MANIFEST.in")
USE = """
import torch
from llmc.kernels.cpu import build, levels
from llmc.kernels.rms_norm import rms_norm
assert build.find_toolchain() is None
found = build.start_build()
assert found.wait() == build.PREBUILT / "ops.so", found.wait()
assert build.load()
x, weight = torch.randn(3, 100), torch.randn(100)
got = torch.ops.llmc_cpu.rms_norm(x, weight, 1e-6, 0.0)
torch.testing.assert_close(got, rms_norm.reference(x, weight, 1e-6, 0.0))
print("ops of", found.level.name, "from", build.PREBUILT)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("wheel"),  # one build for both
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toolchain = find_toolchain()
    if toolchain is None:
        pytest.skip("no C++ compiler here")
    if not supported():
        pytest.skip("no level of instructions fits this processor")
    folder = tmp_path_factory.mktemp("wheel")
    sources = tmp_path_factory.mktemp("sources")  # a build leaves files where it runs
    for name in (*NEEDED, "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    levels = ladder(platform.machine())[:WHEEL_LEVELS]
    compilers = tmp_path_factory.mktemp("compilers")
    quick = quick_compiler.make(compilers, toolchain)
    run = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation"),
            *("--outdir", str(folder), str(sources)),
        ],
        env={
            **os.environ,
            "CXX": shlex.join(quick.compiler),
            "LLMC_WHEEL_LEVELS": ",".join(level.name for level in levels),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "building the C++ ops, 1 of" in run.stdout
    (made,) = folder.glob("*.whl")
    return made


def test_a_wheel_is_for_one_machine_and_any_python(wheel: Path) -> None:
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"llmc/kernels/cpu/prebuilt/ops.so", "llmc/kernels/cpu/prebuilt/ops.json"} < {*names}
    page = {f"llmc/server/web/{file.name}" for file in (ROOT / "llmc/server/web").iterdir()}
    assert "llmc/server/web/index.html" in page < {*names}


def test_the_ops_need_no_newer_libgcc_than_manylinux_systems_have(wheel: Path) -> None:
    ops = zipfile.ZipFile(wheel).read("llmc/kernels/cpu/prebuilt/ops.so")
    versions = {int(major) for major in re.findall(rb"GCC_(\d+)\.\d", ops)}
    assert versions
    assert max(versions) <= 7  # the newest in auditwheel's policies


def test_the_ops_are_there_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    empty = tmp_path / "venv"
    venv.create(empty)
    (site,) = empty.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    # what llmc needs, from here; files that would bring this checkout's llmc are not read there
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "shared.pth").write_text("\n".join(shared))
    nothing = tmp_path / "bin"
    nothing.mkdir()
    built = ladder(platform.machine())[:WHEEL_LEVELS]  # this machine may have higher ones
    environ = {
        "PATH": str(nothing),
        "HOME": str(tmp_path),
        "LLMC_CACHE_DIR": str(tmp_path),
        VARIABLE: [level.name for level in supported() if level in built][-1],
    }
    run = subprocess.run(
        [str(empty / "bin" / "python"), "-P", "-c", USE],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert f"from {site}" in run.stdout
    assert not (tmp_path / "cpu").exists()  # nothing was built
