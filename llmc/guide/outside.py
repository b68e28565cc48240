"""Makes up questions that the manual does not answer, so that the model learns to say so.

Templates are filled from lists of words: the model must learn that it is the *unknown* word that
matters, so the same templates are used as in questions about llmc.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

REFUSAL = "What is the capital of France?"  # the manual's entry with the answer to all of these
UNKNOWN_OPTION = "What does --frobnicate do?"  # and to options that do not exist

TEMPLATES = (
    "what is {thing}", "what is a {thing}", "what is the {thing}", "who invented {thing}",
    "who is {person}", "who was {person}", "when was {person} born", "where is {place}",
    "what is the capital of {place}", "what language do they speak in {place}",
    "how many people live in {place}", "what is the weather in {place}", "how big is {place}",
    "how do I {verb} a {thing}", "how do I {verb} {thing}", "how can I {verb} my {thing}",
    "can you {verb} {thing}", "can I {verb} a {thing}", "why is {thing} {thing}",
    "write a poem about {thing}", "write a story about a {thing}", "write an essay on {thing}",
    "write a function that {verb}s a {thing}", "write code for {thing}", "explain {thing}",
    "explain {thing} to me", "tell me about {thing}", "tell me about {place}",
    "tell me about {person}", "what does {thing} mean", "what does {person} mean by {thing}",
    "how does {thing} work", "how does a {thing} work", "how do I install {thing}",
    "how do I use {thing}", "how do I start {thing}", "how do I configure {thing}",
    "what is the difference between {thing} and {thing}", "compare {thing} and {thing}",
    "{thing} or {thing}", "is {thing} better than {thing}", "do you like {thing}",
    "what do you think about {thing}", "how much does a {thing} cost", "where can I buy {thing}",
    "how much is {n} plus {n}", "what is {n} times {n}", "{n} + {n}", "{n} * {n}",
    "what is {n} minus {n}", "what is the square root of {n}", "how many {thing}s are there",
    "translate {thing} into {language}", "how do you say {thing} in {language}",
    "say {thing} in {language}", "speak {language}", "summarize the book about {thing}",
    "who won the {thing} in {year}", "what happened in {year}", "who was king in {year}",
    "what is the population of {place}", "best {thing} in {place}", "how far is {place}",
    "how old is {person}", "what time is it in {place}", "what is the tallest {thing}",
    "give me a recipe for {thing}", "recommend a {thing}", "plan a trip to {place}",
    "which {thing} should I buy", "is {thing} healthy", "is {thing} dangerous", "{thing}",
    "{thing} {thing}", "{place}", "{person}", "history of {thing}", "history of {place}",
    "what color is a {thing}", "are {thing}s real", "does {thing} exist", "{verb} {thing}",
    "why do people {verb} {thing}", "when should I {verb} {thing}", "what is {nonsense}",
    "{nonsense}", "{nonsense} {nonsense}", "how do I {nonsense}", "explain {nonsense}",
    "what does {nonsense} mean", "tell me about {nonsense}", "who is {nonsense}",
    "what is the meaning of {thing}", "name a famous {thing}", "spell {thing}",
    "what rhymes with {thing}", "play {thing}", "order a {thing}", "who wrote about {thing}",
    "what is the president of {place}", "who is the president of {place}", "define {thing}",
    "how long does a {thing} live", "where do {thing}s come from", "draw a {thing}",
    "{n}+{n}", "what is {n}+{n}", "what is {n} divided by {n}", "{n} - {n}", "solve {n} * {n}",
    "do you know what {thing} is", "can you recommend a {thing}", "fix my {thing}",
    "sing a {thing}", "what {thing} did the {thing}", "what should I {verb} tomorrow",
    "is my {thing} {thing}", "how many {thing}s do I need", "who painted the {thing}",
    "who discovered {thing}", "who wrote {thing}", "what year did {thing} end", "I like {thing}",
    "my {thing} is broken", "I want a {thing}", "the {thing} is {thing}", "I am {nonsense}",
    "how tall is {person}", "how heavy is a {thing}", "which {thing} is the biggest",
    "tell me a story about {person}", "what is the price of {thing}", "how do I lose {thing}",
    "{nonsense} {nonsense} {nonsense}", "do {thing}s {verb}", "when is {thing}",
    "where is my {thing}",
    "write a {thing} about {thing}", "write {thing}", "write me a {thing}", "compose a {thing}",
    "what is my {thing}", "what should I eat in {place}", "is it raining in {place}",
)  # fmt: skip
OPTION_TEMPLATES = (
    "what does {option} do", "{option}", "explain {option}", "what is {option}",
    "how do I use {option}", "what is the option {option}", "what does the flag {option} mean",
    "what is the flag {option} for", "tell me about {option}", "default of {option}",
)  # fmt: skip
HELD_OUT = (
    "Should I repaint my bathroom?", "why is the sky blue", "Are snakes poisonous?",
    "give me three names for a puppy", "what are the ingredients of guacamole", "is Pluto a planet",
    "my back hurts, what should I do", "Who directed Casablanca?", "convert 5 miles to kilometres",
    "how deep is the Pacific", "what did you have for breakfast", "what day is it",
    "when does the next bus leave", "does pineapple belong on pizza?", "how old is the universe",
    "prove that there are infinitely many primes", "what is the opposite of hot", "xyzzy plugh",
    "Which country has the most lakes?", "I am sad", "explain the rules of cricket", "lorem ipsum",
    "can dogs see colours", "how do airplanes stay up", "is it going to snow this weekend",
)  # fmt: skip
WORDS: dict[str, list[str]] = {
    slot: " ".join(lines).split()
    for slot, lines in json.loads(
        Path(__file__).with_name("outside_words.json").read_text(encoding="utf-8")
    ).items()
}


def outside_question(rng: Random) -> str:
    """A question about anything but llmc."""
    question = rng.choice(TEMPLATES)
    fillers: dict[str, Callable[[], str]] = {
        "{thing}": lambda: rng.choice(WORDS["thing"]),
        "{place}": lambda: rng.choice(WORDS["place"]),
        "{person}": lambda: rng.choice(WORDS["person"]),
        "{verb}": lambda: rng.choice(WORDS["verb"]),
        "{language}": lambda: rng.choice(WORDS["language"]),
        "{nonsense}": lambda: "".join(rng.choices(WORDS["syllable"], k=rng.randint(1, 3))),
        "{n}": lambda: str(rng.randint(1, 999)),
        "{year}": lambda: str(rng.randint(1000, 2030)),
    }
    for slot, fill in fillers.items():
        while slot in question:
            question = question.replace(slot, fill(), 1)
    return question


def unknown_option(rng: Random) -> str:
    """A question about an option that does not exist."""
    name = "-".join(rng.choices(WORDS["option"], k=rng.choice((1, 2, 2, 3))))
    return rng.choice(OPTION_TEMPLATES).replace("{option}", f"--{name}")
