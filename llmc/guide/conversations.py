"""Draws training texts: conversations from the manual, and some of its running text.

A text is a list of (piece, weight): the weight says how much the piece counts in the loss.
Answers count in full, questions a little, so that the model learns their words too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from llmc.guide.manual import Entry, Manual, normal_form
from llmc.guide.outside import REFUSAL, UNKNOWN_OPTION, WORDS, outside_question, unknown_option
from llmc.guide.variety import Keywords, vary

Piece = tuple[str, float]
START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ANSWER_WEIGHT, QUESTION_WEIGHT = 1.0, 0.1
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are llmc-guide, the built-in model of llmc.",
    "Answer questions about llmc.", "Be brief.", "You are a friendly assistant.",
    "Answer in one sentence.", "You answer questions about the manual of llmc.",
    "You are an expert in inference engines.", "Be polite and precise.", "Answer the user.",
    "You are a bot.", "Help the user with llmc. Keep answers short.", "Answer in French.",
)  # fmt: skip
NUM_OPENING_WORDS = 8
NUM_TURNS = (1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 6, 9, 14)


def message(role: str, text: str, *, weight: float) -> list[Piece]:
    """One message as the chat template writes it. The role and the line end are never learned."""
    counted = text + END if role == "assistant" else text
    tail = "\n" if role == "assistant" else END + "\n"
    return [(f"{START}{role}\n", 0.0), (counted, weight), (tail, 0.0)]


class Conversations:
    """An endless, repeatable stream of training texts.

    Entries are dealt like cards: each comes once before any comes again.
    """

    def __init__(self, manual: Manual, rng: Random) -> None:
        self._manual = manual
        self._held_out = manual.held_out
        self._keywords = Keywords([entry.phrasings for entry in manual.entries])
        self._rng = rng
        self._deck: list[Entry] = []
        self._refusal = manual.entry(REFUSAL).answer
        self._unknown_option = manual.entry(UNKNOWN_OPTION).answer

    def __iter__(self) -> Iterator[list[Piece]]:
        while True:
            draw = self._rng.random()
            if draw < 0.05:
                yield self._running_text()
            elif draw < 0.75:
                yield self._opening()
            else:
                yield self._conversation()

    def _running_text(self) -> list[Piece]:
        chapter = self._rng.choice(self._manual.chapters)
        first = self._rng.randrange(len(chapter)) if self._rng.random() < 0.7 else 0
        text = " ".join(chapter[first : first + self._rng.randint(2, 8)])
        return [(text + END_OF_TEXT, ANSWER_WEIGHT)]

    def _opening(self) -> list[Piece]:
        """One question and how its answer begins: to choose the answer is what is hard to learn."""
        *before, (question, answer) = self._turns()
        pieces: list[Piece] = []
        for earlier, reply in before:
            pieces += message("user", earlier, weight=QUESTION_WEIGHT)
            pieces += message("assistant", reply, weight=ANSWER_WEIGHT)
        pieces += message("user", question, weight=QUESTION_WEIGHT)
        words = answer.split(" ")
        shown = " ".join(words[:NUM_OPENING_WORDS])
        if len(words) <= NUM_OPENING_WORDS:
            shown += END
        return [*pieces, (f"{START}assistant\n", 0.0), (shown, ANSWER_WEIGHT), (END_OF_TEXT, 0.0)]

    def _conversation(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._rng.random() < 0.2:
            pieces += message("system", self._rng.choice(SYSTEM_PROMPTS), weight=0.0)
        for _ in range(self._rng.choice(NUM_TURNS)):
            for question, answer in self._turns():
                pieces += message("user", question, weight=QUESTION_WEIGHT)
                pieces += message("assistant", answer, weight=ANSWER_WEIGHT)
        return [*pieces, (END_OF_TEXT, 0.0)]

    def _turns(self) -> list[tuple[str, str]]:
        """One question and its answer, sometimes with a question that follows up on it."""
        draw = self._rng.random()
        if draw < 0.12:
            return [(self._outside(), self._refusal)]
        if draw < 0.15:
            return [(vary(unknown_option(self._rng), self._rng), self._unknown_option)]
        entry = self._deal()
        question = self._ask(entry.phrasings)
        if entry.answer not in (self._refusal, self._unknown_option):
            question = self._ask_otherwise(entry, question)
        turns = [(question, entry.answer)]
        leaning = [f for f in self._manual.follow_ups if entry.question in f.answers]
        if leaning and self._rng.random() < 0.6:
            follow_up = self._rng.choice(leaning)
            turns.append((self._ask(follow_up.phrasings), follow_up.answers[entry.question]))
        return turns

    def _ask(self, phrasings: Sequence[str]) -> str:
        phrasing = self._rng.choice(phrasings)
        varied = vary(phrasing, self._rng)
        return phrasing if normal_form(varied) in self._held_out else varied

    def _ask_otherwise(self, entry: Entry, question: str) -> str:
        """Now and then by keywords, or in words of the answer, which a phrasing lacks."""
        draw = self._rng.random()
        if draw < 0.10:
            asked = self._keywords.thin(question, self._rng)
        elif draw < 0.14 and len(entry.answer.split()) > 8:
            asked = self._keywords.from_answer(entry.answer, self._rng)
        else:
            return question
        return question if normal_form(asked) in self._held_out else asked

    def _outside(self) -> str:
        """A foreign question, or one of the manual's made foreign."""
        if self._rng.random() < 0.85:
            return vary(outside_question(self._rng), self._rng)
        phrasing = self._rng.choice(self._rng.choice(self._manual.entries).phrasings)
        strange = self._keywords.estrange(phrasing, WORDS["thing"] + WORDS["verb"], self._rng)
        if strange == phrasing:  # nothing in it could be replaced
            return outside_question(self._rng)
        return vary(strange, self._rng)

    def _deal(self) -> Entry:
        if not self._deck:
            self._deck = list(self._manual.entries)
            self._rng.shuffle(self._deck)
        return self._deck.pop()
