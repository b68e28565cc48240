"""The calls running in this process, by the request ids that their clients know."""

from __future__ import annotations

from llmc.async_llm import AsyncLLM, Stream


class RunningCalls:
    """Running calls by request id. Several calls can share an id, as clients may choose it."""

    def __init__(self) -> None:
        self._streams: dict[str, list[Stream]] = {}

    def add(self, request_id: str, stream: Stream) -> None:
        self._streams.setdefault(request_id, []).append(stream)

    def remove(self, request_id: str, stream: Stream) -> None:
        left = [one for one in self._streams.get(request_id, ()) if one is not stream]
        if left:
            self._streams[request_id] = left
        else:
            self._streams.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def abort(self, request_id: str, llm: AsyncLLM) -> None:
        """Abort the calls with this id; their clients see finish_reason "abort"."""
        for stream in self._streams.get(request_id, ()):
            for request in stream.requests:
                llm.abort(request.request_id)

    @property
    def ids(self) -> list[str]:
        return list(self._streams)
