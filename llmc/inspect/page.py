"""Inspection -> one self-contained HTML file with style, script and data."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from llmc.inspect.inspect import Inspection
from llmc.inspect.records import page_data
from llmc.inspect.units import format_bytes, format_count
from llmc.inspect.words import GROUPS


def write_page(inspection: Inspection) -> str:
    """The page. Without JavaScript, it shows the facts and a sentence about what is missing."""
    folder = files("llmc.inspect")
    template = (folder / "page.html").read_text(encoding="utf-8")
    data = json.dumps({**page_data(inspection), "groups": GROUPS}, separators=(",", ":"))
    parts = {
        "TITLE": html.escape(inspection.model),
        "FACTS": _facts(inspection),
        "SCOPE": _scope(inspection),
        "STYLE": (folder / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": (folder / "page.js").read_text(encoding="utf-8"),
        # text from a model must not be able to end the script element
        "DATA": data.replace("<", "\\u003c"),
    }
    for name, text in parts.items():
        template = template.replace(f"<!-- {name} -->", text)
    return template


def _facts(inspection: Inspection) -> str:
    sizes = inspection.sizes
    facts = [
        (format_count(inspection.num_parameters), "parameters"),
        (f"{inspection.num_layers}", "layers"),
        (format_bytes(sizes.weight_bytes), f"of weights, {inspection.dtype}"),
        (format_bytes(sizes.kv_bytes_per_token), "of KV cache per token"),
        (f"{inspection.stages[0].num_ops} \u2192 {inspection.stages[-1].num_ops}", "ops"),
    ]
    if inspection.num_active_parameters != inspection.num_parameters:
        facts.insert(1, (format_count(inspection.num_active_parameters), "active per token"))
    return "".join(
        f"<div class=fact><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for value, name in facts
    )


def _scope(inspection: Inspection) -> str:
    said = f"{html.escape(inspection.architecture)} on {html.escape(inspection.device)}."
    if inspection.num_captured < inspection.num_layers:
        said += (
            f" The first {inspection.num_captured} of {inspection.num_layers} layers are shown; "
            "the others are copies of these."
        )
    return said
