"""`take_image_rows`: tokens that stand for a part of an image have its row for their embedding."""

from __future__ import annotations

from torch import fx

from llmc.kernels.place_rows import place_rows
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, calls, set_arguments, val
from llmc.passes.inputs import step_input


@graph_pass(required=True)
def take_image_rows(gm: fx.GraphModule) -> Notes:
    """Give the place behind the embedding the rows of the step's images.

    Before:
        x = llmc.place_rows(embeddings, None, None)
    After:
        x = llmc.place_rows(embeddings, image_rows [M, H], image_row [T])
    """
    for marker in calls(gm.graph, place_rows.overload):
        if arguments(marker).image_rows is not None:
            continue
        embeddings = val(arguments(marker).embeddings)
        rows = step_input(
            gm.graph, "image_rows", embeddings.new_empty(2, int(embeddings.shape[-1]))
        )
        set_arguments(marker, image_rows=rows, image_row=step_input(gm.graph, "image_row"))
    return []
