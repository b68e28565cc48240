"""/openapi.json against the server, by schemathesis: every route, all checks, seeded.

A request that the schema allows and the server refuses must break one of BEYOND, the rules that a
schema can't say. CORPUS has what was found before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiers import tiered

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
import transformers as tf
from live_server import Live, live_server
from schemathesis.config import GenerationConfig
from schemathesis.engine import Status, events, from_schema
from tiny_chat import save_tiny_classifier, start_tiny_chat

from llmc.server.guard import ADMIN_PATHS
from llmc.server.settings import ServerSettings

SETTINGS = ServerSettings(api_keys=("client",), admin_api_key="operator", access_log=False)
# A 400 for what the schema allows: what the message has to say, and of which rule it is.
BEYOND = {
    r"maximum context length|no room": "the prompt's tokens are counted by the tokenizer",
    r"valid integer, got|must be integers": "integers are written without a fraction",
    r"chat template refused": "the template is a program",
    r"must be a JSON object as a string": "JSON in a string",
    r"need a tokenizer|send only one of them|give exactly one|grammar|ebnf": "one grammar",
    r"structured outputs are not available": "an engine that has no grammars",
    r"structured_outputs|guided_json|json_schema|response_format|format": "no JSON, or no schema",
    r"tool": "names and schemas of tools are compared with each other",
    r"needs|must not exceed|be streamed|integer from n": "rules between two fields",
    r"send either|is empty": "rules between two fields",
    r"can't be scored against": "as many texts on both sides, or one",
    r"make \d+ sequences": "the limit is for the product of two fields",
    r"bad word|logit_bias|characters": "counted in tokens, or by number",
    r"not a text|surrogate": "half characters",
}

ENDLESS = "/v1/engine/events"  # a stream without an end
EXAMPLES = 2  # made-up requests of a route, beside one for each rule of its schema


@pytest.fixture(scope="module")
def governed() -> Iterator[Live]:
    # a long context: made-up texts have hundreds of tokens
    with live_server(SETTINGS, max_model_len=4096, num_blocks=1024, blocks_per_request=256) as live:
        yield live


@pytest.mark.slow
@pytest.mark.parametrize("key", tiered(["client", "operator"], "operator"))
def test_the_schema_is_as_strict_as_the_server(governed: Live, key: str) -> None:
    """About 6,000 requests."""
    failures, num_requests = run_schema(governed, key)
    assert not failures, f"{len(failures)} of {num_requests}:\n" + "\n\n".join(sorted(failures))
    assert num_requests > (50 if key == "operator" else 500)


POOLED = {
    "/pooling": {"embed", "classify", "token_classify"},
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), {"embed"}),
    "/classify": {"classify"},
    **dict.fromkeys(("/score", "/rerank"), {"embed", "classify"}),
}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages/count_tokens", "/api/chat")


@pytest.mark.slow
@pytest.mark.parametrize("task", tiered(["embed", "classify", "token_classify"], "classify"))
def test_so_is_that_of_a_model_that_returns_vectors(task: str, tmp_path: Path) -> None:
    """Only what is asked of such models; the rest is that of the others."""
    makers = {
        "classify": tf.AutoModelForSequenceClassification,
        "token_classify": tf.AutoModelForTokenClassification,
    }
    options: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory": 1 << 24}
    if task == "embed":
        over = start_tiny_chat(task="embed", **options)
    else:
        save_tiny_classifier(tmp_path, makers[task], ("fits",))
        over = start_tiny_chat(tmp_path, **options)
    with live_server(SETTINGS, over=over) as live:
        headers = {"authorization": "Bearer client"}
        paths = live.client.get("/openapi.json", headers=headers).json()["paths"]
        assert {path for path in POOLED if path in paths} == {
            path for path, tasks in POOLED.items() if task in tasks
        }
        assert not any(path in paths for path in GENERATING)
        failures, num_requests = run_schema(live, "client", [*POOLED])
    assert not failures, f"{len(failures)} of {num_requests}:\n" + "\n\n".join(sorted(failures))
    assert num_requests > 200


def run_schema(live: Live, key: str, paths: Sequence[str] = ()) -> tuple[set[str], int]:
    """What fails of the requests that are made from a server's schema, and how many there are."""
    url = f"http://127.0.0.1:{live.port}"
    schema = schemathesis.openapi.from_url(
        f"{url}/openapi.json", headers={"authorization": "Bearer client"}
    )
    ours = list(ADMIN_PATHS) if key == "operator" else list(paths)
    schema = schema.include(path=ours) if ours else schema.exclude(path=[*ADMIN_PATHS, ENDLESS])
    config = schema.config
    config.update(headers={"authorization": f"Bearer {key}"}, continue_on_failure=True)
    config.generation = GenerationConfig(max_examples=EXAMPLES, deterministic=True, no_shrink=True)
    config.phases.stateful.enabled = False
    config.checks.ignored_auth.enabled = False  # it takes away one of two headers (see transport)
    config.seed = 1

    @schema.hook
    def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
        beyond = any(re.search(rule, response.text) for rule in BEYOND)
        return not (beyond and response.status_code == 400 and "alid request" in failure.title)

    failures: set[str] = set()
    num_requests = 0
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.FatalError | events.NonFatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        num_requests += len(event.recorder.interactions)
        for case, nodes in event.recorder.checks.items():
            for found in (node.failure_info for node in nodes if node.status is Status.FAILURE):
                answer = event.recorder.find_response(case_id=case)
                said = "" if answer is None else answer.text
                title = f"{found.failure.title}: {found.failure.message}"
                failures.add(f"{event.label}: {title}\n{said[:500]}\n{found.code_sample[:2000]}")
    return failures, num_requests


USER = {"role": "user", "content": "count"}
FOUND = {"type": "search_result", "title": "", "source": "count", "content": []}
UNTITLED = {**FOUND, "title": None}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OLLAMA, GENERATE, MESSAGES = "/api/chat", "/api/generate", "/v1/messages"
# What was answered otherwise than the schema said, one request of each cause.
CORPUS: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"messages": [{}]}, 400),
    (CHAT, {"messages": [USER], "max_tokens": -1}, 200),
    (CHAT, {"messages": [USER], "max_tokens": 0}, 400),
    (COMPLETIONS, {"prompt": "count", "max_tokens": -1}, 200),
    (CHAT, {"messages": [USER], "response_format": {"type": "text", "x": 1}}, 400),
    (CHAT, {"messages": [{**USER, "tool_calls": {}}]}, 400),
    (CHAT, {"messages": [{**USER, "tool_calls": []}]}, 200),
    (CHAT, {"messages": [USER], "stream": None, "n": None, "suffix": ""}, 200),
    (COMPLETIONS, {"prompt": ""}, 400),
    (COMPLETIONS, {"prompt": "count", "stop": ""}, 400),
    (COMPLETIONS, {"prompt": "count", "guided_choice": []}, 400),
    (MESSAGES, {"max_tokens": 9, "messages": [{}]}, 400),
    (MESSAGES, {"max_tokens": 10**9, "messages": [USER]}, 200),
    (MESSAGES, {"max_tokens": 0, "messages": [USER]}, 200),
    (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": [FOUND]}]}, 200),
    (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": [UNTITLED]}]}, 400),
    (MESSAGES, {"max_tokens": 9, "messages": [USER], "stop_sequences": [""]}, 400),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": {}}]}, 400),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [], "summary": []}, USER]}, 200),
    (RESPONSES, {"input": "count", "include": ["logprobs"]}, 400),
    (OLLAMA, {"messages": [{**USER, "images": {}}]}, 400),
    (OLLAMA, {"messages": [{**USER, "images": []}], "options": {"mirostat": None}}, 200),
    (OLLAMA, {"messages": [], "options": {"stop": ""}}, 400),
    (OLLAMA, {"messages": [USER], "truncate": True, "shift": False}, 200),
    (GENERATE, {"prompt": "count", "truncate": False, "shift": True}, 200),
    (GENERATE, {"prompt": "", "options": {"mirostat": False}}, 400),
    ("/tokenize", {}, 400),
    ("/detokenize", {"tokens": [10**6]}, 400),
    ("/detokenize", {"tokens": [7.0]}, 400),
]


@pytest.mark.parametrize(("path", "body", "status"), CORPUS)
def test_found_before(governed: Live, path: str, body: dict[str, Any], status: int) -> None:
    assert governed.post(path, body).status_code == status


def test_allow_names_all_methods_of_a_path(governed: Live) -> None:
    response = governed.client.options("/v1/responses/x")
    assert response.status_code == 405
    assert response.headers["allow"] == "DELETE, GET, HEAD"


def test_the_schema_has_the_limits_of_the_model(governed: Live) -> None:
    schemas = governed.client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["CompletionBody"]["properties"]
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 4095
    assert fields["model"]["anyOf"][0] == {"const": "scripted"}
    assert fields["priority"]["anyOf"][0] == {"const": 0}
    assert fields["suffix"]["anyOf"][0] == {"enum": [None, ""]}, "its tokenizer has no marks"
    info = governed.llm.info
    assert schemas["DetokenizeBody"]["properties"]["tokens"]["items"]["maximum"] == (
        info.vocab_size - 1
    )
