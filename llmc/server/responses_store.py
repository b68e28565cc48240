"""Stored responses, to be retrieved or continued later: in memory, the oldest evicted first."""

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
    """`messages`: the whole conversation, answer included, without instructions. `items`: the
    items that the answer was made from."""

    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    items: Sequence[Mapping[str, Any]]
    caller: str  # the digest of the key it was made with
    num_bytes: int


class ResponseStore:
    """The responses of one process. A caller sees only those created with the same key."""

    def __init__(self, max_stored: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_stored = max_stored
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(
        self,
        response: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        caller: str,
        items: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        size = len(dump_json([response, messages, items]))
        if size > self._max_bytes:
            return
        made = StoredResponse(
            response=response, messages=messages, items=items, caller=caller, num_bytes=size
        )
        self._stored[response["id"]] = made
        self._num_bytes += size
        while len(self._stored) > self._max_stored or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str, caller: str, *, param: str | None = None) -> StoredResponse:
        """A response by id; ApiError 404 if there is none or it belongs to another caller."""
        found = self._stored.get(response_id)
        if found is None or found.caller != caller:
            raise ApiError(
                404,
                f"there is no response {response_id[:80]!r}; the last {self._max_stored} responses "
                f"are kept in memory, up to {self._max_bytes // 2**20} MiB, unless store is false",
                param=param,
            )
        return found

    def item(self, item_id: Any, caller: str, *, param: str) -> Mapping[str, Any]:
        """An item of a stored response's output; ApiError 404 as for `get`."""
        for stored in reversed(self._stored.values()):
            for item in stored.response["output"] if stored.caller == caller else ():
                if item["id"] == item_id:
                    found: Mapping[str, Any] = item
                    return found
        raise ApiError(
            404,
            f"{param} refers to an item {item_id!r:.80}, which no stored response has; send the "
            "item itself",
            param=param,
        )

    def delete(self, response_id: str, caller: str) -> None:
        found = self.get(response_id, caller)
        del self._stored[response_id]
        self._num_bytes -= found.num_bytes
