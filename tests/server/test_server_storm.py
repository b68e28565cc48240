"""Many clients at once, some of which leave early or send nonsense: answers stay what they were."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections import Counter
from typing import Any

import pytest
from live_server import Live, live_server, read_answer
from scripted_engine import REPLY, SCRIPTS

from llmc.server.protocol import UNSUPPORTED, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from llmc.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
TEXTS = {"count": SCRIPTS["count"], "emoji": SCRIPTS["emoji"], "plain": REPLY}


def complete(live: Live, rng: random.Random) -> str:
    prompts = rng.choices(list(TEXTS), k=rng.randint(1, 3))
    n = rng.randint(1, 2)
    body = {"prompt": prompts, "n": n, "max_tokens": 200}
    texts = [""] * (len(prompts) * n)
    if rng.random() < 0.5:
        for event in live.events(COMPLETIONS, body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        for choice in live.post(COMPLETIONS, body).json()["choices"]:
            texts[choice["index"]] = choice["text"]
    assert texts == [TEXTS[prompt] for prompt in prompts for _ in range(n)]
    return "completed"


def stop_early(live: Live, rng: random.Random) -> str:
    answer = live.complete(stop=rng.choice(["three", "e f", "n e"])).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert SCRIPTS["count"].startswith(answer["choices"][0]["text"])
    return "stopped"


def leave(live: Live, rng: random.Random) -> str:
    body = json.dumps(
        {"prompt": "x", "max_tokens": 200, "stream": rng.random() < 0.5, "n": rng.randint(1, 3)}
    ).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with live.connect() as sock:
        sock.sendall(head.encode() + body)
        if rng.random() < 0.7:
            sock.settimeout(rng.random() * 0.05 + 0.001)
            with contextlib.suppress(TimeoutError):
                read_answer(sock)
    return "left"


def send_nonsense(live: Live, rng: random.Random) -> str:
    assert live.complete(n=rng.choice([0, -1, 10**9]), prompt=[1, -1]).status_code == 400
    return "refused"


@pytest.mark.parametrize("num_blocks", [64, 20], ids=["roomy", "preempting"])
def test_storm(num_blocks: int) -> None:
    done: Counter[str] = Counter()
    errors: list[BaseException] = []

    def client(live: Live, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                action = rng.choice([complete, complete, stop_early, leave, send_nonsense])
                done[action(live, rng)] += 1
        except BaseException as exc:
            errors.append(exc)

    with live_server(num_blocks=num_blocks, max_num_seqs=6, max_num_queued=1000) as live:
        live.scripted.runner.delay_s = 0.001
        threads = [threading.Thread(target=client, args=(live, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert sum(done.values()) == 72 and len(done) == 4
        live.wait_idle()
        assert live.llm.num_active == 0
        preempted = live.scripted.engine.stats().num_preemptions
        assert preempted > 0 or num_blocks != 20


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 17, 129, 400, 2**31, 2**63, 10**30, 0.5, 1e-9, 1e308),
    *("", "x", "count", "\x00", "<|end|>", [], {}, [1], [[1]], [[]], ["x", "count"], [{}]),
    *({"a": 1}, {"3": 1}, {"include_usage": True}, {"type": "text"}, [5, 6, 7], ["x", 1]),
    *([{"role": "user", "content": "x"}], [{"role": "assistant"}], [{"role": "tool"}]),
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
]
BODIES: list[tuple[str, type[Any], dict[str, Any]]] = [
    (COMPLETIONS, CompletionBody, {"prompt": "count"}),
    ("/v1/chat/completions", ChatBody, {"messages": [{"role": "user", "content": "count"}]}),
    ("/tokenize", TokenizeBody, {"prompt": "count"}),
    ("/detokenize", DetokenizeBody, {"tokens": [5, 6]}),
]


def test_random_fields_never_break_the_server() -> None:
    rng = random.Random(0)
    statuses: Counter[int] = Counter()
    with live_server(ServerSettings(access_log=False)) as live:
        for _ in range(600):
            path, model, good = rng.choice(BODIES)
            fields = rng.sample([*model.model_fields, *UNSUPPORTED], rng.choice([1, 1, 2]))
            body = {**good, **{field: rng.choice(VALUES) for field in fields}}
            answer = live.post(path, body)
            statuses[answer.status_code] += 1
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        live.wait_idle()
    assert statuses[200] > 20 and statuses[400] > 100
