"""Makes llmc importable from a checkout that is not installed: links with the installed layout.

`passes/`, `kernels/` and `cli/` are installed inside the package; here links put them there. A GPU
machine may have no network and no build tools. Imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOVED = ("passes", "kernels", "cli")


def make_importable() -> None:
    """Add links, unless llmc is installed. Child processes find the links through PYTHONPATH."""
    if importlib.util.find_spec("llmc") is not None:
        return
    site = link_tree(Path(tempfile.mkdtemp(prefix="llmc-tree-")))
    sys.path.insert(0, str(site))
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)


def link_tree(site: Path) -> Path:
    """Create `site`/llmc with links to every entry of the package and to the folders next to it."""
    package = site / "llmc"
    package.mkdir()
    for entry in (ROOT / "llmc").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for name in MOVED:
        (package / name).symlink_to(ROOT / name)
    return site
