"""Slash commands and the state of a chat, without a terminal or a model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llmc.cli.chat_commands import Action, is_command, run_command
from llmc.cli.conversation import (
    Conversation,
    ShownToken,
    TurnStats,
    is_open_block,
    message_text,
    stats_line,
    why_it_ended,
)
from llmc.errors import InvalidRequestError


def make_stats(*, prompt: int = 40, answer: int = 11, reason: str = "stop") -> TurnStats:
    return TurnStats(
        prompt_tokens=prompt,
        cached_tokens=32,
        completion_tokens=answer,
        ttft_s=0.5,
        total_s=1.5,
        finish_reason=reason,
    )


@pytest.fixture
def chat() -> Conversation:
    """One question that has its answer."""
    chat = Conversation(model="tiny", context_limit=100, system="Be brief.")
    chat.ask("What?")
    chat.answered("That.", make_stats())
    return chat


def test_messages_begin_with_the_system_prompt(chat: Conversation) -> None:
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    chat.system = None
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


def test_help_names_every_command_once(chat: Conversation) -> None:
    text = run_command(chat, "/help").text
    for name in ("/reset", "/system", "/set", "/stats", "/save", "/undo", "/regen", "/show"):
        assert text.count(f"  {name} ") + text.count(f"  {name}\n") == 1


def test_reset_keeps_the_system_prompt(chat: Conversation) -> None:
    run_command(chat, "/reset")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert chat.context_tokens == 0


def test_undo_takes_back_question_and_answer(chat: Conversation) -> None:
    chat.ask("Second?")
    chat.answered("Yes.", make_stats())
    run_command(chat, "/undo")
    assert [turn["content"] for turn in chat.turns] == ["What?", "That."]
    run_command(chat, "/undo")
    assert chat.turns == []
    assert "Nothing" in run_command(chat, "/undo").text


def test_regen_drops_the_answer_and_asks_again(chat: Conversation) -> None:
    assert run_command(chat, "/regen").action is Action.ANSWER
    assert [turn["role"] for turn in chat.turns] == ["user"]
    assert run_command(Conversation(model="m"), "/regen").action is Action.STAY


@pytest.mark.parametrize("line", ["/exit", "/bye", "/quit", "/EXIT"])
def test_exit(chat: Conversation, line: str) -> None:
    assert run_command(chat, line).action is Action.EXIT


def test_system_prompt_shown_set_and_removed(chat: Conversation) -> None:
    assert "Be brief." in run_command(chat, "/system").text
    run_command(chat, "/system Answer in verse.")
    assert chat.system == "Answer in verse."
    run_command(chat, '/system """Two\nlines."""')
    assert chat.system == "Two\nlines."
    run_command(chat, "/system none")
    assert chat.system is None


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.7", "temperature", 0.7),
        ("/set temperature=0", "temperature", 0.0),
        ("/set top-p 0.9", "top_p", 0.9),
        ("/set max_tokens 50", "max_tokens", 50),
        ("/set stop END OF STORY", "stop", "END OF STORY"),
    ],
)
def test_set(chat: Conversation, line: str, name: str, value: object) -> None:
    run_command(chat, line)
    assert chat.settings == {name: value}
    assert str(value) in run_command(chat, "/show").text
    run_command(chat, f"/set {name} default")
    assert chat.settings == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/set temperature hot", "temperature must be a number, got 'hot'"),
        ("/set temperature -1", "temperature must be"),
        ("/set temperature nan", "temperature must be"),
        ("/set max_tokens 1.5", "max_tokens must be an integer"),
        ("/set max_tokens 0", "max_tokens must be at least 1, got 0"),
        ("/set temprature 1", "did you mean temperature?"),
    ],
)
def test_set_refuses_and_changes_nothing(chat: Conversation, line: str, expected: str) -> None:
    assert expected in run_command(chat, line).text
    assert chat.settings == {}


def test_bad_settings_are_refused_at_the_start() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        Conversation(model="m", settings={"top_p": 2.0})


def test_save_and_load(chat: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    assert str(path) in run_command(chat, f"/save {path}").text
    assert json.loads(path.read_text())["messages"] == chat.messages
    assert "exists" in run_command(chat, f"/save {path}").text
    fresh = Conversation(model="tiny")
    run_command(fresh, f"/load {path}")
    assert fresh.messages == chat.messages


def test_load_restores_the_saved_settings(chat: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat.settings = {"temperature": 0.5}
    run_command(chat, f"/save {path}")
    fresh = Conversation(model="tiny", settings={"seed": 3})
    assert "temperature = 0.5" in run_command(fresh, f"/load {path}").text
    assert fresh.settings == {"temperature": 0.5}

    saved = json.loads(path.read_text())
    for wrong in ({"temperature": -1}, {"n": 2}, {"no": 2}, [1]):
        path.write_text(json.dumps({**saved, "settings": wrong}))
        assert "Not loaded" in run_command(fresh, f"/load {path}").text
    assert fresh.settings == {"temperature": 0.5}
    path.write_text(json.dumps({"messages": saved["messages"]}))
    run_command(fresh, f"/load {path}")
    assert fresh.settings == {"temperature": 0.5}


def test_save_and_load_report_what_is_wrong(chat: Conversation, tmp_path: Path) -> None:
    assert "Not saved" in run_command(chat, f"/save {tmp_path / 'no' / 'x.json'}").text
    assert "Nothing to save" in run_command(Conversation(model="m"), "/save").text
    assert "Not loaded" in run_command(chat, f"/load {tmp_path / 'missing.json'}").text
    (tmp_path / "bad.json").write_text("[1]")
    assert "was not written by /save" in run_command(chat, f"/load {tmp_path / 'bad.json'}").text
    assert len(chat.turns) == 2


def test_stats(chat: Conversation) -> None:
    assert "10.0 tok/s" in run_command(chat, "/stats").text
    run_command(chat, "/stats off")
    assert chat.show_stats is False
    assert stats_line(make_stats(), 100) == (
        "TTFT 0.50 s | 10.0 tok/s | 40 prompt (32 cached) + 11 answer | context 51/100"
    )


def test_unknown_command_names_the_nearest(chat: Conversation) -> None:
    reply = run_command(chat, "/rest")
    assert "did you mean /reset?" in reply.text and reply.action is Action.STAY


def test_status_line_warns_before_the_context_is_full(chat: Conversation) -> None:
    assert chat.status() == "tiny  |  10.0 tok/s  |  context 51/100 tokens"
    chat.answered("long", make_stats(prompt=80, answer=15))
    assert "nearly full: /undo, /reset" in chat.status()


def test_why_an_answer_ended(chat: Conversation) -> None:
    assert why_it_ended(make_stats(), chat) is None
    cut = why_it_ended(make_stats(reason="length"), chat)
    assert cut is not None and "/set max_tokens" in cut
    once = why_it_ended(make_stats(reason="length"), chat, is_interactive=False)
    assert once is not None and "--max-tokens" in once and "/set" not in once
    full = why_it_ended(make_stats(prompt=80, answer=20, reason="length"), chat)
    assert full is not None and "context of 100 tokens is full" in full and "/reset" in full


def test_a_question_without_answer_can_be_taken_back(chat: Conversation) -> None:
    chat.ask("Never mind")
    assert chat.drop_question() == "Never mind"
    assert len(chat.turns) == 2


@pytest.mark.parametrize(
    ("entered", "sent"),
    [
        ("hello ", "hello"),
        ('"""one\ntwo"""', "one\ntwo"),
        ('"""\none\n"""', "one"),
        ("//etc is a path", "/etc is a path"),
        ('say """x"""', 'say """x"""'),
    ],
)
def test_message_text(entered: str, sent: str) -> None:
    assert message_text(entered) == sent


def test_open_blocks_and_commands() -> None:
    assert is_open_block('"""one\ntwo')
    assert not is_open_block('"""one"""')
    assert not is_open_block('say """one')
    assert is_command("/help") and not is_command("//help") and not is_command("help")


def test_a_file_goes_before_the_question(chat: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "two words.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    reply = run_command(chat, f'/file "{path}"')
    assert "3 lines" in reply.text and reply.action is Action.STAY
    chat.ask("What is this?")
    assert chat.turns[-1]["content"] == "two words.txt:\n```\none\ntwo\n```\n\nWhat is this?"
    chat.ask("And now?")
    assert chat.turns[-1]["content"] == "And now?"
    reply = run_command(chat, f'/file "{path}" Count the words.')
    assert reply.action is Action.ANSWER
    assert chat.turns[-1]["content"].endswith("```\n\nCount the words.")


def test_files_that_can_not_be_read_are_told(chat: Conversation, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for argument, why in (
        ("", "Write /file"),
        (str(tmp_path / "none"), "No such file"),
        (str(tmp_path), "directory"),
        (str(binary), "not UTF-8 text"),
    ):
        assert why in run_command(chat, f"/file {argument}").text
    assert not chat.attachments


def test_edit_gives_the_question_back(chat: Conversation) -> None:
    chat.ask("first")
    chat.answered("reply", make_stats())
    turns = len(chat.turns)
    reply = run_command(chat, "/edit")
    assert (reply.text, reply.action) == ("first", Action.EDIT)
    assert len(chat.turns) == turns - 2


def test_the_model_is_shown_and_chosen(chat: Conversation) -> None:
    assert "its own process" in run_command(chat, "/model other").text
    chat.models = ("a", "b")
    assert "also available" in run_command(chat, "/model").text
    assert "no model 'c'" in run_command(chat, "/model c").text
    assert run_command(chat, "/model b").action is Action.MODEL
    assert chat.model == "b"


def test_tokens_are_shown_with_their_probabilities(chat: Conversation) -> None:
    assert "/tokens on" in run_command(chat, "/tokens").text
    assert "logprobs" not in chat.asked_settings
    run_command(chat, "/tokens on")
    assert chat.asked_settings["logprobs"] == 3
    places = (("The", math.log(0.5)), (" L", math.log(0.25)))
    chat.tokens = [ShownToken(text="The", logprob=math.log(0.5), alternatives=places)]
    assert run_command(chat, "/tokens").text == "   50.0%  'The'  (' L' 25.0%)"


def test_settings_show_what_counts(chat: Conversation) -> None:
    chat.settings.clear()
    assert chat.in_force("top_k") == "the server's default"
    chat.defaults = {"top_k": 20, "seed": None}
    assert chat.in_force("top_k") == "20 (default)" and chat.in_force("seed") == "none"
    run_command(chat, "/set top_k 3")
    assert chat.in_force("top_k") == "3"
