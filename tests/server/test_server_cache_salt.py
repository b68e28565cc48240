"""Who shares cached prefixes with whom: `cache_salt` of requests, and --salt-by-api-key."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import live_server

from llmc.server.settings import ServerSettings

PROMPT = "count to ten, slowly and with care, if you would be so kind, and then stop"


def hits(live: Any, path: str = "/v1/completions", key: str | None = None, **body: Any) -> int:
    """Prompt tokens that this call found in the prefix cache."""
    before = live.scripted.engine.stats().prefix_cache_hits
    headers = {"authorization": f"Bearer {key}"} if key else {}
    prompt = {"prompt": PROMPT} if path.endswith("/v1/completions") else {}
    answer = live.client.post(path, json={**prompt, **body, "max_tokens": 2}, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(live.scripted.engine.stats().prefix_cache_hits - before)


def test_a_salt_divides_completions_and_chats() -> None:
    chat = {
        "path": "/v1/chat/completions",
        "messages": [{"role": "user", "content": PROMPT}],
    }
    with live_server() as live:
        for call in ({}, chat):
            assert hits(live, **call) == 0
            assert hits(live, **call) >= 16
            assert hits(live, **call, cache_salt="mine") == 0
            assert hits(live, **call, cache_salt="mine") >= 16
            assert hits(live, **call, cache_salt="yours") == 0


@pytest.mark.parametrize("salt_by_api_key", [False, True])
def test_keys_divide_where_that_is_asked_for(salt_by_api_key: bool) -> None:
    settings = ServerSettings(api_keys=("one", "two"), salt_by_api_key=salt_by_api_key)
    with live_server(settings) as live:
        assert hits(live, key="one") == 0
        assert hits(live, key="one") >= 16
        assert (hits(live, key="two") == 0) == salt_by_api_key
        assert hits(live, key="two") >= 16
        assert hits(live, key="two", cache_salt="x") == 0
        assert (hits(live, key="one", cache_salt="x") == 0) == salt_by_api_key
