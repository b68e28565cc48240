"""The wheel and the container image, by the Dockerfile's steps: their C++ ops need no compiler.

Built for this machine's lowest level and one more, which it may lack, since what holds several is
put together otherwise than what holds one (compile.py). Not optimized: what is tested is that.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import quick_compiler
import torch
from dockerfile import ROOT, Builder, Image, copy_tree
from packaging.version import Version
from quick_compiler import WHEEL_LEVELS

from llmc import __version__
from llmc.kernels.cpu.compile import find_toolchain
from llmc.kernels.cpu.levels import VARIABLE, ladder, supported

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
    pytest.mark.xdist_group("wheel"),  # one build for all
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The one for CPUs."""
    pytest.importorskip("ensurepip", reason="this Python makes no virtual environments with pip")
    toolchain = find_toolchain()
    if toolchain is None:
        pytest.skip("no C++ compiler here")
    if not supported():
        pytest.skip("no level of instructions fits this processor")
    levels = ladder(platform.machine())[:WHEEL_LEVELS]
    quick = quick_compiler.make(tmp_path_factory.mktemp("compilers"), toolchain)
    builder = Builder(
        folder=tmp_path_factory.mktemp("images"),
        arguments={"TORCH": f"torch=={Version(torch.__version__).public}"},
        environ={
            "CXX": shlex.join(quick.compiler),
            "LLMC_WHEEL_LEVELS": ",".join(level.name for level in levels),
        },
    )
    image = builder.build("cpu")
    assert "building the C++ ops, 1 of" in builder.output
    return image


@pytest.fixture(scope="module")
def wheel(image: Image) -> Path:
    (made,) = image.inside("/dist").glob("*.whl")
    return made


@pytest.fixture
def environ(image: Image, tmp_path: Path) -> dict[str, str]:
    """The environment of a container: its PATH has no compiler."""
    built = ladder(platform.machine())[:WHEEL_LEVELS]  # this machine may have higher ones
    return {
        "PATH": str(image.python.parent),
        "HOME": str(tmp_path),
        VARIABLE: [level.name for level in supported() if level in built][-1],
    }


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


def test_the_ops_are_there_without_a_compiler(
    image: Image, environ: dict[str, str], tmp_path: Path
) -> None:
    output = image.run([str(image.python), "-P", "-c", USE], environ)
    assert f"from {image.site}" in output
    assert not list(tmp_path.rglob("ops.so"))  # nothing was built


def test_the_image_runs_llmc_by_its_entry_point(image: Image, environ: dict[str, str]) -> None:
    assert image.folder == image.inside("/home/llmc")
    assert image.entrypoint == ["llmc"]
    run = [str(image.python.with_name("llmc"))]
    assert image.run([*run, "--version"], environ) == f"llmc {__version__}\n"
    assert re.search(r"^c\+\+ compiler +not found", image.run([*run, "collect-env"], environ), re.M)
    found = image.run([*run, "doctor"], environ)  # which fails if a requirement is missing
    library = image.site / "llmc/kernels/cpu/prebuilt/ops.so"
    assert re.search(rf"^ok +C\+\+ ops +{re.escape(str(library))}$", found, re.M)


def test_the_sdist_makes_the_same_wheel_as_the_tree(tmp_path: Path) -> None:
    sources, from_tree, from_sdist = (tmp_path / name for name in ("sources", "tree", "sdist"))
    copy_tree(sources)  # a build leaves files where it runs
    folders = {"llmc": "llmc", **{name: f"llmc/{name}" for name in ("passes", "kernels", "cli")}}
    packaged = {
        f"{package}/{path.relative_to(sources / folder).as_posix()}"
        for folder, package in folders.items()
        for path in (sources / folder).rglob("*")
        if path.is_file()
    }
    earlier = sources / "build/lib/llmc/kernels/cpu/prebuilt/ops.so"  # of a build with a library
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    # without an option: the sdist, and a wheel from what it unpacks to
    for folder, options in ((from_tree, ["--wheel"]), (from_sdist, [])):
        command = [sys.executable, "-P", "-m", "build", "--no-isolation", *options]
        done = subprocess.run(
            [*command, "--outdir", str(folder), str(sources)],
            env={**os.environ, "LLMC_WHEEL_LEVELS": "none"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(list(from_sdist.glob("*.tar.gz"))) == 1
    expected, found = _files(from_tree), _files(from_sdist)
    assert found.keys() == expected.keys()
    assert found == expected
    assert {name for name in found if ".dist-info/" not in name} == packaged


def _files(folder: Path) -> dict[str, bytes]:
    """The contents of the wheel in `folder`, by name; but for the list of them."""
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if "/RECORD" not in name}
