"""SamplingGroup: the sequences of one prompt (n > 1), which compute it once and share its blocks.

The first of them that gets a row computes the prompt; the others wait for that and then fork:

    source   [p p p p] [p p p p] [p p . .]   the prompt's blocks, then its own output
    fork      shared    shared   copy, then its last prompt token again and its own output

A fork computes the last token of the prompt itself, so that it draws its first token with its own
seed. Full blocks are shared by reference and never written again; the block in which the prompt
ends is copied, since both write to it at once. Nobody is special: when the source is aborted,
preempted or done, the next that gets a row takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmc.engine.plan_builder import PlanBuilder
from llmc.engine.request import Request, RequestState


@dataclass(slots=True, eq=False)
class SamplingGroup:
    """Requests of the same prompt and cache salt that have not finished."""

    members: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request can take its first `num_tokens` tokens from: nowhere, a request, or `wait`
    for one."""

    request: Request | None = None
    num_tokens: int = 0
    wait: bool = False


NO_SOURCE = Source()
WAIT = Source(wait=True)


def same_prompt(one: Request, other: Request) -> bool:
    return (
        one.num_prompt_tokens == other.num_prompt_tokens
        and one.cache_salt == other.cache_salt
        and one.token_ids[: one.num_prompt_tokens] == other.token_ids[: other.num_prompt_tokens]
    )


def join(request: Request, sibling: Request) -> None:
    """From here on they share; a prompt of one token has nothing to share, but beams' outputs."""
    if request.num_prompt_tokens < 2 and request.beam is None:
        return
    if sibling.group is None:
        sibling.group = SamplingGroup([sibling])
    request.group = sibling.group
    request.group.members.append(request)


def leave(request: Request) -> None:
    if request.group is not None:
        request.group.members.remove(request)
        request.group = None


def find_source(request: Request, draft: PlanBuilder) -> Source:
    """Who has the prompt's blocks computed, by steps that run before the one being planned.

    A beam goes on from its parent, if that still runs, and shares all of it.
    """
    if request.group is None or request.needs_scores:
        return NO_SOURCE
    num_needed = request.num_prompt_tokens - 1
    members = request.group.members
    parent = request.beam.parent if request.beam is not None else None
    if parent is not None and parent.state is RequestState.RUNNING:
        num_needed, members = len(request.token_ids) - 1, [parent]
    running = [m for m in members if m.state is RequestState.RUNNING]
    for member in running:
        # Whoever enters in this very step may hold copies that are yet to be made.
        if not draft.enters(member) and (
            member.num_computed - draft.num_planned(member) >= num_needed
        ):
            return Source(member, num_needed)
    return WAIT if running else NO_SOURCE
