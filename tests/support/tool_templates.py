"""Chat templates that write tool calls, one per style, with an answer in that style."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOOLS = "{% if tools %}<|turn|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
_TURN = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content or '' }}"
_NO_CONTENT = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
)
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_END = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
_KEYS = "{% for k, v in f.arguments.items() %}"
_RAW = "{{ v if v is string else v | tojson }}"


@dataclass(frozen=True, kw_only=True)
class Style:
    """A template, and an answer with content (if the style has it) and the CALLS."""

    template: str
    answer: str
    content: str | None = "Let me see."
    special_tokens: Sequence[str] = ()
    num_calls: int = 2


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time-now", "description": "the time"}},
]
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"weather": WEATHER, "time-now": {}}
ARGUMENTS = {"city": 'P"a}r\\is <\u00e9\U0001f642', "days": 3}
CALLS = [("weather", ARGUMENTS), ("time-now", {})]
_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
_CITY = ARGUMENTS["city"]
_QUOTED = json.dumps(_CITY, ensure_ascii=False)

STYLES = {
    "json in tags": Style(
        template=_TOOLS + _TURN + _CALLS + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}" + _END,
        answer='Let me see.\n<tool_call>\n{"name": "weather", "arguments": '
        + _JSON
        + '}\n</tool_call>\n<tool_call>\n{"name": "time-now", "arguments": {}}\n</tool_call>',
    ),
    "json alone": Style(
        template=_TOOLS + _NO_CONTENT + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call only') }}{% endif %}{% set f = m.tool_calls[0].function %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endif %}' + _END,
        answer=f'{{"name": "weather", "parameters": {_JSON}}}',
        content=None,
        num_calls=1,
    ),
    "list after a marker": Style(
        template=_TOOLS
        + _NO_CONTENT
        + "{% if m.tool_calls %}[TOOL_CALLS] ["
        + _CALLS
        + '{% set out = f | tojson %}{{ out[:-1] }}, "id": "{{ c.id }}"}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + _END,
        answer=f'[TOOL_CALLS][{{"name": "weather", "arguments": {_JSON}, "id": "abc"}}, '
        '{"arguments": {}, "name": "time-now"}]',
        content=None,
        special_tokens=("[TOOL_CALLS]",),
    ),
    "name then json": Style(
        template=_TOOLS
        + _TURN
        + "{% if m.tool_calls %}<|calls|>"
        + _CALLS
        + "<|call|>{{ f.name + '<|sep|>' + f.arguments }}<|endcall|>{% endfor %}<|endcalls|>"
        "{% endif %}" + _END,
        answer=f"Let me see.<|calls|><|call|>weather<|sep|>{_JSON}<|endcall|>"
        "<|call|>time-now<|sep|>{}<|endcall|><|endcalls|>",
        special_tokens=("<|calls|>", "<|call|>", "<|sep|>", "<|endcall|>", "<|endcalls|>"),
    ),
    "ids in between": Style(
        template=_TOOLS
        + _TURN
        + _CALLS
        + "[CALL]{{ f.name }}[ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
        + _END,
        answer=f"Let me see.[CALL]weather[ID]a1b2[ARGS]{_JSON}[CALL]time-now[ID]c3[ARGS]{{}}",
    ),
    "key by key": Style(
        template=_TOOLS
        + _TURN
        + _CALLS
        + "\n<tool_call>\n<function={{ f.name }}>\n"
        + _KEYS
        + "<parameter={{ k }}>\n"
        + _RAW
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        "{% endfor %}" + _END,
        answer="Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\n"
        + str(_CITY)
        + "\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=time-now>\n</function>\n</tool_call>",
    ),
    "tags of keys": Style(
        template=_TOOLS
        + _TURN
        + _CALLS
        + "\n<tool_call>{{ f.name }}\n"
        + _KEYS
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + _RAW
        + "</arg_value>\n{% endfor %}"
        "</tool_call>{% endfor %}" + _END,
        answer="Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>"
        + str(_CITY)
        + "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>time-now\n</tool_call>",
    ),
    "attributes": Style(
        template=_TOOLS
        + _TURN
        + "{% if m.tool_calls %}\n<calls>\n"
        + _CALLS
        + '<invoke name="{{ f.name }}">\n'
        + _KEYS
        + '<parameter name="{{ k }}">'
        + _RAW
        + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>{% endif %}"
        + _END,
        answer='Let me see.\n<calls>\n<invoke name="weather">\n<parameter name="city">'
        + str(_CITY)
        + '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="time-now">\n</invoke>\n</calls>',
    ),
    "as functions": Style(
        template=_TOOLS
        + _TURN
        + "{% if m.tool_calls %}<|python|>["
        + _CALLS
        + "{{ f.name }}("
        + _KEYS
        + "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})"
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + _END,
        answer=f"Let me see.<|python|>[weather(city={_QUOTED}, days=3), time-now()]",
        special_tokens=("<|python|>",),
    ),
    "as Python does": Style(
        template=_TOOLS
        + _TURN
        + "{% if m.tool_calls %}<|python|>["
        + _CALLS
        + "{{ f.name }}("
        + _KEYS
        + "{{ k }}={% if v is string %}'{{ v | replace('\\\\', '\\\\\\\\') }}'"
        "{% else %}{{ v }}{% endif %}"
        "{% if not loop.last %}, {% endif %}{% endfor %})"
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + _END,
        answer="Let me see.<|python|>[weather(city='P\"a}r\\\\is <\u00e9\U0001f642', days=3), "
        "time-now()]",
        special_tokens=("<|python|>",),
    ),
    "quotes of its own": Style(
        template=_TOOLS
        + "{% for m in messages %}<|turn|>{{ m.role }}\n"
        + _CALLS
        + "<|call|>call:{{ f.name + '{' }}"
        + _KEYS
        + '{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
        "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<call|>{% endfor %}"
        "{{ m.content or '' }}"
        "{% if m.tool_calls %}<|reply|>{% endif %}" + _END,
        answer='Let me see.<|call|>call:weather{city:<|"|>'
        + str(_CITY)
        + '<|"|>,days:3}<call|><|call|>call:time-now{}<call|>',
        special_tokens=("<|call|>", "<call|>", '<|"|>', "<|reply|>"),
    ),
}
CALL_IS_A_TURN = (
    _TOOLS
    + _TURN
    + _CALLS
    + "<|end|>\n<|turn|>assistant\nto={{ f.name }}<|args|>{{ f.arguments | tojson }}{% endfor %}"
    + _END
)
TOOLS_WITHOUT_CALLS = _TOOLS + _TURN + _END
