"""Chat backends: the engine in this process, or an OpenAI-compatible server.

Both stream text as it is generated. Closing the stream early aborts the request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmc.cli.conversation import ShownToken
from llmc.errors import ConfigError, InvalidRequestError, LlmcError
from llmc.server_url import check_port, uses_proxies

if TYPE_CHECKING:
    import httpx


Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A delta of an answer: new text, and the counts so far where known."""

    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    tokens: Sequence[ShownToken] = ()  # if `logprobs` were requested


class Backend(Protocol):
    model: str
    context_limit: int | None
    defaults: Mapping[str, Any]  # of the settings, where known
    models: Sequence[str]  # that `model` can be set to; empty: it is the only one

    def answer(
        self, messages: Messages, settings: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]: ...

    async def close(self) -> None: ...


class ServerBackend:
    """A server with /v1/chat/completions; create it with `connect`."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, context_limit: int | None = None
    ) -> None:
        self.model = model
        self.context_limit = context_limit
        self.defaults: Mapping[str, Any] = {}
        self.models: Sequence[str] = ()
        self._client = client

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> ServerBackend:
        import httpx

        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"--url must start with http:// or https://, got {url!r}")
        check_port("--url", base)
        client = httpx.AsyncClient(
            base_url=base,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=10.0),
            transport=transport,
            trust_env=uses_proxies(base),
        )
        try:
            response = await client.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            await client.aclose()
            raise ConfigError(
                f"no server answers at {base} ({error or type(error).__name__}); "
                "start one with `llmc serve`"
            ) from error
        if response.status_code != 200:
            await client.aclose()
            raise ConfigError(f"{base} rejected the request: {_error_text(response)}")
        offered = response.json().get("data") or []
        chosen = next((m for m in offered if model in (None, m.get("id"))), None)
        if chosen is None:
            await client.aclose()
            names = ", ".join(str(m.get("id")) for m in offered) or "none"
            raise ConfigError(f"{base} has no model {model!r}; it offers {names}")
        backend = cls(client, str(chosen["id"]), chosen.get("max_model_len"))
        backend.models = [str(m.get("id")) for m in offered]
        return backend

    async def answer(
        self, messages: Messages, settings: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        import httpx

        settings = dict(settings)
        alternatives = settings.pop("logprobs", None)
        if alternatives is not None:
            settings |= {"logprobs": True, "top_logprobs": alternatives}
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refused(response)
                async for line in response.aiter_lines():
                    chunk = _read_event(line)
                    if chunk is not None:
                        yield chunk
        except httpx.HTTPError as error:
            raise LlmcError(f"lost the connection to the server: {error!r}") from error

    async def close(self) -> None:
        await self._client.aclose()


def _read_event(line: str) -> Chunk | None:
    content = line.removeprefix("data:").strip()
    if not line.startswith("data:") or content == "[DONE]":
        return None
    try:
        event = json.loads(content)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise LlmcError(f"the server sent an event that is not a JSON object: {content!r:.100}")
    if error := event.get("error"):
        reason = error.get("message") if isinstance(error, dict) else None
        raise LlmcError(f"the server stopped the answer: {reason or error}")
    usage = event.get("usage") or {}
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    details = usage.get("prompt_tokens_details") or {}
    return Chunk(
        text=(choice.get("delta") or {}).get("content") or "",
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        finish_reason=choice.get("finish_reason"),
        tokens=[
            ShownToken(
                text=str(one["token"]),
                logprob=one["logprob"],
                alternatives=[
                    (str(a["token"]), a["logprob"]) for a in one.get("top_logprobs") or ()
                ],
            )
            for one in (choice.get("logprobs") or {}).get("content") or ()
        ],
    )


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


def _refused(response: httpx.Response) -> LlmcError:
    try:
        code = response.json()["error"].get("code") or "invalid_value"
    except (ValueError, KeyError, TypeError, AttributeError):
        code = "invalid_value"
    if response.status_code == 400:
        return InvalidRequestError(_error_text(response), code=str(code))
    return LlmcError(_error_text(response))
