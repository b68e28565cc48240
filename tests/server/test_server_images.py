"""Images over HTTP, in each protocol's form; too large or too many ones are refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch
import transformers as tf
from live_server import Live, live_server
from PIL import Image
from tiny_chat import start_tiny_chat
from tiny_images import random_image, tiny_image_model

from llmc.frontend import images
from llmc.text.processor import load_processor

GREEDY = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    over = start_tiny_chat(
        tiny_image_model("llava"),
        kv_cache_memory=1 << 22,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 2},
    )
    with live_server(over=over) as found:
        yield found


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    data = io.BytesIO()
    image.save(data, kind)
    return base64.b64encode(data.getvalue()).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{encoded(image)}"


def part(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def ask(live: Live, *parts: dict[str, Any]) -> str:
    content = [*parts, {"type": "text", "text": "what is it"}]
    answer = live.chat(content, **GREEDY)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_all_protocols_answer_as_transformers_does(live: Live) -> None:
    image, other = random_image(1), random_image(2)
    said = ask(live, part(url(image)))
    assert said == of_transformers(image)
    assert said != ask(live, part(url(other)))
    blocks = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": encoded(image)},
        },
        {"type": "text", "text": "what is it"},
    ]
    message = {"messages": [{"role": "user", "content": blocks}], **GREEDY}
    assert live.post("/v1/messages", message).json()["content"][0]["text"] == said
    items = [
        {"type": "input_image", "image_url": url(image)},
        {"type": "input_text", "text": "what is it"},
    ]
    given = {"input": [{"role": "user", "content": items}], "max_output_tokens": 8}
    answer = live.post("/v1/responses", {**given, "temperature": 0.0}).json()
    assert answer["output"][0]["content"][0]["text"] == said
    asked = {"role": "user", "content": "what is it", "images": [encoded(image)]}
    options = {"num_predict": 8, "temperature": 0.0}
    answer = live.post(
        "/api/chat", {"messages": [asked], "stream": False, "options": options}
    ).json()
    assert answer["message"]["content"] == said
    whole = {"prompt": "what is it", "images": [encoded(image)], "stream": False}
    answer = live.post("/api/generate", {**whole, "options": options}).json()
    assert answer["response"] == said
    assert "vision" in live.post("/api/show", {}).json()["capabilities"]
    refused = live.post("/api/generate", {**whole, "raw": True})
    assert refused.status_code == 400 and "leave out raw and suffix" in refused.text


def test_images_in_a_tool_result_are_those_of_the_next_message(live: Live) -> None:
    """As Claude Code sends an image file that it has read."""
    image = random_image(4)
    source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
    read = [{"type": "text", "text": "a.png"}, {"type": "image", "source": source}]
    call = {"type": "tool_use", "id": "call_1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": read}
    asked = {"type": "text", "text": "what is it"}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, asked]},
    ]
    function = {"name": "read", "arguments": "{}"}
    chat = [
        messages[0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a.png"},
        {"role": "user", "content": [part(url(image)), asked]},
    ]
    answer = live.post("/v1/messages", {"messages": messages, **GREEDY})
    assert answer.status_code == 200, answer.text
    same = live.post("/v1/chat/completions", {"messages": chat, **GREEDY}).json()
    assert answer.json()["content"][0]["text"] == same["choices"][0]["message"]["content"]
    counts = answer.json()["usage"]
    tokens = counts["input_tokens"] + counts["cache_read_input_tokens"]
    assert tokens == same["usage"]["prompt_tokens"]
    document = live.client.get("/openapi.json").json()
    check(document, "MessagesBody", "messages", messages)


@pytest.mark.parametrize("asks", [True, False])
def test_images_in_the_output_of_a_function_are_those_of_the_next_message(
    asks: bool, live: Live
) -> None:
    """As Codex sends an image file that it has looked at; also after several outputs."""
    shown, names = random_image(5), ("a", "b")
    calls = [
        {"type": "function_call", "call_id": name, "name": "read", "arguments": "{}"}
        for name in names
    ]
    image = {"type": "input_image", "image_url": url(shown)}
    look = [{"type": "input_text", "text": "a.png"}, image]
    outputs: list[dict[str, Any]] = [
        {"type": "function_call_output", "call_id": "a", "output": look},
        {"type": "function_call_output", "call_id": "b", "output": "nothing"},
    ]
    asked = [{"role": "user", "content": "what is it"}] * asks
    items = [{"role": "user", "content": "look"}, *calls, *outputs, *asked]
    chat_calls = [
        {"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        for name in names
    ]
    text = [{"type": "text", "text": "what is it"}] * asks
    chat = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": chat_calls},
        {"role": "tool", "tool_call_id": "a", "content": "a.png"},
        {"role": "tool", "tool_call_id": "b", "content": "nothing"},
        {"role": "user", "content": [part(url(shown)), *text]},
    ]
    given = {"input": items, "max_output_tokens": 8, "temperature": 0.0}
    answer = live.post("/v1/responses", given)
    assert answer.status_code == 200, answer.text
    same = live.post("/v1/chat/completions", {"messages": chat, **GREEDY}).json()
    content = answer.json()["output"][0]["content"]
    assert content[0]["text"] == same["choices"][0]["message"]["content"]
    assert answer.json()["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    check(live.client.get("/openapi.json").json(), "ResponsesBody", "input", items)


def test_the_schema_has_the_images_of_every_protocol(live: Live) -> None:
    image = random_image(1)
    source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
    content = {
        "ChatBody": part(url(image)),
        "TokenizeBody": part(url(image)),
        "MessagesBody": {"type": "image", "source": source},
        "ResponsesBody": {"type": "input_image", "image_url": url(image)},
    }
    document = live.client.get("/openapi.json").json()
    for name, one in content.items():
        messages = [{"role": "user", "content": [one]}]
        check(document, name, "input" if name == "ResponsesBody" else "messages", messages)
        one = json.loads(json.dumps(one).replace("data:", "http:").replace("base64", "file"))
        messages = [{"role": "user", "content": [one]}]
        with pytest.raises(jsonschema.ValidationError):
            check(document, name, "input" if name == "ResponsesBody" else "messages", messages)
    said = {"role": "user", "content": "what is it", "images": [encoded(image)]}
    check(document, "OllamaChatBody", "messages", [said])
    check(document, "GenerateBody", "images", [encoded(image)])


def check(document: dict[str, Any], body: str, field: str, value: Any) -> None:
    schema = document["components"]["schemas"][body]["properties"][field]
    jsonschema.validate(value, {**schema, "components": document["components"]})


def test_the_tokens_of_images_are_counted_and_cached(live: Live) -> None:
    content = [part(url(random_image(3))), {"type": "text", "text": "what is it"}]
    first = live.chat(content, **GREEDY).json()["usage"]
    again = live.chat(content, **GREEDY).json()["usage"]
    assert first["prompt_tokens"] == again["prompt_tokens"] > 16  # rows of one image
    assert again["prompt_tokens_details"]["cached_tokens"] >= 16


def test_other_formats_and_modes_are_read(live: Live) -> None:
    grey = random_image(4).convert("L")
    same = ask(live, part(url(grey)))
    assert ask(live, part(url(grey.convert("RGBA")))) == same
    assert ask(live, part(f"data:image/webp;base64,{encoded(grey, 'JPEG')}"))  # by its content


def of_transformers(image: Image.Image) -> str:
    path = tiny_image_model("llava")
    processor = load_processor(path)
    content = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    given = processor(images=[image], text=[text], return_tensors="pt")
    model = tf.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        made = model.generate(**given, max_new_tokens=8, do_sample=False)
    return str(processor.tokenizer.decode(made[0, given["input_ids"].shape[1] :]))


WRONG: list[tuple[list[dict[str, Any]], str, str]] = [
    ([part("https://example.com/cat.png")], "not fetched", "content[0]"),
    ([part("file:///etc/passwd")], "not fetched", "content[0]"),
    ([part("data:image/png,abc")], "in base64", "content[0]"),
    ([part("data:image/png;base64,!!")], "not valid base64", "content[0]"),
    ([part("data:image/png;base64,aGVsbG8=")], "not an image in one of the formats", "content[0]"),
    ([part(url(random_image(1))[:-300])], "content[0]", "content[0]"),
    ([{"type": "image_url"}], "data URL", "content[0]"),
    ([{"type": "image_url", "image_url": {"url": 3}}], "data URL", "content[0]"),
    ([part(url(random_image(1)))] * 3, "can have 2 images, got 3", "content[2]"),
    ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "no audio", ""),
    (
        [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}],
        "no audio, video",
        "",
    ),
]


@pytest.mark.parametrize(("parts", "why", "param"), WRONG, ids=lambda v: str(v)[:40])
def test_what_is_wrong_is_one_clear_error(
    parts: list[dict[str, Any]], why: str, param: str, live: Live
) -> None:
    answer = live.chat([*parts, {"type": "text", "text": "what is it"}])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert why in error["message"]
    assert param in error["param"]


def test_limits_of_size(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    large = part(url(random_image(5, 64, 64)))
    for name, limit, why in (
        ("MAX_IMAGE_PIXELS", 64 * 64 - 1, "64 x 64 pixels"),
        ("MAX_PROMPT_PIXELS", 64 * 64 - 1, "of this prompt to 4096 pixels"),
        ("MAX_IMAGE_BYTES", 100, "the limit is 100"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(images, name, limit)
            answer = live.chat([large])
        assert answer.status_code == 400, answer.text
        assert why in answer.json()["error"]["message"]


def test_images_are_not_cut_off(live: Live) -> None:
    content = [part(url(random_image(1))), {"type": "text", "text": "what is it"}]
    whole = live.chat(content, truncate_prompt_tokens=-1, **GREEDY)
    assert whole.status_code == 200, whole.text
    cut = live.chat(content, truncate_prompt_tokens=5, **GREEDY)
    assert cut.status_code == 400 and "images can't be truncated" in cut.text


def test_text_that_spells_a_placeholder_is_no_image(live: Live) -> None:
    answer = live.chat([part(url(random_image(1))), {"type": "text", "text": "an <image> more"}])
    assert answer.status_code == 400
    assert "spells a control token" in answer.json()["error"]["message"]
    assert live.chat("an <image> alone", **GREEDY).status_code == 200
