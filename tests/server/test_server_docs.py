"""docs/server.md against the server: its paths, fields, error codes, metrics and other claims."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from live_server import Live

from llmc.engine import messages, scheduler, state
from llmc.server import app, engine_events, errors, guard, openapi, protocol, run, settings
from llmc.server.anthropic_protocol import CountTokensBody, MessagesBody
from llmc.server.batches import BatchBody
from llmc.server.ggml_protocol import (
    ApplyTemplateBody,
    ContentBody,
    GgmlCompletionBody,
    InfillBody,
)
from llmc.server.ollama_protocol import (
    EmbedBody,
    GenerateBody,
    OldEmbedBody,
    OllamaChatBody,
    OllamaOptions,
    ShowBody,
)
from llmc.server.pooling_protocol import (
    EmbeddingBody,
    InputBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from llmc.server.responses_protocol import ResponsesBody
from llmc.server.responses_store import MAX_STORED, MAX_STORED_BYTES
from llmc.server.sglang_protocol import SamplingBody, SglangBody
from llmc.server.throughput import INTERVAL_S

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def part(title: str) -> str:
    [found] = [text for text in TEXT.split("\n## ") if text.startswith(title + "\n")]
    return found


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_endpoints_are_those_of_the_app() -> None:
    rows = re.findall(r"^\| ([A-Z, ]+) \| `(/\S*)` \|", part("Endpoints"), re.MULTILINE)
    served = {(verbs, path.replace(":path", "")) for verbs, path, _ in app.ROUTES}
    assert {(verbs.replace(" ", ""), path) for verbs, path in rows} == served


# Bodies that have a section of their own.
SECTIONS: dict[str, tuple[type[protocol.Body], ...]] = {
    "Responses": (ResponsesBody,),
    "Anthropic Messages": (MessagesBody, CountTokensBody),
    "Ollama": (OllamaChatBody, GenerateBody, ShowBody, EmbedBody, OldEmbedBody),
    "SGLang": (SglangBody,),
    "llama.cpp": (GgmlCompletionBody, InfillBody, ContentBody, ApplyTemplateBody),
    "Embeddings, scores and classes": (
        EmbeddingBody,
        InputBody,
        PoolingBody,
        ScoreBody,
        RerankBody,
    ),
    "Batches": (BatchBody,),
}


def test_every_field_of_a_body_is_described() -> None:
    others = {body for bodies in SECTIONS.values() for body in bodies}
    described = codes(part("Request fields"))
    for body in {*openapi.BODIES.values(), protocol.StreamOptions} - others:
        assert set(body.model_fields) <= described, body.__name__
    for section, bodies in SECTIONS.items():
        described = codes(part(section))
        for body in bodies:
            assert set(body.model_fields) <= described, body.__name__
    assert set(OllamaOptions.model_fields) <= codes(part("Ollama"))
    assert set(SamplingBody.model_fields) <= codes(part("SGLang"))


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "Batches"])
def test_what_a_protocol_refuses_or_ignores_is_named(section: str) -> None:
    text = part(section)
    ignored, refused = text[text.index("Without effect") :].split("Refused by name")
    for body in SECTIONS[section]:
        free = {name for name, field in body.model_fields.items() if field.annotation is Any}
        assert free <= codes(ignored)
        if body.UNSUPPORTED is not protocol.UNSUPPORTED:
            assert set(body.UNSUPPORTED) <= codes(refused)


def test_the_events_of_the_engine() -> None:
    text = part("The page")
    for kind in (
        messages.EngineState,
        messages.BlockMap,
        messages.RequestView,
        messages.FinishedRequest,
    ):
        assert {field.name for field in fields(kind)} <= codes(text), kind.__name__
    assert f"at most {engine_events.MAX_LISTENERS} clients" in text
    assert f"than {engine_events.COST_SHARE * 100:g} % of the engine's time" in text
    assert f"at most {state.MAX_CELLS} cells" in text
    assert f"at most {state.MAX_REQUESTS}, running" in text
    assert f"the first {state.MAX_BLOCKS} blocks" in text
    assert f"the last {scheduler.MAX_FINISHED}:" in text


def test_what_is_kept_of_responses() -> None:
    kept = f"The last {MAX_STORED} responses of at most {MAX_STORED_BYTES // 2**20} MiB"
    assert kept in part("Responses")


def test_fields_that_are_refused_are_named() -> None:
    text = part("Request fields")
    refused = text[text.index("Refused by name") :]
    assert codes(refused) == set(protocol.UNSUPPORTED)


def test_fields_without_effect_are_named() -> None:
    text = part("Request fields")
    ignored = text[text.index("Accepted but without") : text.index("Refused by name")]
    free = {
        name
        for body in (protocol.CompletionBody, protocol.ChatBody)
        for name, field in body.model_fields.items()
        if field.annotation is Any
    }
    also = {"spaces_between_special_tokens", "include_obfuscation", "stream_options"}
    assert codes(ignored) == free | also


def test_the_error_table_has_every_status_type_and_code() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", part("Errors"), re.MULTILINE)
    table = {int(status): (kind, codes(rest)) for status, kind, rest in rows}
    assert set(table) == set(errors.STATUS_NAMES)
    for status, (kind, code) in errors.STATUS_NAMES.items():
        assert table[status][0] == kind and code in table[status][1]
    used: set[str] = set()
    package = Path(app.__file__).parents[1]
    for path in package.rglob("*.py"):
        used |= set(re.findall(r'\bcode="(\w+)"', path.read_text(encoding="utf-8")))
    used.discard("duplicate_request_id")  # of AsyncLLM: the server makes its own ids
    assert used <= {code for _, row in table.values() for code in row}


def test_the_numbers_in_the_text() -> None:
    given = settings.ServerSettings()
    assert f"at most {given.max_body_bytes // 2**20} MiB" in TEXT
    assert f"at most {settings.MAX_PROMPTS} of these" in TEXT
    assert f"times `n` at most {settings.MAX_SEQUENCES}" in TEXT
    assert f"idle for {given.keep_alive_s:g} s" in TEXT
    assert f"reads nothing for {given.stalled_reader_s:g} s" in TEXT
    assert f"headers of a request within {run.HEAD_TIMEOUT_S:g} s" in TEXT
    assert f"every {INTERVAL_S:g} s" in TEXT
    from llmc import async_llm
    from llmc.frontend import preparation

    assert f"reported nothing for {async_llm.WATCHDOG_S:g} s" in TEXT
    assert f"template is limited to {preparation.RENDER_TIMEOUT_S:g} s" in TEXT
    public = ("/health", "/v1/health", "/ready", "/health_generate")
    assert ", ".join(f"`{path}`" for path in public) + " and `/ping`" in TEXT
    assert {*public, "/ping"} == guard.PUBLIC_PATHS


def test_the_metrics_are_those_of_the_server(live: Live) -> None:
    assert live.complete().status_code == 200
    text = live.client.get("/metrics").text
    served = {
        name for name in re.findall(r"^# TYPE (\S+) ", text, re.M) if not name.endswith("_created")
    }
    named = set(re.findall(r"`(llmc:\w+)`", TEXT)) - {"llmc:model_loaded"}  # of several models
    assert named == served


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"top_k": None, "user": "me", "tools": [], "store": True}, 200),
        ({"prompt_cache_options": {"mode": "implicit"}, "moderation": None}, 200),
        ({"tools": [{"type": "function"}]}, 400),
        ({"max_token": 3}, 400),
        ({"temperature": "1"}, 400),
        ({"temperature": 2.1}, 400),
        ({"echo": True, "logprobs": 1}, 200),
        ({"guided_json": {}, "guided_regex": "a"}, 400),
        ({"model": "other"}, 404),
    ],
)
def test_what_is_said_of_fields(live: Live, fields: dict[str, Any], status: int) -> None:
    response = live.complete(**fields)
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] in fields


def test_what_is_said_of_streams(live: Live) -> None:
    messages = [{"role": "user", "content": "count"}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": messages, "n": 2, "stream_options": options}
    events = live.events("/v1/chat/completions", body)
    first, last = events[:2], events[-1]
    assert [e["choices"][0]["delta"] for e in first] == [{"role": "assistant", "content": ""}] * 2
    assert last["choices"] == [] and all("usage" in event for event in events)
    ends = [e["choices"][0]["finish_reason"] for e in events[:-1]]
    assert [end for end in ends if end] == ["stop", "stop"]
