"""The whole list of passes, in order. This is the compiler on one screen."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.passes.append_sampler import append_sampler
from llmc.passes.base import Pass
from llmc.passes.canonicalize import canonicalize
from llmc.passes.fuse_act_mul import fuse_act_mul
from llmc.passes.fuse_rms_norm import fuse_rms_norm
from llmc.passes.fuse_rope_write import fuse_rope_write
from llmc.passes.last_token_logits import last_token_logits
from llmc.passes.merge_linears import merge_linears
from llmc.passes.pack_linears import pack_linears, packed_linear_available
from llmc.passes.page_attention import page_attention
from llmc.passes.share_rotary import share_rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What the passes need to know about the engine that the graph will run in."""

    block_size: int
    max_positions: int
    device_type: str  # "cpu" or "cuda"
    streams_plain_weights: bool = False  # a kernel reads weights as stored as fast as packed ones


def pipeline(options: PipelineOptions) -> tuple[Pass, ...]:
    """Rewrites first, then fusions of what they left.

    `lower_kernels` comes after them, when the step is bound and the machine's kernels are known.
    """
    return (
        canonicalize(),  # first: the others match on one spelling
        page_attention(block_size=options.block_size),
        last_token_logits(),
        append_sampler(),  # after last_token_logits: samples the selected rows
        merge_linears(),
        share_rotary(max_positions=options.max_positions),
        fuse_rms_norm(),
        fuse_act_mul(),  # after merge_linears: reads the two halves of its output
        fuse_rope_write(),  # after share_rotary and fuse_rms_norm: reads the table, takes the norm
        pack_linears(unwanted=_why_not_pack(options)),  # after merge_linears: packs merged weights
    )


def _why_not_pack(options: PipelineOptions) -> str | None:
    if options.device_type != "cpu":
        return "packing serves CPUs"
    if options.streams_plain_weights:
        return "this CPU reads weights as stored at the speed of memory"
    if not packed_linear_available():
        return "this build of torch has no packed linear"
    return None
