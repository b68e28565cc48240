"""Web pages of other origins: refused by default, let in by --allowed-origin."""

from __future__ import annotations

import pytest
from live_server import live_server

from llmc.errors import ConfigError
from llmc.server.settings import ServerSettings

PAGE = "https://app.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_a_page_that_is_allowed_may_ask_and_call() -> None:
    """The browser asks without a key whether it may; the call itself needs one."""
    with live_server(ServerSettings(api_keys=("k",), allowed_origins=(PAGE,))) as live:
        asked = live.client.options("/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        called = live.client.get(
            "/v1/models", headers={"origin": PAGE, "authorization": "Bearer k"}
        )
        assert called.status_code == 200
        assert called.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in called.headers["access-control-expose-headers"].lower()
        wrong = {"origin": PAGE, "authorization": "Bearer wrong"}
        refused = live.client.get("/v1/models", headers=wrong)
        assert refused.status_code == 401, "an origin is no key"
        assert refused.headers["access-control-allow-origin"] == PAGE, "the page can read why"


@pytest.mark.parametrize("origins", [(), (PAGE,)])
def test_other_pages_stay_out(origins: tuple[str, ...]) -> None:
    with live_server(ServerSettings(allowed_origins=origins)) as live:
        headers = {"origin": "https://evil.example"}
        assert live.client.get("/v1/models", headers=headers).status_code == 403
        asked = live.client.options("/v1/models", headers={**headers, **PREFLIGHT})
        assert "access-control-allow-origin" not in asked.headers
        assert asked.status_code >= 400


def test_a_star_lets_every_page_in_but_no_other_host() -> None:
    with live_server(ServerSettings(allowed_origins=("*",))) as live:
        answer = live.client.get("/v1/models", headers={"origin": "https://any.example"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        rebound = {"origin": "https://any.example", "host": "evil.example"}
        assert live.client.get("/v1/models", headers=rebound).status_code == 403


@pytest.mark.parametrize(
    "origin", ["app.example.com", "https://a.b/path", "ftp://a", "", "https://"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="must be like https://app.example.com"):
        ServerSettings(allowed_origins=(origin,))
