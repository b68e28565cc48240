"""GrammarStarter: creates matchers for the engine outside its thread.

    begin(spec) --cached grammar--> a copy at once
                --new one---------> a thread: reads the tokenizer (once), compiles --> later

The library and the tokenizer are loaded when the first request needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import InvalidRequestError
from llmc.structured.vocabulary import Vocabulary
from llmc.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llmc.structured.grammars import Grammars, Matcher


class GrammarStarter:
    """Starts matchers for one model. `tokenizer_path` None: it has no tokenizer, so that fails."""

    def __init__(
        self, tokenizer_path: Path | None, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmc-grammar")

    def begin(self, spec: StructuredOutputsParams) -> Future[Matcher]:
        """A matcher at the start of an output; done at once for a cached grammar."""
        kept = None if self._grammars is None else self._grammars.copy_kept(spec)
        if kept is None:
            return self._thread.submit(self._start, spec)
        started: Future[Matcher] = Future()
        started.set_result(kept)
        return started

    def _start(self, spec: StructuredOutputsParams) -> Matcher:
        if self._grammars is None:
            from llmc.text.tokenizer import Tokenizer

            tokenizer = None if self._path is None else Tokenizer.load(self._path)
            self._grammars = load_grammars(
                Vocabulary.of(
                    tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                )
            )
        return self._grammars.start(spec)


def load_grammars(vocabulary: Vocabulary) -> Grammars:
    """`Grammars.load`. InvalidRequestError if the library is not installed."""
    try:
        from llmc.structured.grammars import Grammars
    except ImportError as error:
        raise InvalidRequestError(
            f"structured outputs need the package llguidance ({error}); install it in the "
            "server's environment",
            param="structured_outputs",
        ) from error
    return Grammars.load(vocabulary)
