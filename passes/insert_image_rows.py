"""`insert_image_rows`: image placeholder tokens use rows of the image as their embeddings."""

from __future__ import annotations

from torch import fx

from llmc.kernels.place_rows import place_rows
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, set_arguments, val
from llmc.passes.inputs import step_input


@graph_pass(required=True)
def insert_image_rows(gm: fx.GraphModule) -> Notes:
    """Pass the rows of the step's images to the markers after the embedding and the first layers.

    Before:
        x = llmc.place_rows(embeddings, None, None, 0)
    After:
        x = llmc.place_rows(embeddings, image_rows [M, L * H], image_row [T], 0)
    """
    markers = [
        marker
        for marker in calls(gm.graph, place_rows.overload)
        if arguments(marker).image_rows is None
    ]
    if not markers:
        return []
    levels = 1 + max(int(arguments(marker).level) for marker in markers)
    like = val(arguments(markers[0]).embeddings)
    rows = like.new_empty(2, levels * int(like.shape[-1]))
    inputs = {
        "image_rows": step_input(gm.graph, "image_rows", rows),
        "image_row": step_input(gm.graph, "image_row"),
    }
    for marker in markers:
        set_arguments(marker, **inputs)
    return []
