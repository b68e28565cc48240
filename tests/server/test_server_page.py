"""The page at / and the stream of the engine's state: who may have them, and what they hold."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import httpx
import pytest
from live_server import Live, live_server

from llmc.engine.state import MAX_REQUESTS
from llmc.server import engine_events, page
from llmc.server.settings import ServerSettings

EVENTS = "/v1/engine/events"
WEB = files("llmc.server") / "web"


@contextmanager
def listening(client: httpx.Client) -> Iterator[Iterator[dict[str, Any]]]:
    with client.stream("GET", EVENTS) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        yield (json.loads(line[6:]) for line in lines)


def pairs(flat: list[int]) -> Iterator[tuple[int, int]]:
    return zip(flat[::2], flat[1::2], strict=True)


def test_the_page_is_whole_and_may_load_nothing_else(live: Live) -> None:
    answer = live.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in page.HEADERS["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    wanted = set(re.findall(r'(?:src|href)="([^"#]+)"', answer.text))
    assert wanted and not any(link.startswith("/") for link in wanted)  # for a proxy's path
    named = {file.name for file in WEB.iterdir()}
    docs = live.client.get("/docs")
    assert docs.headers["content-security-policy"] == answer.headers["content-security-policy"]
    wanted |= set(re.findall(r'(?:src|href)="(ui/[^"#]+)"', docs.text))
    assert "ui/docs.js" in wanted
    assert {f"ui/{name}" for name in named if not name.endswith(".html")} >= wanted
    for name in named:
        file = live.client.get(f"/ui/{name}")
        assert file.status_code == 200
        for header, value in page.HEADERS.items():
            assert file.headers[header] == answer.headers[header] == value
        outside = re.findall(r'(?:src|href|url|import|from|fetch)\W*["\'(]*https?://', file.text)
        assert not outside, name
        modules = re.findall(r'^import .* from "\./(.*)";$', file.text, re.MULTILINE)
        assert set(modules) <= named


def test_no_script_or_style_stands_in_the_markup() -> None:
    for name in ("index.html", "docs.html"):
        text = (WEB / name).read_text(encoding="utf-8")
        found = re.findall(r"<style|\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)|javascript:", text)
        assert not found, name


def test_no_text_can_become_markup() -> None:
    for file in WEB.iterdir():
        if file.name.endswith(".js"):
            text = file.read_text(encoding="utf-8")
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|"
                r"new Function|createContextualFragment|DOMParser|srcdoc",
                text,
            )
            assert not found, file.name


def test_paths_of_the_page_lead_to_its_files_alone(live: Live) -> None:
    for path in ("/ui/", "/ui/nothing.js", "/ui/../app.py", "/ui/..%2fapp.py", "/ui/%2e%2e/app.py"):
        answer = live.client.get(path)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_without_a_page() -> None:
    with live_server(ServerSettings(ui=False, api_keys=("sesame",))) as live:
        with httpx.Client(base_url=live.client.base_url) as bare:
            assert bare.get("/").text == "llmc is running"
            assert bare.head("/").status_code == 200, "as Ollama's client checks for a server"
        assert live.client.get("/docs").status_code == 404
        assert live.client.get("/ui/app.js").status_code == 404
        assert live.client.get("/v1/models").status_code == 200


def test_the_page_needs_no_key_and_the_engine_does() -> None:
    with live_server(ServerSettings(api_keys=("sesame",))) as live:
        bare = httpx.Client(base_url=live.client.base_url)
        with bare:
            assert bare.get("/").status_code == bare.get("/ui/app.js").status_code == 200
            assert bare.get(EVENTS).status_code == 401
        with listening(live.client) as events:
            assert next(events)["num_rows"] == 4


def test_an_event_adds_up() -> None:
    with live_server(max_num_seqs=2) as live:
        live.scripted.runner.delay_s = 0.02
        prompt = "a prompt of several blocks, which all of these answers share " * 2
        body = {"prompt": prompt, "n": 3, "max_tokens": 60, "ignore_eos": True}
        with listening(live.client) as events:
            idle = next(events)
            asking = threading.Thread(target=live.post, args=("/v1/completions", body))
            asking.start()
            seen = [next(events)]
            while len(seen[-1]["finished"]) < 3 and len(seen) < 40:
                seen.append(next(events))
            asking.join()
    blocks = idle["blocks"]
    assert (blocks["num_blank"], blocks["runs"]) == (64, [0, 64])
    for event in seen:
        blocks, stats, requests = event["blocks"], event["stats"], event["requests"]
        assert blocks["num_blank"] + blocks["num_cached"] == stats["num_free_blocks"]
        assert stats["num_free_blocks"] + blocks["num_used"] == stats["num_blocks"] == 64
        assert sum(blocks["runs"][1::2]) == 64
        assert sum(n for kind, n in pairs(blocks["runs"]) if kind >= 2) == blocks["num_used"]
        assert len(requests) == stats["num_running"] + stats["num_waiting"] <= MAX_REQUESTS
        held = [
            {*range(first, first + count)}
            for one in requests
            for first, count in pairs(one["block_runs"])
        ]
        # a request that has just ended may hold blocks for one more step
        assert len(set().union(*held)) <= blocks["num_used"]
    busy = next(event for event in seen if event["stats"]["num_running"] == 2)
    assert {one["row"] for one in busy["requests"] if one["state"] == "running"} == {0, 1}
    assert [one["state"] for one in busy["requests"]].count("waiting") == 1
    assert busy["blocks"]["num_shared"] == busy["blocks"]["num_saved"] > 0
    last = seen[-1]
    assert [one["num_output_tokens"] for one in last["finished"]] == [60, 60, 60]
    assert all(0 < one["first_token_s"] < one["total_s"] for one in last["finished"])


def test_nothing_is_computed_without_listeners_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_events, "MAX_LISTENERS", 2)
    monkeypatch.setattr(engine_events, "INTERVAL_S", 0.02)
    with live_server() as live:
        engine = live.scripted.engine
        counted = []
        collect = engine.state
        monkeypatch.setattr(engine, "state", lambda: counted.append(1) or collect())
        assert live.complete().status_code == 200
        assert not counted
        with listening(live.client) as first:
            next(first)
            with listening(live.client) as second:
                next(second)
                refused = live.client.get(EVENTS)
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "too_many_listeners"
                assert "retry-after" in refused.headers
        for _ in range(50):
            before = len(counted)
            time.sleep(0.1)
            if len(counted) == before:
                break
        assert len(counted) == before > 0
        with listening(live.client) as again:
            next(again)


def test_a_stream_ends_when_the_server_shuts_down() -> None:
    with live_server() as live, listening(live.client) as events:
        next(events)
        live.server.end()
        for _ in range(20):
            if next(events, None) is None:
                return
        raise AssertionError("the stream went on")
