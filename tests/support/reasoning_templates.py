"""Chat templates of models that reason before they answer, one of each style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.text.reasoning import ReasoningFormat

_TURN = "{% for m in messages %}<|turn|>{{ m.role }}\n"
_CONTENT = "{{ m.content or '' }}<|end|>\n{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<|turn|>assistant\n"
THINK = ReasoningFormat(begin="<think>", end="</think>", key="reasoning_content")
SPLIT = "{% set c = m.content.split('</think>')[-1] %}{{ c }}<|end|>\n{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class Style:
    """A template, the format learned from it, and an answer with reasoning `Hm, 2.` and content
    `Two`."""

    template: str
    form: ReasoningFormat
    answer: str = "<think>\nHm, 2.\n</think>\n\nTwo"
    special_tokens: Sequence[str] = ()  # of the vocabulary
    added_tokens: Sequence[str] = ()  # added tokens that are not special
    thinking: bool | None = None  # the argument that makes the template think


STYLES = {
    "tags": Style(
        template=_TURN
        + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        + _CONTENT
        + _PROMPT
        + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        form=THINK,
        added_tokens=("<think>", "</think>"),
    ),
    "plain text": Style(
        template=_TURN
        + "{% if m.reasoning %}<why>{{ m.reasoning }}</why>{% endif %}"
        + _CONTENT
        + _PROMPT
        + "{% endif %}",
        form=ReasoningFormat(begin="<why>", end="</why>", key="reasoning"),
        answer="<why>Hm, 2.</why>Two",
    ),
    "the prompt opens": Style(
        template=_TURN + SPLIT + _PROMPT + "<think>\n{% endif %}",
        form=ReasoningFormat(begin="<think>", end="</think>"),
        answer="Hm, 2.\n</think>\n\nTwo",
        special_tokens=("<think>", "</think>"),
    ),
    "written, and the prompt opens": Style(
        template=_TURN
        + "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
        + "{% endif %}"
        + _CONTENT
        + _PROMPT
        + "<think>\n{% endif %}",
        form=THINK,
        answer="<think>Hm, 2.\n</think>\n\nTwo",  # the model repeats the mark
        special_tokens=("<think>", "</think>"),
    ),
    "channels": Style(
        template=_TURN
        + "{% if m.thinking %}<|channel|>analysis<|say|>{{ m.thinking }}<|over|><|turn|>assistant"
        + "{% endif %}{% if m.role == 'assistant' %}<|channel|>final<|say|>{% endif %}"
        + _CONTENT
        + _PROMPT
        + "{% endif %}",
        form=ReasoningFormat(
            begin="<|channel|>analysis<|say|>",
            end="<|over|>",
            answer_begin="<|turn|>assistant<|channel|>final<|say|>",
            key="thinking",
        ),
        answer="<|channel|>analysis<|say|>Hm, 2.<|over|>"
        "<|turn|>assistant<|channel|>final<|say|>Two",
        special_tokens=("<|channel|>", "<|say|>", "<|over|>"),
    ),
    "an empty block": Style(
        template="{% if enable_thinking %}<|think|>{% endif %}"
        + _TURN
        + _CONTENT
        + _PROMPT
        + "{% if not enable_thinking %}<|ch>thought\n<ch|>{% endif %}{% endif %}",
        form=ReasoningFormat(begin="<|ch>thought", end="<ch|>"),
        answer="<|ch>thought\nHm, 2.<ch|>Two",
        special_tokens=("<|ch>", "<ch|>", "<|think|>"),
        thinking=True,
    ),
    "named alone": Style(
        template=_TURN
        + "{% if m.role == 'system' %}Think in [THINK] and [/THINK].{% endif %}"
        + _CONTENT
        + _PROMPT
        + "{% endif %}",
        form=ReasoningFormat(begin="[THINK]", end="[/THINK]"),
        answer="[THINK]Hm, 2.[/THINK]Two",
        special_tokens=("[THINK]", "[/THINK]"),
    ),
}
