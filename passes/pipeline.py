"""The whole list of passes, in order. This is the compiler on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.kernels.cache_dtype import CACHE_DTYPES
from llmc.passes.absorb_mla import absorb_mla
from llmc.passes.append_sampler import append_sampler
from llmc.passes.apply_lora import apply_lora
from llmc.passes.attend_whole_images import attend_whole_images
from llmc.passes.base import Pass
from llmc.passes.canonicalize import canonicalize
from llmc.passes.find_activations import find_activations
from llmc.passes.find_attention import find_attention
from llmc.passes.find_convolutions import find_convolutions
from llmc.passes.find_distance_biases import find_distance_biases
from llmc.passes.find_entries import find_entries
from llmc.passes.find_indexers import find_indexers
from llmc.passes.find_key_biases import find_key_biases
from llmc.passes.find_linear_attention import find_linear_attention
from llmc.passes.find_positions import find_positions
from llmc.passes.find_shifts import find_shifts
from llmc.passes.fold_weights import fold_weights
from llmc.passes.fuse_act_mul import fuse_act_mul
from llmc.passes.fuse_convolutions import fuse_convolutions
from llmc.passes.fuse_experts import fuse_experts
from llmc.passes.fuse_gated_norms import fuse_gated_norms
from llmc.passes.fuse_linears import fuse_linears
from llmc.passes.fuse_norms import fuse_norms
from llmc.passes.fuse_recurrences import fuse_recurrences
from llmc.passes.fuse_rope_attention import fuse_rope_attention
from llmc.passes.fuse_rope_write import fuse_rope_write
from llmc.passes.fuse_routers import fuse_routers
from llmc.passes.fuse_sampler import fuse_sampler
from llmc.passes.group_caches import group_caches
from llmc.passes.insert_image_rows import insert_image_rows
from llmc.passes.join_shared_experts import join_shared_experts
from llmc.passes.last_token_logits import last_token_logits
from llmc.passes.logits_processors import LogitsProcessor, processor_passes
from llmc.passes.merge_linears import merge_linears
from llmc.passes.options import PipelineOptions
from llmc.passes.order_channels import order_channels
from llmc.passes.page_attention import page_attention
from llmc.passes.page_entries import page_entries
from llmc.passes.pool import pool, running_pool
from llmc.passes.quantize_linears import quantize_linears
from llmc.passes.read_taps import read_taps
from llmc.passes.round_activations import round_activations
from llmc.passes.shard_linears import shard_linears
from llmc.passes.share_rotary import share_rotary
from llmc.passes.share_routing import share_routing
from llmc.passes.slot_state import slot_state
from llmc.passes.split_prompts import split_prompts
from llmc.passes.tap_states import tap_states
from llmc.passes.widen_logits import widen_logits
from llmc.pooling import DraftHead, Method


def pipeline(
    options: PipelineOptions,
    extra: Sequence[Pass] = (),
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[Pass, ...]:
    """List the passes: rewrites first, then fusions. `extra` are user passes, and `processors` are
    user logits processors.

    `lower_kernels` runs later, when the step is bound and the machine's kernels are known.
    """
    return (
        canonicalize(),  # first: the other passes match the canonical form
        *(p for p in extra if p.place == "early"),  # they see the model's own ops; we fuse theirs
        find_activations(),  # before fuse_act_mul: it matches torch's ops
        insert_image_rows(),
        *_taps(options),  # early: fusions absorb the outputs of layers
        find_attention(  # page_attention pages what it finds
            max_positions=options.max_positions, encoder=options.encoder
        ),
        find_indexers(  # before page_attention: it matches unpaged attention over a sequence
            max_positions=options.max_positions, block_size=options.block_size
        ),
        find_key_biases(max_positions=options.max_positions, block_size=options.block_size),
        find_entries(),
        page_entries(  # before page_attention: it leaves plain attention if there are no entries
            block_size=options.block_size,
            max_positions=options.max_positions,
            cache_dtype=CACHE_DTYPES[options.kv_cache_dtype],
            long_texts=options.long_context_from > 0,
        ),
        find_distance_biases(),
        # after find_indexers: layers with a sparse indexer are not rewritten
        absorb_mla(unwanted=_keeps_heads(options)),
        page_attention(
            block_size=options.block_size,
            cache_dtype=CACHE_DTYPES[options.kv_cache_dtype],
            encoder=options.encoder,
        ),
        find_convolutions(),
        find_shifts(),
        find_linear_attention(),
        *_sums(options.pooling),
        slot_state(),  # after those passes: the ops they insert have state too
        find_positions(  # after those passes: the code that numbered keys for masks is gone
            max_positions=options.max_positions
        ),
        *_fed(options),
        last_token_logits(),
        # after last_token_logits: only the selected rows are widened
        *_widened(options.draft_head),
        append_sampler(is_head=options.draft_head is not None)
        if options.pooling is None
        else pool(),
        *processor_passes(processors),  # between the model and append_sampler's first op
        shard_linears(  # before passes that merge weights or fuse ops: its rules are for torch ops
            size=options.tensor_parallel_size, format=options.quantization, kept=options.kept
        ),
        merge_linears(kept=options.kept),
        apply_lora(  # after merge_linears; before passes that read halves of merged outputs
            slots=options.max_loras,
            rank=options.max_lora_rank,
            expert_rank=options.max_lora_expert_rank,
        ),
        share_rotary(max_positions=options.max_positions + options.long_context_from),
        fold_weights(),  # before passes that match the weights of recurrent layers
        fuse_gated_norms(),  # before the passes that would take the gate or the norm alone
        fuse_recurrences(),
        fuse_norms(),
        fuse_act_mul(),  # after merge_linears: reads the two halves of its output
        fuse_rope_write(),  # after share_rotary and fuse_norms: it uses the table and the norm
        group_caches(max_positions=options.max_positions),  # after passes that match by cache
        attend_whole_images(where=options.whole_images),  # before passes for causal attention only
        split_prompts(unwanted=_unless_gpu(options, "FlashAttention")),
        fuse_rope_attention(  # after the passes that match rope_write or paged_attention
            max_positions=options.max_positions + options.long_context_from,
            unwanted=_unless_gpu(options, "this fusion"),
        ),
        quantize_linears(  # after merge_linears: it quantizes merged weights as a whole
            format=options.quantization, kept=options.kept
        ),
        round_activations(  # after quantize_linears: its linears
            bits=options.activation_bits, float8=options.float8_activations
        ),
        order_channels(),  # after quantize_linears: it orders the rows of plain weights
        fuse_routers(  # after the passes that match or replace the experts' linears
            absorbs_norms=options.device_type == "cuda"
        ),
        join_shared_experts(  # after fuse_routers: it changes the choice
            unwanted=_unless_gpu(options, "this fusion")
        ),
        share_routing(  # after the passes that match or replace the experts' linears
            sorts=options.device_type == "cuda"
        ),
        fuse_sampler(),  # after processor_passes: a processor comes before process_logits
        fuse_convolutions(  # after fuse_recurrences: a convolution has its activation
            unwanted=_unless_gpu(options, "this fusion")
        ),
        fuse_linears(  # after the passes that fuse the norms and activations that it absorbs
            unwanted=_unless_gpu(options, "this fusion")
        ),
        fuse_experts(  # after fuse_routers: its ops
            unwanted=_unless_gpu(options, "this fusion")
        ),
        *(p for p in extra if p.place == "late"),  # they see the ops that will run
    )


def _unless_gpu(options: PipelineOptions, what: str) -> str | None:
    return None if options.device_type == "cuda" else f"{what} is for GPUs only"


def _keeps_heads(options: PipelineOptions) -> str | None:
    """Why keys and values are kept per head where one latent could be cached, or None."""
    if options.tensor_parallel_size > 1:
        return "each rank has its own heads"
    if options.max_loras:
        return "LoRA adapters change keys and values"
    return None if options.whole_images == "none" else "image tokens attend to their whole image"


def _taps(options: PipelineOptions) -> tuple[Pass, ...]:
    if options.taps is None:
        return ()
    return (tap_states(layers=options.taps, block_size=options.block_size),)


def _fed(options: PipelineOptions) -> tuple[Pass, ...]:
    return () if options.draft_head is None else (read_taps(block_size=options.block_size),)


def _widened(head: DraftHead | None) -> tuple[Pass, ...]:
    if head is None or not head.has_id_map:
        return ()
    return (widen_logits(vocab_size=head.vocab_size),)


def _sums(pooling: Method | None) -> tuple[Pass, ...]:
    """Before slot_state, which assigns their slots."""
    return () if pooling is None else (running_pool(method=pooling),)
