"""The definition of the step's inputs, against the op that fills them.

`prepare_step` has them as its arguments, in C++ and in Triton too: schemas are compared there.
"""

from __future__ import annotations

import op_cases
import torch
from torch import Tensor

from llmc.kernels.prepare_step import prepare_step
from llmc.kernels.registry import OPS
from llmc.kernels.step_inputs import (
    IMAGE_INPUTS,
    PREPARED,
    ROW_TABLES,
    SIZES,
    STEP_INPUTS,
    base_name,
    input_named,
    of_group,
)


def test_prepare_step_takes_the_inputs_in_their_order() -> None:
    prepared = tuple(PREPARED)
    assert tuple(prepare_step.defaults)[-len(prepared) :] == prepared == prepare_step.mutates


def test_its_cases_are_of_these_shapes_and_dtypes() -> None:
    for case in op_cases.cases("prepare_step", torch.float32):
        given = OPS["prepare_step"].bind(case)
        work: Tensor = given["work"]
        sizes = {"R": len(work), "R + 1": len(work) + 1, "blocks": given["block_table"].shape[-1]}
        sizes |= {"T": int(work[:, 2].sum()), "S": int(work[:, 6].sum())}
        for name in PREPARED:
            spec, tensor = STEP_INPUTS[name], given[name]
            groups = tensor.shape[:1] if spec.grouped else ()
            assert tensor.shape == (*groups, *spec.shape(sizes)) and tensor.dtype == spec.dtype


def test_every_dimension_is_explained_and_tables_go_by_rows() -> None:
    tables, packed = ROW_TABLES.values(), [*STEP_INPUTS.values(), *IMAGE_INPUTS.values()]
    used = {dim for spec in (*packed, *tables) for dim in spec.dims}
    assert used == set(SIZES)
    assert all(table.dims[0] == "rows" for table in tables)
    assert not any("rows" in spec.dims for spec in packed)


def test_the_inputs_of_a_group_go_by_the_first_groups_name() -> None:
    for name, spec in STEP_INPUTS.items():
        assert of_group(name, 0) == name == base_name(name)
        if spec.grouped:
            assert input_named(of_group(name, 3)) is spec
    assert input_named("history") is ROW_TABLES["history"]
