"""PromptSharing: sequences of one prompt (n > 1) compute it once and share its blocks.

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


class PromptSharing:
    """Groups of unfinished requests with the same prompt, cache salt and adapter."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Request]] = {}  # by the id of each member

    def join(self, request: Request, sibling: Request) -> None:
        """Let the two share blocks until one of them finishes."""
        group = self._groups.setdefault(sibling.request_id, [sibling])
        group.append(request)
        self._groups[request.request_id] = group

    def leave(self, request: Request) -> None:
        group = self._groups.pop(request.request_id, None)
        if group is not None:
            group.remove(request)

    def is_shared(self, request: Request) -> bool:
        return request.request_id in self._groups

    def find_source(self, request: Request, builder: PlanBuilder) -> Source:
        """A running request whose blocks hold the prompt, as computed by earlier steps."""
        members = self._groups.get(request.request_id)
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
