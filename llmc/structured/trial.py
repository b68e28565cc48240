"""Tries users' grammars in a separate process first, with limits on time and memory.

    server --spec--> Trial ==pipe==> `python -P -m llmc.structured.trial` : compiles, fills a mask
           <-accepted, or InvalidRequestError--

The vocabulary is sent to the process, because reading a model's tokenizer would import torch.

A grammar that crashes native code, hangs or uses too much memory only takes down that process, and
is refused; the next trial starts another. Results are cached, those of grammars that took too long
for a while.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

from llmc.errors import InvalidRequestError, LlmcError
from llmc.resource_limits import limit_resources
from llmc.structured.vocabulary import Vocabulary
from llmc.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llmc.text.tokenizer import Tokenizer

TIME_LIMIT = 2.0  # seconds for one grammar
RETRY_AFTER = 30.0  # seconds after which a grammar that took too long may be tried again
_START_LIMIT = 60.0  # seconds to import and to read the tokenizer
_MAX_BYTES = 8 * 2**30  # of address space
_MAX_KEPT = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    problem: str | None  # None: the grammar is accepted
    expires: float = math.inf  # on the monotonic clock


class Trial:
    """Decides whether a grammar can be sent to the engine. Thread-safe; one grammar is tried at a
    time."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        time_limit: float = TIME_LIMIT,
        retry_after: float = RETRY_AFTER,
    ) -> None:
        """`vocabulary` is called by the first check, which raises its errors."""
        self._vocabulary = vocabulary
        self._time_limit = time_limit
        self._retry_after = retry_after
        self._lock = threading.Lock()  # held during a trial
        self._process: subprocess.Popen[str] | None = None
        self._verdicts_lock = threading.Lock()
        self._verdicts: OrderedDict[tuple[str, str, str], _Verdict] = OrderedDict()

    @classmethod
    def for_model(
        cls, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Trial:
        """The trial of a model's grammars. Its process is started by the first check."""
        return cls(
            partial(Vocabulary.of, tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        )

    def check(self, spec: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError if a grammar is invalid, too costly, or crashes the process."""
        with self._lock:
            if not self.is_accepted(spec):
                verdict = self._try(spec)
                self._keep(spec, verdict)
                _raise_if_refused(spec, verdict)

    def is_accepted(self, spec: StructuredOutputsParams) -> bool:
        """Whether a grammar is known to be accepted; one that is known to be refused raises as
        `check` does. Waits for no trial."""
        with self._verdicts_lock:
            verdict = self._verdicts.get(_key(spec))
            if verdict is None or verdict.expires <= time.monotonic():
                return False
            self._verdicts.move_to_end(_key(spec))
        _raise_if_refused(spec, verdict)
        return True

    def _keep(self, spec: StructuredOutputsParams, verdict: _Verdict) -> None:
        with self._verdicts_lock:
            self._verdicts[_key(spec)] = verdict
            if len(self._verdicts) > _MAX_KEPT:
                self._verdicts.popitem(last=False)

    def close(self) -> None:
        """End the process. The next check starts another."""
        with self._lock:
            self._stop()

    def _try(self, spec: StructuredOutputsParams) -> _Verdict:
        process = self._started()
        try:
            asked = {"kind": spec.kind, "text": spec.text, "preamble": spec.preamble}
            _send(process, asked)
            answer = _receive(process, self._time_limit)
        except TimeoutError:
            self._stop()
            return _Verdict(
                problem=f"structured_outputs.{spec.kind} took more than {self._time_limit:g} s to "
                "compile; make it smaller",
                expires=time.monotonic() + self._retry_after,  # the machine may have been busy
            )
        except (OSError, EOFError):
            self._stop()
            answer = f"structured_outputs.{spec.kind} can't be compiled: it crashed the compiler"
        return _Verdict(problem=answer)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        vocabulary = self._vocabulary()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmc.structured.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            _send(self._process, dataclasses.asdict(vocabulary))
            problem = _receive(self._process, _START_LIMIT)
        except (OSError, EOFError, TimeoutError) as error:
            self._stop()
            raise LlmcError(
                f"the process that tries grammars did not start ({type(error).__name__}); "
                "structured outputs are not available"
            ) from error
        if problem is not None:
            self._stop()
            raise InvalidRequestError(problem, param="structured_outputs")
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def _key(spec: StructuredOutputsParams) -> tuple[str, str, str]:
    return spec.kind, spec.text, spec.preamble


def _raise_if_refused(spec: StructuredOutputsParams, verdict: _Verdict) -> None:
    if verdict.problem is not None:
        raise InvalidRequestError(verdict.problem, param=f"structured_outputs.{spec.kind}")


def _send(process: subprocess.Popen[str], message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _receive(process: subprocess.Popen[str], limit: float) -> str | None:
    """The process's answer. Each message is one line, so that a ready pipe has a complete one."""
    from multiprocessing.connection import wait  # unlike select(), for descriptors above 1023 too

    assert process.stdout is not None
    if not wait([process.stdout.fileno()], limit):
        raise TimeoutError
    line = process.stdout.readline()
    if not line:
        raise EOFError
    answer: str | None = json.loads(line)
    return answer


# Inside the process


def _main(requests: IO[str], answers: IO[str]) -> None:
    limit_resources(AS=_MAX_BYTES, CORE=0)
    from llmc.structured.begin import load_grammars

    def answer(problem: str | None) -> None:
        answers.write(json.dumps(problem) + "\n")
        answers.flush()

    vocabulary = Vocabulary(**json.loads(requests.readline()))
    try:
        grammars = load_grammars(vocabulary)
    except LlmcError as error:
        answer(str(error))
        return
    answer(None)
    for line in requests:
        given = json.loads(line)
        try:
            spec = _spec(given["kind"], given["text"])
            grammars.start(dataclasses.replace(spec, preamble=given["preamble"]))
        except LlmcError as error:
            answer(str(error))
        else:
            answer(None)


def _spec(kind: str, text: str) -> StructuredOutputsParams:
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "choice":
        return StructuredOutputsParams(choice=json.loads(text))
    if kind == "json":
        return StructuredOutputsParams(json=text, additional_properties=True)  # unchanged
    return (
        StructuredOutputsParams(regex=text)
        if kind == "regex"
        else StructuredOutputsParams(grammar=text)
    )


if __name__ == "__main__":
    _main(sys.stdin, sys.stdout)
