"""The Dockerfile's stages, read; and run as scripts, since no container runs where the tests run.

An image is a folder, with a new virtual environment in the place of the image's Python. Nothing is
downloaded: packages that a step installs are those of the environment that runs the tests.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_log = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
NOT_RUN = {
    "apt-get": "this machine's own tools are used",
    "useradd": "a folder has no users of its own",
}
NO_EFFECT = ("CMD", "EXPOSE", "USER")  # on what a later step finds


@dataclass(kw_only=True)
class Stage:
    name: str
    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    found: dict[str, Stage] = {}
    for line in filter(str.strip, lines):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            parent, name = re.fullmatch(r"(\S+) AS (\w+)", rest).groups()  # type: ignore[union-attr]
            stage = found[name] = Stage(name=name, parent=parent)
        else:
            stage.steps.append((instruction, " ".join(rest.split())))
    return found


@dataclass(kw_only=True)
class Image:
    """`root`: the folder that stands for /. `environ`: of each step, by ENV and ARG as well."""

    root: Path
    environ: dict[str, str]
    folder: Path
    entrypoint: list[str] = field(default_factory=list)

    @property
    def python(self) -> Path:
        return self.root / "python" / "bin" / "python"

    @property
    def site(self) -> Path:
        (found,) = self.root.glob("python/lib/python*/site-packages")
        return found

    def inside(self, path: str) -> Path:
        """Where a path of the container is."""
        return self.root / path[1:] if path.startswith("/") else self.folder / path

    def run(self, command: list[str], environ: Mapping[str, str]) -> str:
        """Run a command with this environment; return its output."""
        done = subprocess.run(
            command,
            env=environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}"
        return done.stdout


@dataclass(kw_only=True)
class Builder:
    """Builds images as `docker build` does: each stage from its parent.

    `arguments`: as --build-arg. `environ`: what steps find in their environment in addition.
    """

    folder: Path
    arguments: Mapping[str, str]
    environ: Mapping[str, str]
    images: dict[str, Image] = field(default_factory=dict)
    output: str = ""  # of all steps

    def build(self, name: str) -> Image:
        stage = stages()[name]
        image = self.images.get(name)
        if image is None:
            if stage.parent in stages():
                image = self.build(stage.parent)  # which no other stage needs as it was
            else:
                image = self._python_image(name)
            self.images[name] = image
            for instruction, text in stage.steps:
                self._step(image, instruction, text)
        return image

    def _python_image(self, name: str) -> Image:
        root = self.folder / name
        venv.create(root / "python", with_pip=True)
        environ = {
            "PATH": f"{root / 'python' / 'bin'}{os.pathsep}{os.defpath}",
            "HOME": str(root),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(_wheel_of_setuptools(self.folder)),
            **self.environ,
        }
        image = Image(root=root, folder=root, environ=environ)
        # files that would bring this checkout's llmc are not read there
        shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (image.site / "shared.pth").write_text("\n".join(shared))
        return image

    def _step(self, image: Image, instruction: str, text: str) -> None:
        if instruction == "RUN":
            self._run(image, text)
        elif instruction == "COPY":
            self._copy(image, text)
        elif instruction == "WORKDIR":
            image.folder = image.inside(text)
            image.folder.mkdir(parents=True, exist_ok=True)
        elif instruction == "ENV":
            image.environ.update(word.split("=", 1) for word in shlex.split(text))
        elif instruction == "ARG":
            [(name, default)] = [word.split("=", 1) for word in shlex.split(text)]
            image.environ[name] = self.arguments.get(name, default)
        elif instruction == "ENTRYPOINT":
            image.entrypoint = re.findall(r'"([^"]*)"', text)
        else:
            assert instruction in NO_EFFECT, f"{instruction} {text}: not known here"

    def _run(self, image: Image, command: str) -> None:
        tool = command.split()[0]
        if tool in NOT_RUN:
            _log.warning("not run, since %s: %s", NOT_RUN[tool], command)
            return
        command = re.sub(r"(?<![\w./-])(?=/(dist|src|home)\b)", str(image.root), command)
        self.output += image.run(["/bin/sh", "-c", command], image.environ)

    def _copy(self, image: Image, text: str) -> None:
        *options, source, target = text.split()
        if options:
            (option,) = options
            there = self.build(option.removeprefix("--from=")).inside(source)
            shutil.copytree(there, image.inside(target))
        else:
            assert source == ".", f"COPY {text}: not known here"
            copy_tree(image.inside(target))


def copy_tree(target: Path) -> None:
    """Copy this checkout, without what .dockerignore names."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()

    def left_out(folder: str, names: list[str]) -> set[str]:
        paths = {name: Path(folder, name).relative_to(ROOT) for name in names}
        return {name for name in names if any(_matches(paths[name], one) for one in ignored)}

    shutil.copytree(ROOT, target, dirs_exist_ok=True, ignore=left_out)


def _matches(path: Path, pattern: str) -> bool:
    """Whether a line of .dockerignore is about this path; `**/` is any folder, or none."""
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(path.name, pattern.removeprefix("**/"))
    return fnmatch.fnmatch(str(path), pattern)


def _wheel_of_setuptools(folder: Path) -> Path:
    """A folder with this environment's setuptools as a wheel: a build installs it by itself."""
    made = folder / "wheels"
    if not made.exists():
        made.mkdir()
        found = importlib.metadata.distribution("setuptools")
        left_out = (".pyc", "/INSTALLER", "/REQUESTED", "/RECORD")  # what pip added
        files = [file for file in found.files or () if not str(file).endswith(left_out)]
        assert files, "this environment's setuptools was not installed by pip"
        with zipfile.ZipFile(made / f"setuptools-{found.version}-py3-none-any.whl", "w") as wheel:
            for file in files:
                wheel.write(str(file.locate()), str(file))
            record = "".join(f"{file},,\n" for file in files)
            wheel.writestr(f"setuptools-{found.version}.dist-info/RECORD", record)
    return made
