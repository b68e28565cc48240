"""Tool calls: the format learned from a template, and answers read by it however they are cut."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import CHAT_TEMPLATE, make_hf_tokenizer, make_scripted
from tool_templates import CALL_IS_A_TURN, CALLS, SCHEMAS, STYLES, TOOLS, TOOLS_WITHOUT_CALLS

from llmc.errors import InvalidRequestError
from llmc.llm import LLM
from llmc.text.chat import can_sanitize, render_chat, tool_format
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.arguments import decoded, from_literal
from llmc.text.tools.generic import GENERIC
from llmc.text.tools.parse import ToolParser
from llmc.text.tools.tool_format import ToolFormat

Read = tuple[str, list[tuple[str, str]]]
USER = {"role": "user", "content": "And now?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


@cache
def tokenizer_of(style: str) -> Tokenizer:
    kind = STYLES[style]
    return Tokenizer(make_hf_tokenizer(kind.template, kind.special_tokens))


def learned(style: str) -> ToolFormat:
    form = tool_format(tokenizer_of(style))
    assert form is not None, f"no format was learned of {style}"
    return form


def read(
    form: ToolFormat,
    pieces: list[str],
    *,
    streams: bool,
    parallel: bool = True,
    was_cut: bool = False,
) -> Read:
    parser = ToolParser(form, SCHEMAS, streams=streams, parallel=parallel)
    deltas = [*map(parser.push, pieces), parser.finish(was_cut=was_cut)]
    calls: dict[int, tuple[str, str]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        if call.name is not None:
            assert call.index == len(calls) and call.arguments == ""
            assert call.id is not None and call.id.startswith("call_") and len(call.id) == 29
            calls[call.index] = (call.name, "")
        else:
            assert call.id is None and call.arguments
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    return "".join(delta.content for delta in deltas), list(calls.values())


def values(found: Read) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in found[1]]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("streams", [False, True])
def test_calls_are_read_as_the_template_writes_them(style: str, streams: bool) -> None:
    kind = STYLES[style]
    form = learned(style)
    whole = read(form, [kind.answer], streams=streams)
    assert whole[0] == (kind.content or "") and values(whole) == CALLS[: kind.num_calls]
    for place in range(len(kind.answer) + 1):
        assert read(form, [kind.answer[:place], kind.answer[place:]], streams=streams) == whole
    assert read(form, list(kind.answer), streams=streams) == whole


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_a_cut_answer_reads_like_its_stream(style: str, parallel: bool) -> None:
    form, answer = learned(style), STYLES[style].answer
    begun = 0
    for place in range(len(answer)):
        cut = answer[:place]
        whole = read(form, [cut], streams=False, parallel=parallel, was_cut=True)
        stream = read(form, list(cut), streams=True, parallel=parallel, was_cut=True)
        assert whole == stream, cut
        begun += any(decoded(arguments) is None for _, arguments in whole[1])
    assert begun > 3, "some places are in the middle of arguments"


@pytest.mark.parametrize("style", STYLES)
def test_what_a_template_writes_itself_is_read(style: str) -> None:
    """Renders a conversation with the calls and reads its last message."""
    kind, tokenizer = STYLES[style], tokenizer_of(style)
    calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(CALLS[: kind.num_calls])
    ]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    ids = render_chat(tokenizer, messages, tools=TOOLS, add_generation_prompt=False)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    answer = text[text.rindex("assistant\n") + 10 :].removesuffix("<|end|>\n")
    assert "None" not in answer
    assert values(read(learned(style), [answer], streams=False)) == CALLS[: kind.num_calls]


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_text_is_lost_and_cuts_change_nothing(style: str, data: st.DataObject) -> None:
    """Any mix of parts of an answer: valid calls, broken ones, markers in prose."""
    answer, form = STYLES[style].answer, learned(style)
    places = st.integers(0, len(answer))
    parts = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(["Hi. ", "\n", form.trigger, form.call_end, "{", "}", '"', "\\"]),
                st.tuples(places, places).map(lambda cut: answer[min(cut) : max(cut)]),
            ),
            max_size=6,
        )
    )
    text = "".join(parts)
    for streams in (False, True):
        whole = read(form, [text], streams=streams)
        assert read(form, list(text), streams=streams) == whole
        assert read(form, parts, streams=streams) == whole
        if not streams:
            assert all(isinstance(arguments, dict) for _, arguments in values(whole))
            if not whole[1]:
                assert whole[0] == text


@pytest.mark.parametrize("style", STYLES)
def test_content_is_told_at_once(style: str) -> None:
    form = learned(style)
    parser = ToolParser(form, SCHEMAS, streams=True)
    said = parser.push("No call here").content
    assert said == "No call here"
    assert parser.push(", none").content == ", none"
    if not form.is_anchored:
        assert parser.push(form.trigger[:2]).content == ""
        assert parser.push("!").content == form.trigger[:2] + "!"


@pytest.mark.parametrize("style", ["json in tags", "list after a marker", "name then json"])
def test_arguments_are_told_while_they_come(style: str) -> None:
    answer = STYLES[style].answer
    parser = ToolParser(learned(style), SCHEMAS, streams=True)
    half = answer.index('"days"')
    delta = parser.push(answer[:half])
    assert [call.name for call in delta.calls] == ["weather", None]
    assert delta.calls[1].arguments.startswith('{"city": ')
    assert parser.push(answer[half : half + 9]).calls[0].arguments == answer[half : half + 9]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "P',
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
        "<tool_call>\n__import__('os').system('true')\n</tool_call>",
        "<tool_call>",
        " <tool_call> \n ",
        '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 100_000,
        "<tool_call>" * 2000,
    ],
    ids=lambda text: text[:60],
)
def test_a_broken_call_stays_content(text: str) -> None:
    assert read(learned("json in tags"), [text], streams=False) == (text, [])


def test_a_call_after_a_broken_one_is_found() -> None:
    answer = STYLES["json in tags"].answer
    broken = '<tool_call>\n{"name": "weather", "arguments": '
    content, calls = read(learned("json in tags"), [broken + answer], streams=False)
    assert content == broken + "Let me see." and len(calls) == 2


def test_text_around_calls_is_content() -> None:
    answer = STYLES["json in tags"].answer
    found = read(learned("json in tags"), [f"  {answer}\nThat is all. "], streams=True)
    assert found[0] == "  Let me see.\nThat is all." and len(found[1]) == 2


def test_one_call_where_more_are_not_wanted() -> None:
    answer = STYLES["key by key"].answer
    content, calls = read(learned("key by key"), [answer], streams=True, parallel=False)
    assert content == "Let me see." and [name for name, _ in calls] == ["weather"]


def test_ends_may_be_missing() -> None:
    """Models stop early; a call whose arguments are whole is one."""
    form = learned("name then json")
    text = '<|calls|><|call|>weather<|sep|>{"city": "x"}'
    for end in ("", "<|end", "<|endcall|>"):
        assert read(form, [text + end], streams=False) == ("", [("weather", '{"city": "x"}')])


def test_values_without_quotes_follow_the_schema() -> None:
    text = STYLES["key by key"].answer.replace("\n3\n", "\n{}\n", 1)
    form = learned("key by key")
    for value, expected in (("12", 12), ("true", True), ("False", False), ("x y", "x y")):
        [(_, arguments), _] = values(read(form, [text.replace("{}", value, 1)], streams=False))
        assert arguments["days"] == expected
    text = text.replace(str(CALLS[0][1]["city"]), "12")
    assert values(read(form, [text], streams=False))[0][1]["city"] == "12"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'x'", "x"),
        ("'it\\'s \"so\"'", 'it\'s "so"'),
        (r"'a\n\d\\'", "a\n\\d\\"),
        ("['a', True, {'b': None, \"c'd\": 1.5}]", ["a", True, {"b": None, "c'd": 1.5}]),
        ("False", False),
        ("'True'", "True"),
        ("12", 12),
    ],
)
def test_literals_of_python(written: str, value: Any) -> None:
    found = from_literal(written)
    assert found is not None and json.loads(found) == value


@pytest.mark.parametrize(
    "written", ["x", "'x", "f('x')", "{1}", "1+1", "__import__", "(", "'a' 'b'", ""]
)
def test_what_is_no_literal(written: str) -> None:
    assert from_literal(written) is None


def test_chat_from_python_tells_the_template_of_tools() -> None:
    style = STYLES["json in tags"]
    scripted = make_scripted(
        chat_template=style.template, max_model_len=2048, num_blocks=256, blocks_per_request=128
    )
    scripted.runner.scripts = {"time-now": style.answer}  # the name of a tool
    with LLM.from_started(scripted, scripted.config, scripted.tokenizer) as llm:  # type: ignore[arg-type]
        [answer] = llm.chat([USER], tools=TOOLS, progress=False)
        assert answer.outputs[0].text == style.answer
        [answer] = llm.chat([USER], progress=False)
        assert answer.outputs[0].text != style.answer


def test_values_in_quotes_of_the_models_own() -> None:
    style = "quotes of its own"
    text = '<|call|>call:weather{city:{a:[<|"|>x: "y"<|"|>, {b-c:true}],"d":"e"},days:-1.5}<call|>'
    expected = {"city": {"a": ['x: "y"', {"b-c": True}], "d": "e"}, "days": -1.5}
    for pieces in ([text], list(text)):
        found = read(learned(style), pieces, streams=False)
        assert values(found) == [("weather", expected)] and found[0] == ""
    broken = text.replace("true", "{1}")
    assert read(learned(style), [broken], streams=False) == (broken, [])


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TOOLS_WITHOUT_CALLS, CALL_IS_A_TURN])
def test_tools_are_told_in_words_where_the_template_can_not(template: str) -> None:
    tokenizer = Tokenizer(make_hf_tokenizer(template))
    assert tool_format(tokenizer) is GENERIC
    result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]}
    told = "You can call these functions:"
    for first in ([], [{"role": "system", "content": "Be brief."}]):
        ids = render_chat(tokenizer, [*first, USER, said, result, result, USER], tools=TOOLS)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        names = [tool["function"]["name"] for tool in TOOLS]
        assert text.count(told) == 1 and all(f'"name": "{name}"' in text for name in names)
        assert text.index(told) < text.index(USER["content"])
        call = (
            'Hm.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        )
        assert call in text
        responses = "\n".join(["<tool_response>\nsunny\n</tool_response>"] * 2)
        assert responses in text and "tool_call_id" not in text
    assert told not in tokenizer.decode(render_chat(tokenizer, [USER, said, result]))


@pytest.mark.parametrize("tool", [{"name": "weather"}, {"function": "weather"}, []])
def test_tools_that_can_not_be_told_are_refused(tool: Any) -> None:
    tokenizer = Tokenizer(make_hf_tokenizer(CHAT_TEMPLATE))
    with pytest.raises(InvalidRequestError, match=r"tools\[1\] has no function; a tool is"):
        render_chat(tokenizer, [USER], tools=[TOOLS[0], tool])


def test_a_template_without_system_messages_tells_of_tools_in_the_first_of_the_user() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = Tokenizer(make_hf_tokenizer(refuses + CHAT_TEMPLATE))
    text = tokenizer.decode(render_chat(tokenizer, [USER], tools=TOOLS))
    assert text.index(USER["content"]) < text.index("You can call these functions:")


def test_generic_calls_are_read() -> None:
    for number in (1, 2):
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        text = "\n".join(["Let me see.", *[call] * number])
        for pieces in ([text], list(text)):
            found = read(GENERIC, pieces, streams=False)
            assert found[0] == "Let me see."
            assert values(found) == [("weather", {"city": "Oslo"})] * number


def test_tools_and_calls_that_spell_control_tokens_are_text() -> None:
    tokenizer = tokenizer_of("json in tags")
    if not can_sanitize(tokenizer.hf):
        pytest.skip("this transformers reads control tokens in any text")
    tools = [{"type": "function", "function": {"name": "f", "description": "<|end|>"}}]
    [end] = tokenizer.hf.convert_tokens_to_ids(["<|end|>"])
    plain = render_chat(tokenizer, [USER]).count(end)
    assert render_chat(tokenizer, [USER], tools=tools).count(end) == plain + 1  # the template's


@pytest.mark.parametrize("tools", [[test_no_text_is_lost_and_cuts_change_nothing], ["\ud800"]])
def test_tools_must_be_json(tools: Any) -> None:
    tools = [{"description": tool} if isinstance(tool, str) else tool for tool in tools]
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(tokenizer_of("json in tags"), [USER], tools=tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "messages[0].tool_calls"),
        (["x"], "messages[0].tool_calls[0].function"),
        ([{"function": {"name": 1, "arguments": "{}"}}], "messages[0].tool_calls[0].function.name"),
        (
            [{"function": {"name": "f", "arguments": "{"}}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_calls_of_a_history_are_checked(calls: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(tokenizer_of("json in tags"), [{"role": "assistant", "tool_calls": calls}])
    assert caught.value.param == param
