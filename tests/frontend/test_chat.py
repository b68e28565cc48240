"""Messages -> prompt: what the renderer makes of the templates that checkpoints bring."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_engine import make_hf_tokenizer

from llmc.errors import InvalidRequestError
from llmc.text.chat import can_sanitize, render_chat
from llmc.text.tokenizer import Tokenizer

PARTS_ALONE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}<|end|>{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


def rendered(template: str, content: Any) -> str:
    tokenizer = Tokenizer(make_hf_tokenizer(template))
    messages = [{"role": "user", "content": content}, {"role": "assistant"}]
    ids = render_chat(tokenizer, messages, add_generation_prompt=False)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hello", "<|turn|>user:[hello]<|end|>"),
        (
            [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            "<|turn|>user:[one][two]<|end|>",
        ),
        ("</s> <|end|>", "<|turn|>user:[</s> <|end|>]<|end|>"),
    ],
)
def test_a_template_that_loops_over_parts_gets_parts(content: Any, expected: str) -> None:
    """Those of models that also take images: of a string they would write nothing."""
    assert rendered(PARTS_ALONE, content).startswith(expected)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for key, value in messages[0].content|dictsort %}{% endfor %}",
            "no attribute 'items'",
        ),
        ("{% for m in messages %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{{ 'a' * 10**17 }}", "MemoryError"),
    ],
)
def test_any_error_of_a_template_is_about_the_messages(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"template refused the messages: .*{reason}"):
        rendered(template, "hello")


def test_control_tokens_in_a_part_are_plain_text() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer(PARTS_ALONE))
    if not can_sanitize(tokenizer.hf):
        pytest.skip("this transformers reads control tokens in any text")
    ids = render_chat(tokenizer, [{"role": "user", "content": "</s>"}], add_generation_prompt=False)
    assert tokenizer.eos_token_id not in ids


DOCUMENTS = (
    "{% for d in documents or [] %}{% for name, text in d.items() %}[{{ name }}: {{ text }}]"
    "{% endfor %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
ASKED = [{"role": "user", "content": "Q"}]


@pytest.mark.parametrize("options", [{}, {"continue_final_message": True}])
def test_documents_are_for_the_template(options: dict[str, bool]) -> None:
    tokenizer = Tokenizer(make_hf_tokenizer(DOCUMENTS))
    given = [{"title": "A", "text": "snow"}, {"text": "rain"}]
    for documents, text in ((given, "[title: A][text: snow][text: rain]Q"), ([], "Q"), (None, "Q")):
        ids = render_chat(
            tokenizer, ASKED, documents=documents, add_generation_prompt=False, **options
        )
        assert tokenizer.decode(ids) == text


def test_control_tokens_in_documents_are_plain_text() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer(DOCUMENTS))
    with pytest.raises(InvalidRequestError, match=r"documents\[1\] has a field named '<\|end\|>'"):
        render_chat(tokenizer, ASKED, documents=[{"text": "a"}, {"<|end|>": "a"}])
    if not can_sanitize(tokenizer.hf):
        pytest.skip("this transformers reads control tokens in any text")
    ids = render_chat(tokenizer, ASKED, documents=[{"text": "</s>"}], add_generation_prompt=False)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "[text: </s>]Q"


def test_documents_that_a_template_would_drop_are_refused() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer("{{ messages[0].content }}"))
    with pytest.raises(InvalidRequestError, match="no place for documents") as caught:
        render_chat(tokenizer, ASKED, documents=[{"text": "a"}])
    assert caught.value.param == "documents"


@pytest.mark.parametrize(
    "refused",
    [{"content": [{"type": "refusal", "refusal": "No."}]}, {"content": None, "refusal": "No."}],
)
def test_a_refusal_of_the_assistant_is_text(refused: dict[str, Any]) -> None:
    """As of a conversation that was begun with OpenAI's models."""
    tokenizer = Tokenizer(
        make_hf_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    )
    messages = [{"role": "assistant", **refused}, {"role": "user", "content": "hi"}]
    ids = render_chat(tokenizer, messages, add_generation_prompt=False)
    assert tokenizer.decode(ids) == "[assistant]No.[user]hi"
    with pytest.raises(InvalidRequestError, match="has type 'refusal'"):
        render_chat(tokenizer, [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}])


def test_a_template_that_takes_both_gets_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered(EITHER, parts) == "one\ntwo"


@pytest.mark.parametrize("absent", [{}, {"content": None}, {"content": None, "tool_calls": []}])
def test_an_answer_without_content_is_empty(absent: dict[str, Any]) -> None:
    """As of a request that was cut while it reasoned; templates add it to other text."""
    tokenizer = Tokenizer(
        make_hf_tokenizer("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    )
    messages = [{"role": "assistant", "reasoning_content": "Hm.", **absent}]
    ids = render_chat(tokenizer, messages, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "assistant"


@pytest.mark.parametrize("knows_it", [False, True])
def test_developer_is_system_where_the_template_does_not_name_it(knows_it: bool) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(make_hf_tokenizer(template + "{# developer #}" * knows_it))
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ids = render_chat(tokenizer, messages, add_generation_prompt=False)
    role = "developer" if knows_it else "system"
    assert tokenizer.decode(ids) == f"[{role}]be brief[user]hi"
    assert messages[0]["role"] == "developer", "the caller's own stays"
