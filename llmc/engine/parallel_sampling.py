"""Parallel sampling: sequences of one prompt (n > 1) compute it once and share its blocks.

The first one that gets a row computes the prompt; the others wait for that and then fork:

    source   [p p p p] [p p p p] [p p . .]   the prompt's blocks, then its own output
    fork      shared    shared   copy, then the last prompt token again and its own output

A fork computes the last token of the prompt itself, so that its first token is drawn with its own
seed. Full blocks are shared by reference and never written again. The block in which the prompt
ends is copied, since both write to it. All members are equal: when the source is aborted, preempted
or finished, the next one that gets a row takes its place.
"""

from __future__ import annotations

from llmc.engine.kv.row_table import NO_SOURCE, Source
from llmc.engine.plan_builder import PlanBuilder
from llmc.engine.request import Request, RequestState

WAIT = Source(wait=True)


def share_prompt(request: Request, sibling: Request) -> None:
    """Let two requests of one prompt share its blocks until one of them finishes."""
    if sibling.siblings is None:
        sibling.siblings = [sibling]
    sibling.siblings.append(request)
    request.siblings = sibling.siblings


def stop_sharing(request: Request) -> None:
    """Take a finished request out of its siblings."""
    if request.siblings is not None:
        request.siblings.remove(request)
        request.siblings = None


def find_source(request: Request, builder: PlanBuilder) -> Source:
    """A running sibling whose blocks hold the prompt, as computed by earlier steps."""
    members = request.siblings
    if members is None or request.needs_scores:
        return NO_SOURCE
    num_needed = request.num_prompt_tokens - 1
    parent = request.extension.parent if request.extension is not None else None
    if parent is not None and parent.state is RequestState.RUNNING:
        num_needed, members = len(request.token_ids) - 1, [parent]
    if num_needed < 1:
        return NO_SOURCE
    running = [member for member in members if member.state is RequestState.RUNNING]
    for member in running:
        # A member admitted by this same step may itself depend on block copies.
        num_computed = builder.num_computed_before(member)
        if num_computed is not None and num_computed >= num_needed:
            return Source(member, num_needed)
    return WAIT if running else NO_SOURCE


def same_prompt(one: Request, other: Request) -> bool:
    return (
        one.num_prompt_tokens == other.num_prompt_tokens
        and one.cache_salt == other.cache_salt
        and [image.digest for image in one.images] == [image.digest for image in other.images]
        and one.token_ids[: one.num_prompt_tokens] == other.token_ids[: other.num_prompt_tokens]
    )
