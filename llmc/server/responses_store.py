"""Responses that may be asked for again, or gone on from: in memory, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.server.errors import ApiError, dump_json

MAX_STORED = 1000
MAX_STORED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """`messages`: the whole conversation up to its answer, without instructions."""

    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    caller: str  # the digest of the key it was made with
    num_bytes: int


class ResponseStore:
    """Of one process. A caller finds what was made with the same key."""

    def __init__(self, max_stored: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_stored = max_stored
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(
        self, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], caller: str
    ) -> None:
        size = len(dump_json([response, messages]))
        if size > self._max_bytes:
            return
        made = StoredResponse(response=response, messages=messages, caller=caller, num_bytes=size)
        self._stored[response["id"]] = made
        self._num_bytes += size
        while len(self._stored) > self._max_stored or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str, caller: str, *, param: str | None = None) -> StoredResponse:
        """ApiError 404 where there is none, or it is another caller's."""
        found = self._stored.get(response_id)
        if found is None or found.caller != caller:
            raise ApiError(
                404,
                f"there is no response {response_id[:80]!r}; they are kept in memory, the last "
                f"{self._max_stored} of at most {self._max_bytes // 2**20} MiB, unless store is "
                "false",
                param=param,
            )
        return found

    def delete(self, response_id: str, caller: str) -> None:
        found = self.get(response_id, caller)
        del self._stored[response_id]
        self._num_bytes -= found.num_bytes
