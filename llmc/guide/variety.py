"""Says one question in many ways: other words, prefixes, case, punctuation, typing mistakes.

Everything is drawn from the `random.Random` that is passed in, so a seed gives the same samples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from random import Random

# Words or phrases of one group may stand for each other in a question.
SYNONYMS = (
    ("how do I", "how can I", "how to", "how would I", "how could I", "what is the way to",
     "how does one", "how should I", "tell me how to", "show me how to", "I want to",
     "I would like to", "is there a way to", "what do I do to", "how do you"),
    ("what is", "what's", "whats", "what exactly is", "tell me what is", "can you tell me what is"),
    ("explain", "tell me about", "describe", "say something about", "what do you know about",
     "can you explain", "give me an explanation of", "help me understand"),
    ("what are", "what exactly are", "tell me what are"),
    ("what does", "tell me what does", "what exactly does"),
    ("why do I get", "why am I getting", "what is the cause of", "I get"),
    ("does llmc support", "can llmc do", "is there support for", "does it support"),
    ("list", "list all", "show", "give me", "enumerate", "name", "show me"),
    ("which", "what"),
    ("start", "launch", "run", "boot", "begin", "bring up", "fire up"),
    ("stop", "end", "terminate", "shut down"),
    ("server", "API server", "HTTP server", "web server"),
    ("install", "set up", "get"),
    ("chat", "conversation", "dialog"),
    ("use", "work with", "employ"),
    ("change", "set", "adjust", "modify", "configure", "choose"),
    ("turn off", "switch off", "disable", "deactivate"),
    ("turn on", "switch on", "enable", "activate"),
    ("see", "view", "look at", "find", "display", "print"),
    ("measure", "benchmark", "test", "check"),
    ("speed", "performance"),
    ("fast", "quick"),
    ("faster", "quicker"),
    ("slow", "sluggish", "not fast"),
    ("error", "problem", "failure", "issue"),
    ("big", "large"),
    ("GPU", "graphics card", "gpu", "NVIDIA card"),
    ("CPU", "processor", "cpu"),
    ("option", "flag", "parameter", "argument", "setting", "switch"),
    ("options", "flags", "parameters", "arguments", "settings", "switches"),
    ("command", "cmd"),
    ("folder", "directory"),
    ("machine", "computer", "system", "PC"),
    ("support", "handle", "allow"),
    ("supported", "possible", "available", "allowed"),
    ("answer", "reply", "response", "output"),
    ("answers", "replies", "responses"),
    ("context", "context window", "context length"),
    ("prompt", "input"),
    ("difference between", "differences between", "distinction between"),
    ("many", "several", "lots of"),
    ("load", "open", "use"),
    ("make", "create", "build"),
    ("need", "require", "have to have"),
    ("default", "default value", "standard value"),
    ("maximum", "largest", "max", "biggest"),
    ("python", "Python"),
    ("request", "call", "query"),
    ("requests", "calls", "queries"),
    ("memory", "RAM"),
    ("forget", "clear", "erase", "wipe"),
    ("limit", "restrict", "cap"),
    ("reduce", "lower", "decrease"),
    ("mean", "stand for", "signify"),
    ("kind", "sort", "type"),
    ("model", "LLM", "language model"),
    ("generate", "produce", "create"),
    ("random", "at random"),
    ("example", "sample", "short example"),
    ("version", "release"),
)  # fmt: skip
PREFIXES = (
    "please tell me", "tell me", "can you tell me", "could you tell me", "I want to know",
    "I would like to know", "do you know", "hi,", "hello,", "hey,", "hello!", "hi!", "so", "ok,",
    "okay,", "question:", "a question:", "one question,", "excuse me,", "sorry,", "well,", "now",
    "and", "please", "hey there,", "quick question:", "just wondering,", "also,", "thanks,",
    "I need help:", "help,", "good morning,", "please explain", "I wonder", "um", "then",
    "let me ask,", "I have a question:", "next:", "another question:", "and also", "but",
)  # fmt: skip
SUFFIXES = (
    "please", "in llmc", "with llmc", "for llmc", "thanks", "exactly", "here", "then", "for me",
    "in short", "in one sentence", "again", "now", "by the way", "in detail", "thank you",
    "in simple words", "in this program", "right now", "today", "at all", "really",
)  # fmt: skip
STEMS = (
    (), (), ("what", "is"), ("how", "about"), ("tell", "me", "about"), ("is", "it", "true", "that"),
    ("explain",), ("why",), ("when",), ("what", "about"), ("does",), ("so",), ("which",),
)  # fmt: skip
FILLERS = frozenset(
    ("a", "an", "the", "is", "are", "do", "does", "i", "of", "to", "in", "on", "for", "with", "my",
     "can", "how", "what", "which", "it", "me", "by", "at", "be", "that", "this", "and", "you",
     "get", "should", "would", "could", "there", "from")
)  # fmt: skip
NEIGHBOURS = {
    "a": "sq", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj",
    "i": "uo", "j": "hk", "k": "jl", "l": "k", "m": "n", "n": "bm", "o": "ip", "p": "o", "q": "w",
    "r": "et", "s": "ad", "t": "ry", "u": "yi", "v": "cb", "w": "qe", "x": "zc", "y": "tu",
    "z": "x",
}  # fmt: skip


def _pattern(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w/-]){re.escape(words)}(?![\w-])", re.IGNORECASE)


_GROUPS = [(group, [_pattern(words) for words in group]) for group in SYNONYMS]
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)|\b([a-z]+(?:_[a-z]+)+)\b")


def reword(text: str, rng: Random) -> str:
    """Swap words for others of their group, each group with an even chance."""
    for group, patterns in _GROUPS:
        if rng.random() < 0.5:
            continue
        for pattern in patterns:
            if pattern.search(text):
                text = pattern.sub(rng.choice(group), text, count=1)
                break
    return text


def mistype(text: str, rng: Random) -> str:
    """One typing mistake in a word of four letters or more: dropped, doubled, swapped or missed."""
    words = text.split(" ")
    long_words = [i for i, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    if not long_words:
        return text
    where = rng.choice(long_words)
    word = words[where]
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        word = word[:at] + word[at + 1 :]
    elif kind == 1:
        word = word[:at] + word[at] + word[at:]
    elif kind == 2:
        word = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    else:
        word = word[:at] + rng.choice(NEIGHBOURS.get(word[at], word[at])) + word[at + 1 :]
    words[where] = word
    return " ".join(words)


def _respell_names(text: str, rng: Random) -> str:
    """`--max-num-seqs` as max-num-seqs, max_num_seqs or max num seqs; `top_p` as top p or top-p."""

    def respell(match: re.Match[str]) -> str:
        words = re.split("[-_]", match[1] or match[2])
        return rng.choice(("-", "_", " ", "-")).join(words)

    return _FLAG.sub(respell, text)


def _drop_fillers(text: str, rng: Random) -> str:
    words = text.split(" ")
    kept = [word for word in words if word.lower() not in FILLERS or rng.random() < 0.4]
    return " ".join(kept if len(kept) >= 2 else words)


def _recase(text: str, rng: Random) -> str:
    draw = rng.random()
    if draw < 0.45:
        return text.lower()
    if draw < 0.7:
        return text[:1].upper() + text[1:]
    if draw < 0.73:
        return text.upper()
    return text


class Keywords:
    """Knows which words tell the questions of the manual apart, and makes questions of them.

    What a question is about hangs on few words. Questions that keep those and lose the others,
    and questions that keep the others and lose those, teach the model which is which.
    """

    def __init__(self, phrasings_of_entries: Sequence[Sequence[str]]) -> None:
        sets = [set(_words(" ".join(phrasings))) for phrasings in phrasings_of_entries]
        counts = Counter(word for words in sets for word in sorted(words))
        self._telling = {word for word, count in counts.items() if count <= 4}

    def is_telling(self, word: str) -> bool:
        return word.lower().strip("?.,!:`") in self._telling

    def thin(self, text: str, rng: Random) -> str:
        """Lose most of the words that could stand in any question."""
        kept = [w for w in text.split() if rng.random() < (0.95 if self.is_telling(w) else 0.45)]
        return " ".join(kept) if any(self.is_telling(word) for word in kept) else text

    def from_answer(self, answer: str, rng: Random) -> str:
        """A few words of the answer in their order, as one who half remembers it would ask."""
        words = [word.strip(".,:;()") for word in answer.split()]
        length = rng.randint(3, 7)
        first = rng.randrange(max(1, len(words) - length))
        return " ".join([*rng.choice(STEMS), *words[first : first + length]])

    def estrange(self, text: str, strangers: Sequence[str], rng: Random) -> str:
        """A question of the manual with every telling word replaced: nobody can answer it."""
        return " ".join(
            rng.choice(strangers) if self.is_telling(word) else word for word in text.split()
        )


def _words(text: str) -> list[str]:
    return [word.lower().strip("?.,!:`") for word in text.split()]


def vary(question: str, rng: Random) -> str:
    """The question as another user might type it; often just as it stands."""
    text = question.rstrip("?.! ")
    is_short = len(text.split()) < 3
    if rng.random() < 0.55:
        text = reword(text, rng)
    if rng.random() < 0.25:
        text = _respell_names(text, rng)
    if not is_short and rng.random() < 0.12:
        text = _drop_fillers(text, rng)
    if rng.random() < 0.15:
        text = re.sub(r"\bllmc\b(?! (?:chat|serve|bench))", rng.choice(("LLMC", "Llmc")), text)
    if not is_short and rng.random() < 0.25:
        text = f"{rng.choice(PREFIXES)} {text}"
    if not is_short and rng.random() < 0.15:
        text = f"{text} {rng.choice(SUFFIXES)}"
    if rng.random() < 0.1:
        text = mistype(text, rng)
    return _recase(text, rng) + rng.choice(("", "", "?", "?", "?", ".", "!", " ?"))
