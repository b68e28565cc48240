r"""N-gram speculation: proposes what followed an earlier occurrence of the last tokens.

    tokens   ... the cat sat on the mat . then the cat | sat on the
                 \_____/                       \_____/   \________/
                 found                     looked up    draft tokens

Looks within the same request only. Works for output that repeats itself or its prompt: code edits,
quotes, summaries.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.engine.request import Request
from llmc.engine.spec_decode.speculation import Drafter, Speculation

MAX_INDEXED = 512  # tokens per call: a long prompt is indexed over several steps


class NgramSpeculation(Speculation):
    """N-gram speculation with one index per request."""

    def drafter(self, request: Request) -> Drafter:
        return NgramDrafter(self, NgramIndex(request.token_ids, *self.config.lengths))


class NgramDrafter(Drafter):
    def __init__(self, speculation: Speculation, index: NgramIndex) -> None:
        super().__init__(speculation)
        self._index = index

    def expects_draft(self, request: Request) -> bool:
        return self._index.find() is not None

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return self._index.propose(most)


class NgramIndex:
    """An index over a list of tokens that only grows, updated lazily.

    Each token adds one entry, about 100 bytes, for each length from `shortest` to `longest`.
    """

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        self._tokens = tokens
        self._num_indexed = 0
        # length -> n-gram -> the position after its last occurrence; longest first
        self._tables: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (length, {}) for length in range(longest, shortest - 1, -1)
        ]

    def find(self) -> int | None:
        """The position after the last occurrence of the longest n-gram that ends the sequence."""
        tokens = self._tokens
        if not self._update():
            return None
        for length, table in self._tables:
            place = table.get(tuple(tokens[-length:]))
            if place is not None:
                return place
        return None

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens. Past the end of the sequence they continue periodically."""
        place = self.find()
        if place is None:
            return []
        draft = list(self._tokens[place : place + most])
        period = len(self._tokens) - place
        while len(draft) < most:
            draft.append(draft[-period])
        return draft

    def _update(self) -> bool:
        """Index all n-grams but the last, which has no successor yet. -> whether it is done."""
        tokens = self._tokens
        num_known = len(tokens) - 1
        last = min(num_known, self._num_indexed + MAX_INDEXED)
        for place in range(self._num_indexed + 1, last + 1):
            for length, table in self._tables:
                if place >= length:
                    table[tuple(tokens[place - length : place])] = place
        self._num_indexed = last
        return last == num_known
