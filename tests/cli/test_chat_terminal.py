"""The chat as a person meets it: in a terminal of 60 columns, with keys typed at any time."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from llmc.cli.answer_view import AnswerView, as_markdown, split_blocks

if sys.platform == "win32":
    pytest.skip("there are no pseudo-terminals", allow_module_level=True)

from terminal_chat import WORDS, Screen, chat_screen


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Screen]:
    with chat_screen(60, tmp_path_factory.mktemp("home")) as screen:
        screen.wait("context 0/100")
        yield screen


def test_words_stay_whole_at_60_columns(shared: Screen) -> None:
    shared.type("words\r")
    said = shared.wait("100 tokens")
    lines = re.split(r"[\r\n]+", said)  # each time that the answer was drawn
    answer = [line.rstrip() for line in lines if line.strip() and "|" not in line]
    for word in set(WORDS.split()):
        assert any(word in line.split() for line in answer), word
    assert max(map(len, answer)) <= 60


def test_keys_typed_during_an_answer_wait_for_the_next_prompt(shared: Screen) -> None:
    shared.type("slow answer\r")
    shared.wait("quick")
    shared.type("ahead of time\r")
    # one read may bring the next prompt too
    during, _, after = shared.wait("long grass.").partition("long grass.")
    assert "ahead of time" not in during
    if "You said: ahead of time" not in after:
        shared.wait("You said: ahead of time")


def test_the_settings_in_force_are_shown(shared: Screen) -> None:
    shared.type("/set top_k 5\r")
    shared.wait("top_k = 5")
    shared.type("/show\r")
    shown = shared.wait("repetition_penalty")
    assert "temperature = 0.25 (default)" in shown and "top_k = 5" in shown


def test_a_question_comes_back_to_be_edited(shared: Screen) -> None:
    shared.type("first try\r")
    shared.wait("You said: first try")
    shared.type("/edit\r")
    shared.wait("first try")
    shared.type(" again\r")
    shared.wait("You said: first try again")


def test_a_wrapped_prompt_is_not_marked_as_a_new_line() -> None:
    from llmc.cli.chat_terminal import _continuation

    assert _continuation(4, 1, 0) == "... "
    assert _continuation(4, 1, 1) == "    "


def drawn(text: str, columns: int = 60, **options: bool) -> str:
    screen = Console(file=io.StringIO(), width=columns, height=10, force_terminal=False)
    with AnswerView(screen, **options) as view:
        for piece in text:
            view.write(piece)
    output = screen.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_markdown_is_drawn_block_by_block() -> None:
    text = "Some **bold** words.\n\n- first\n- second\n\n```python\nx = 1\n```\n\n<b>kept</b>\nnext"
    shown = [line.rstrip() for line in drawn(text).splitlines()]
    assert "Some bold words." in shown
    assert any("• first" in line for line in shown)
    assert any("x = 1" in line for line in shown) and not any("```" in line for line in shown)
    assert shown.index("next") == shown.index("<b>kept</b>") + 1  # no HTML, and breaks stay


def test_without_markdown_the_text_stays(tmp_path: Path) -> None:
    assert "**bold**" in drawn("**bold**", markdown=False)


def test_blocks_end_at_blank_lines_outside_of_fences() -> None:
    assert split_blocks("a\n\nb") == ("a\n\n", "b")
    code = "```\na\n\nb\n"
    assert split_blocks(code) == ("", code)
    assert split_blocks(code + "```\n\nc") == (code + "```\n\n", "c")
    assert split_blocks("~~~\n```\n\n") == ("", "~~~\n```\n\n")
    assert as_markdown("a").parsed
