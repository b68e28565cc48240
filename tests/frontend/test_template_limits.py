"""Hostile chat templates: each ends soon, with an error, in little memory."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from scripted_engine import make_hf_tokenizer

from llmc.text import template_limits
from llmc.text.template import apply_chat_template, render_template
from llmc.text.template_limits import TemplateLimitError

ASK = [{"role": "user", "content": "x"}]
LOOP = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
BIG = "{% set big = 'x' * 10**7 %}"


def grow(step: str, start: str = "'ab'", after: str = "{{ ns.x | length }}") -> str:
    return LOOP.replace("START", start).replace("STEP", step) + after


VALUES = {
    "product": "{{ 'a' * 10**10 }}",
    "product from the left": "{{ 10**10 * 'a' }}",
    "list": "{{ [0] * 10**9 }}",
    "nested lists": grow("[ns.x] * 100", "[1]"),
    "list in its own items": grow("[ns.x, ns.x]", "[1]"),
    "tuple in its own items": grow("(ns.x, ns.x)", "(1,)"),
    "dict in its own items": grow("{'a': ns.x, 'b': ns.x}", "{}"),
    "dict of the function": grow("dict(a=ns.x, b=ns.x)", "{}"),
    "sum of itself": grow("ns.x + ns.x"),
    "joined to itself": grow("ns.x ~ ns.x"),
    "joined lists": grow("ns.x ~ ns.x", "['ab']"),
    "joined, escaped": "{% autoescape true %}" + grow("ns.x ~ ns.x") + "{% endautoescape %}",
    "replaced": grow("ns.x.replace('a', ns.x)"),
    "replaced by a filter": grow("ns.x | replace('a', ns.x)"),
    "join": grow("ns.x.join([ns.x, ns.x, ns.x])"),
    "join of a filter": grow("[ns.x, ns.x, ns.x] | join(ns.x)"),
    "join of what a filter makes": grow("range(9) | map('string') | join(ns.x)"),
    "percent": grow("'%s%s' % (ns.x, ns.x)"),
    "percent of a dict": grow("'%(a)s%(a)s' % {'a': ns.x}"),
    "format": grow("'{0}{0}'.format(ns.x)"),
    "format of a dict": grow("'{a}{a}'.format_map({'a': ns.x})"),
    "format of a filter": grow("'%s%s' | format(ns.x, ns.x)"),
    "block": BIG + "{% set y %}{% for i in range(9) %}{{ big }}{% endfor %}{% endset %}",
    "output": BIG + "{% for i in range(1000) %}{{ big }}{% endfor %}",
    "center": "{{ 'a' | center(10**10) }}",
    "constant center": "{{ 'a' | center(10000000000) }}",
    "center of a text": "{{ 'a'.center(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(10**9) }}",
    "translate": BIG + "{{ ('a' * 1000).translate({97: big}) }}",
    "split": "{{ ('a ' * 10**7).split() | length }}",
    "letters": "{{ ('a' * 10**7) | list | length }}",
    "indent": "{{ ('\\n' * 10**6) | indent(1000, blank=true) }}",
    "indent by a text": BIG + "{{ ('\\n' * 1000) | indent(big) }}",
    "wordwrap": BIG + "{{ ('a ' * 1000) | wordwrap(1, wrapstring=big) }}",
    "urlize": BIG + "{{ ('http://a.bc ' * 1000) | urlize(rel=big) }}",
    "json": "{{ ([1] * 1000) | tojson(indent=10**8) }}",
    "pprint": grow("[ns.x]", "[[1] * 10**6]", "{{ ns.x | pprint }}").replace("60", "300"),
    "json separators": BIG + "{{ ([1] * 1000) | tojson(separators=(big, ':')) }}",
    "slices": "{% set x = [1] * 10**6 %}" + grow("ns.x + [x[i:]]", "[]").replace("60", "10000"),
}
COUNTS = {
    "width": "{{ '%1000000000d' % 1 }}",
    "width of a filter": "{{ '%1000000000d' | format(1) }}",
    "width argument": "{{ '%*d' % (10**9, 1) }}",
    "precision": "{{ '%.1000000000f' % 1.5 }}",
    "width in format": "{{ '{:1000000000}'.format(1) }}",
    "width from format": "{{ '{:{}}'.format(1, 10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "power": "{{ 10**(10**9) }}",
    "integers": grow("ns.x * ns.x", "10"),
}
TIMES = {
    "loops": "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "filters": "{% for a in range(10**5) %}{{ range(10**5) | map('upper') | join | length }}"
    "{% endfor %}",
}


ORDINARY = (
    "{{ 5 | replace(5, 6) }}{{ 'aa' | replace('a', 'b', count=1) }}",
    "{{ 'abc' | join('-') }}{{ nothing | join }}{{ [1, 2] | map('string') | join(',') }}",
    "{{ '%5.1f|%-3s|%%' % (1.25, 'a') }}{{ '%(a)s' % {'a': 1} }}{{ '%s' | format(2) }}",
    "{{ '{:>4}{a!r}'.format(1, a='x') }}{{ '{a}'.format_map({'a': 3}) }}",
    "{{ ('<%s>' | safe) % '&' }}{{ ('<{}>' | safe).format('&') }}",
    "{{ [1, 2, 3] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2, 3] | batch(2, 0) | list }}",
    "{{ 'a\nb' | indent(2) }}{{ 'a b' | wordwrap(1) }}{{ 1.25 | round(1) }}{{ 'a' | center(3) }}",
    "{{ 'a b'.split() }}{{ 'a-b'.split('-', 1)[-1] }}{{ 'x'.join(['a', 'b']) }}{{ {'a': 1} }}",
    "{{ x[::-1] | length }}{{ (x + [1])[1:] }}{{ 2 ** 10 % 7 }}{{ 7 // 2 }}{{ (1, x) }}{{ -2 }}",
    "{% set ns = namespace(a=[]) %}{% for i in range(3) %}{% set ns.a = ns.a + [i] %}{% endfor %}"
    "{{ ns.a ~ 'x' ~ 1 }}",
    "{% filter upper %}{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}{% endfilter %}",
    "{% autoescape true %}{{ h ~ (h | safe) }}{% set y %}<b>{% endset %}{{ y }}{% endautoescape %}",
)


@pytest.mark.parametrize("template", ORDINARY)
def test_what_is_small_is_as_without_limits(template: str) -> None:
    given: dict[str, Any] = {"x": ASK, "h": "<"}
    want = ImmutableSandboxedEnvironment().from_string(template).render(given)
    assert render_template(template, ASK, variables=given) == want
    found = apply_chat_template(
        make_hf_tokenizer(), ASK, chat_template=template, tokenize=False, **given
    )
    assert found == want


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 1.0)
    monkeypatch.setattr(template_limits, "MAX_BUILT", 256 << 20)


@pytest.mark.parametrize("template", VALUES.values(), ids=list(VALUES))
def test_no_value_is_too_large(template: str) -> None:
    check(template, "it builds (a value of )?more than")


@pytest.mark.parametrize("template", COUNTS.values(), ids=list(COUNTS))
def test_no_count_is_too_large(template: str) -> None:
    check(template, "width or count above|integer of more than")


@pytest.mark.parametrize("template", TIMES.values(), ids=list(TIMES))
def test_none_runs_for_long(template: str) -> None:
    check(template, "more than 1 s")


def check(template: str, words: str) -> None:
    started, peak = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateLimitError, match=words):
        render_template(template, ASK)
    with pytest.raises(TemplateLimitError, match=words):
        apply_chat_template(make_hf_tokenizer(), ASK, chat_template=template, tokenize=False)
    assert time.thread_time() - started < 30  # without the limits, hours or all memory
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 20, "KiB"
