"""The page of `llmc inspect --graph`: whole in itself, and drawn by a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiny_models import make_config

from llmc.config import EngineConfig
from llmc.inspect.inspect import Inspection, inspect_model
from llmc.inspect.page import write_page
from llmc.inspect.words import GROUPS, bare_name, words_of

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def inspection(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    path = tmp_path_factory.mktemp("a<b>&model")
    make_config("llama", num_hidden_layers=5, dtype=torch.float32).save_pretrained(path)
    return inspect_model(EngineConfig(model=str(path), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def page(inspection: Inspection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "graph.html"
    path.write_text(write_page(inspection), encoding="utf-8")
    return path


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(|https?://", text)
    assert not re.findall(r"<!-- [A-Z]+ -->", text), "every part was filled in"
    assert len(text) < 500_000


def test_names_of_a_model_are_never_markup(page: Path, inspection: Inspection) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<b>" in inspection.model and html.escape(inspection.model) in text
    assert inspection.model not in text
    assert text.count("</script>") == 2


def test_the_data_is_that_of_the_graphs(page: Path, inspection: Inspection) -> None:
    found = re.search(
        r'<script id=data type="application/json">(.*?)</script>', page.read_text(), re.S
    )
    assert found is not None
    data = json.loads(found[1])
    assert [len(s["ops"]) for s in data["stages"]] == [s.num_ops for s in inspection.stages]
    assert [s["name"] for s in data["stages"][1:]] == [p.name for p in inspection.passes]
    assert {op["group"] for op in data["ops"]} <= set(GROUPS)
    last = [data["ops"][i] for i in data["stages"][-1]["ops"]]
    assert {op["layer"] for op in last} == {-1, 0, 1, 2}
    weights = sum(op["bytes"] for op in last)
    tied = inspection.sizes.weight_bytes
    captured = sum(inspection.layers[i].weight_bytes for i in (2, 3, 4))
    assert weights == tied - captured, "two of five layers are on the page"


def test_ops_have_words() -> None:
    assert bare_name("aten.add.Tensor") == "add"
    assert bare_name("<built-in function getitem>") == "getitem"
    assert words_of("rms_norm")[0] == "norm"
    assert words_of("some_new_op") == ("math", "some new op")


def browse(page: Path, fragment: str, *flags: str) -> str:
    """What a headless browser makes of the page, after its script ran."""
    browser = next((b for b in _BROWSERS if shutil.which(b)), None)
    if browser is None:
        pytest.skip(f"no browser to draw the page in: none of {', '.join(_BROWSERS)} is installed")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1400,1000",
        "--virtual-time-budget=5000",
        *flags,
        f"{page.as_uri()}{fragment}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.e2e
def test_a_browser_draws_the_captured_graph(page: Path, inspection: Inspection) -> None:
    dom = browse(page, "", "--dump-dom")
    stages = re.findall(r'data-stage="(\w+)"', dom)
    assert {"captured", *(p.name for p in inspection.passes)} == set(stages)
    assert 'data-stage="captured"' in dom and "Before the layers" in dom and "Layer 1" in dom
    assert "multiply by a weight matrix" in dom, "an open layer shows its ops"
    assert "A model is a list of" in dom, "it says how to be read"


@pytest.mark.e2e
def test_a_browser_draws_what_a_pass_changed(page: Path, inspection: Inspection) -> None:
    dom = browse(page, "#pass=fuse_norms", "--dump-dom")
    assert re.search(r'<body[^>]*data-stage="fuse_norms"', dom)
    assert re.search(r'class="op gone".*?<code>rsqrt</code>', dom, re.S)
    assert re.search(r'class="op came".*?<code>add_rms_norm</code>', dom, re.S)
    report = next(s.report for s in inspection.stages if s.report and s.report.name == "fuse_norms")
    chips = re.findall(r'class="chip came">\+(\d+) ([\w.]+)', dom)
    drawn = {name: int(count) for count, name in chips}
    assert report is not None
    assert drawn["llmc.add_rms_norm.default"] == report.added["llmc.add_rms_norm.default"]


@pytest.mark.e2e
def test_a_browser_paints_it(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "page.png"
    browse(page, "#pass=merge_linears", f"--screenshot={shot}", "--hide-scrollbars")
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 20_000, "an empty page would be a few kilobytes"
