r"""PromptLookup: guesses what comes next from where the last tokens stood before.

    tokens   ... the cat sat on the mat . then the cat | sat on the
                 \_____/                       \_____/   \________/
                 found                     looked up     guessed

Text that repeats itself or its prompt (code edits, quotes, summaries) is guessed well.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_INDEXED = 512  # tokens a call: a long prompt is taken in over several steps


class PromptLookup:
    """An index over a list of tokens that only grows, brought up to date when asked.

    Each token costs one entry for each length from `shortest` to `longest`, about 100 bytes each.
    """

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._num_indexed = 0
        # length -> those tokens -> what follows them the last time; longest first
        self._tables: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (length, {}) for length in range(longest, shortest - 1, -1)
        ]

    def find(self) -> int | None:
        """Where the text goes on that ended as it does now: the longest such end, its latest."""
        tokens = self._tokens
        if not self._catch_up():
            return None
        for length, table in self._tables:
            place = table.get(tuple(tokens[-length:]))
            if place is not None:
                return place
        return None

    def is_ready(self) -> bool:
        return self.find() is not None

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next. What runs into the end goes round."""
        place = self.find()
        if place is None:
            return []
        guess = list(self._tokens[place : place + most])
        period = len(self._tokens) - place
        while len(guess) < most:
            guess.append(guess[-period])
        return guess

    def _catch_up(self) -> bool:
        """Take in what can be looked up: all but the end itself, which nothing follows yet."""
        tokens = self._tokens
        num_known = len(tokens) - 1
        last = min(num_known, self._num_indexed + MAX_INDEXED)
        for place in range(self._num_indexed + 1, last + 1):
            for length, table in self._tables:
                if place >= length:
                    table[tuple(tokens[place - length : place])] = place
        self._num_indexed = last
        return last == num_known
