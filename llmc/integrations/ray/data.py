"""Offline batches in Ray Data: `Dataset.map_batches(LLMPredictor, ...)`, an engine in each worker.

    batch {column: array} -> rows not in the checkpoint -> LLM -> checkpoint -> batch, more columns

If a worker dies, Ray Data retries its batch on another one, so every row has one answer in the
result. The checkpoint keeps answers across runs of the job.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from llmc.errors import ConfigError, InvalidRequestError
from llmc.frontend.engine_options import EngineOptions, make_config
from llmc.llm import LLM
from llmc.outputs import RequestOutput
from llmc.sampling_params import SamplingParams

# Options that change answers. A run with other changed options can continue from a checkpoint.
_OF_ANSWERS = (
    *("revision", "tokenizer", "chat_template", "chat_template_kwargs", "dtype", "quantization"),
    *("seed", "override_generation_config", "hf_overrides"),
)


class Answer(TypedDict):
    """The columns added to a row. `error` is "" on success; otherwise the others are empty."""

    generated_text: str
    finish_reason: str
    num_prompt_tokens: int
    num_generated_tokens: int
    error: str


class LLMPredictor:
    """Answers the prompts of a batch, in new columns (the fields of `Answer`).

        ds.map_batches(
            LLMPredictor,
            fn_constructor_kwargs={"model": "path", "sampling_params": {"max_tokens": 32}},
            batch_size=512, concurrency=2, num_cpus=8,
        )

    `column` has texts, lists of token ids, or chats (lists of messages). Without `sampling_params`
    the model's defaults apply, as in `LLM`, whose options are accepted too. For a prompt that can't
    be served, `error` has the reason; the others are answered.

    With `checkpoint_dir`, a folder that all workers can access, rows answered by an earlier run are
    not computed again. `id_column` then identifies rows: each id is one row of the data set. A row
    whose prompt has changed is computed again, and so are all rows after a change of the model, of
    `sampling_params` or of options that change answers.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        column: str = "prompt",
        id_column: str | None = None,
        checkpoint_dir: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = make_config(model, options)
        self._params = None if sampling_params is None else SamplingParams(**sampling_params)
        if self._params is not None and self._params.n != 1:
            raise ConfigError(f"n must be 1, got {self._params.n}: a row has one answer")
        self._column = column
        self._id_column = id_column
        self._checkpoint: Checkpoint | None = None
        if checkpoint_dir is not None:
            if id_column is None:
                raise ConfigError("checkpoint_dir needs id_column: a column that identifies rows")
            made_by = [model, sampling_params, *(getattr(config, name) for name in _OF_ANSWERS)]
            self._checkpoint = Checkpoint(Path(checkpoint_dir), json.dumps(made_by, default=repr))
        self._llm = LLM(model, **options)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        prompts = [_plain(value) for value in self._values(batch, self._column)]
        if self._checkpoint is None or self._id_column is None:
            answers = self._answer(prompts)
        else:
            ids = [_plain(value) for value in self._values(batch, self._id_column)]
            answers = self._unless_known(self._checkpoint, ids, prompts)
        names = Answer.__annotations__
        return {**batch, **{name: [answer[name] for answer in answers] for name in names}}  # type: ignore[literal-required]

    @staticmethod
    def _values(batch: Mapping[str, Any], column: str) -> Any:
        if column not in batch:
            raise ConfigError(f"there is no column {column!r}; columns are {', '.join(batch)}")
        return batch[column]

    def _unless_known(
        self, checkpoint: Checkpoint, ids: Sequence[Any], prompts: Sequence[Any]
    ) -> list[Answer]:
        keys = [checkpoint.key(*pair) for pair in zip(ids, prompts, strict=True)]
        known = {key: checkpoint.get(key) for key in keys}
        missing = {k: p for k, p in zip(keys, prompts, strict=True) if known[k] is None}
        made = dict(zip(missing, self._answer(list(missing.values())), strict=True))
        checkpoint.add(made)
        return [known[key] or made[key] for key in keys]

    def _answer(self, prompts: Sequence[Any]) -> list[Answer]:
        chats = [prompt for prompt in prompts if _is_chat(prompt)]
        others = [prompt for prompt in prompts if not _is_chat(prompt)]
        of_chats = iter(self._ask(self._llm.chat, chats))
        of_others = iter(self._ask(self._llm.generate, others))
        return [next(of_chats if _is_chat(prompt) else of_others) for prompt in prompts]

    def _ask(self, ask: Callable[..., list[RequestOutput]], prompts: Sequence[Any]) -> list[Answer]:
        if not prompts:
            return []
        try:
            outputs = ask(prompts, self._params, progress=False)
        except InvalidRequestError as error:  # one invalid prompt fails the whole call
            if len(prompts) == 1:
                return [_refused(str(error))]
            return [self._ask(ask, [prompt])[0] for prompt in prompts]
        return [_answer_of(output) for output in outputs]


class Checkpoint:
    """Answers by key, as lines of JSON: one file per worker and run, appended batch by batch.

    Read once, when the worker starts. In memory a row takes about 200 bytes, whatever its answer.
    """

    def __init__(self, folder: Path, made_by: str) -> None:
        self._folder = folder
        self._made_by = made_by
        self._own = folder / f"{uuid.uuid4().hex}.jsonl"
        self._writing = threading.Lock()  # a worker may process several batches concurrently
        self._places: dict[bytes, tuple[Path, int]] = {}  # digest -> file, offset of its line
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.jsonl")):
            for offset, key, _ in _lines(path):
                self._places[bytes.fromhex(key)] = (path, offset)

    def key(self, row_id: Any, prompt: Any) -> str:
        text = json.dumps([self._made_by, row_id, prompt], default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: str) -> Answer | None:
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        path, offset = place
        _, _, answer = next(_lines(path, offset))
        return answer

    def add(self, answers: Mapping[str, Answer]) -> None:
        """Append answers; they are on disk when this returns."""
        if not answers:
            return
        with self._writing, self._own.open("ab") as file:
            for key, answer in answers.items():
                self._places[bytes.fromhex(key)] = (self._own, file.tell())
                file.write(json.dumps({"key": key, "answer": answer}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[int, str, Answer]]:
    """(offset, key, answer) of each complete line. A killed worker may have left a partial line at
    the end."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n"):
                try:
                    row = json.loads(line)
                    yield offset, row["key"], row["answer"]
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(
                        f"{path}, at byte {offset}: this is not a line of a checkpoint; use a "
                        "separate folder for checkpoint_dir"
                    ) from None
            offset += len(line)


def _plain(value: Any) -> Any:
    """A column's value without numpy types, and without keys that Arrow filled in."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _refused(why: str) -> Answer:
    return Answer(
        generated_text="", finish_reason="", num_prompt_tokens=0, num_generated_tokens=0, error=why
    )


def _answer_of(output: RequestOutput) -> Answer:
    if output.error is not None:
        return _refused(output.error)
    [answer] = output.outputs
    return Answer(
        generated_text=answer.text,
        finish_reason=answer.finish_reason or "",
        num_prompt_tokens=len(output.prompt_token_ids or ()),
        num_generated_tokens=len(answer.token_ids),
        error="",
    )
