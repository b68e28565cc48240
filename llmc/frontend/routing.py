"""Chooses which of several engines of one model a request is sent to.

Each frontend routes its own requests by what it has sent to which engine: it estimates an engine's
prefix cache from the prompts that it has sent there, in blocks. A wrong estimate only costs time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmc.engine.messages import AddRequest, EngineStats
from llmc.model_info import ModelInfo

QUIET_S = 60.0  # an engine that has requests but is silent for this long gets no more


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """One engine, as seen by a frontend."""

    info: ModelInfo
    stats: EngineStats
    num_rows: int
    caches_prefixes: bool = True
    is_up: bool = True
    heard_at: float = field(default_factory=time.monotonic)
    # Blocks to compute for each of its requests, by request id.
    requests: dict[str, int] = field(default_factory=dict)
    num_blocks: int = 0  # sum of these
    # Digests of the blocks of prompts that were sent, least recent first.
    sent: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def add(self, request_id: str, num_new: int, digests: Sequence[int]) -> None:
        if not self.requests:
            self.heard_at = time.monotonic()  # it was idle, so its silence does not count
        self.requests[request_id] = num_new
        self.num_blocks += num_new
        for digest in digests if self.caches_prefixes else ():
            self.sent[digest] = None
            self.sent.move_to_end(digest)
        while len(self.sent) > max(1, self.stats.num_blocks):
            self.sent.popitem(last=False)

    def remove(self, request_id: str) -> None:
        self.num_blocks -= self.requests.pop(request_id, 0)

    def num_new(self, digests: Sequence[int]) -> int:
        """Blocks to compute for a prompt: those after the prefix that was sent before, plus the
        last one, which has room for the answer."""
        num_known = next((i for i, d in enumerate(digests) if d not in self.sent), len(digests))
        return len(digests) - num_known + 1

    def has_room(self, num_new: int) -> bool:
        """Whether a request could start at once."""
        return (
            len(self.requests) < self.num_rows
            and self.stats.num_waiting == self.stats.num_deferred
            and self.stats.num_free_blocks >= num_new
        )

    def is_quiet(self) -> bool:
        """Whether it has requests but has been silent for too long."""
        return bool(self.requests) and time.monotonic() - self.heard_at > QUIET_S


def choose(loads: Mapping[str, EngineLoad], message: AddRequest, digests: Sequence[int]) -> str:
    """The name of the best engine that is up; at least one must be.

    Engines that can hold the request and start it at once are preferred. Among these, the one with
    the least to compute is chosen, counting the blocks of its requests and those of this request
    that are not in its cache. So a request follows its prefix, until the other engines have so much
    less to do that recomputing the prefix pays off. Ties go to the engine with the emptiest cache.
    """
    length = len(message.prompt_token_ids) + (message.sampling.max_tokens or 0)

    def rank(name: str) -> tuple[bool, bool, bool, int, int]:
        load = loads[name]
        num_new = load.num_new(digests)
        return (
            length > min(load.info.max_model_len, load.info.pool_tokens),
            load.is_quiet(),
            not load.has_room(num_new),
            load.num_blocks + num_new,
            len(load.sent),
        )

    return min((name for name, load in loads.items() if load.is_up), key=rank)


def prompt_digests(message: AddRequest, block_size: int) -> list[int]:
    """For each full block, a digest of all tokens up to its end, the cache salt and the adapter."""
    return list(_digests(message, block_size))


def _digests(message: AddRequest, block_size: int) -> Iterator[int]:
    adapter = None if message.adapter is None else message.adapter.lora_int_id
    digest = hash((message.cache_salt, adapter))
    tokens = message.prompt_token_ids
    for end in range(block_size, len(tokens) + 1, block_size):
        digest = hash((digest, *tokens[end - block_size : end]))
        yield digest
