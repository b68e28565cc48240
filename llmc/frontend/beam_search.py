"""`LLM.beam_search`: submits prompts and drives the engine until every search has ended.

The engine does the search (engine/beam_search.py); this file handles prompts, text and errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from llmc.engine.beam_search import BeamSearch, Hypothesis
from llmc.engine.messages import AddRequest
from llmc.errors import InvalidRequestError
from llmc.frontend.engine_options import Engine
from llmc.frontend.inputs import Input, InputProcessor, Prompt
from llmc.frontend.interrupts import uninterrupted
from llmc.frontend.progress import GenerationProgress
from llmc.outputs import BeamSearchOutput, BeamSearchSequence
from llmc.sampling_params import BeamSearchParams, SamplingParams
from llmc.text.tokenizer import Tokenizer


class SearchingEngine(Engine, Protocol):
    """The part of `engine.core.EngineCore` that beam search uses; in-process only."""

    def search(self, message: AddRequest, params: BeamSearchParams, /) -> BeamSearch: ...


def run_searches(
    engine: SearchingEngine,
    inputs: InputProcessor,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    ids: Iterator[int],
    progress: bool,
) -> list[BeamSearchOutput]:
    """One output for each prompt. InvalidRequestError if none can be served."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
    )
    searches: list[tuple[Input, BeamSearch] | InvalidRequestError] = []
    running: list[BeamSearch] = []
    try:
        for prompt in prompts:
            try:
                source = inputs.process(prompt, sampling)
                message = AddRequest(
                    request_id=str(next(ids)),
                    prompt_token_ids=source.prompt_token_ids,
                    sampling=source.sampling,
                    cache_salt=source.cache_salt,
                    adapter=source.adapter,
                    images=source.images,
                )
                with uninterrupted():
                    running.append(engine.search(message, params))
                searches.append((source, running[-1]))
            except InvalidRequestError as error:
                searches.append(error)
        errors = [one for one in searches if isinstance(one, InvalidRequestError)]
        if errors and len(errors) == len(searches):
            raise errors[0]
        _drive(engine, running, progress)
    except BaseException:  # above all Ctrl-C: leave the engine in a usable state
        with uninterrupted():
            for search in running:
                engine.abort(search.request_id)
        raise
    return [
        BeamSearchOutput(sequences=[], error=str(one))
        if isinstance(one, InvalidRequestError)
        else _output(*one, inputs.tokenizer)
        for one in searches
    ]


def _drive(engine: Engine, searches: Sequence[BeamSearch], progress: bool) -> None:
    num_before = engine.stats().num_generated_tokens
    with (
        GenerationProgress(len(searches), enabled=progress) as bar,
        uninterrupted() as check_interrupts,
    ):
        while not all(search.is_over for search in searches):
            engine.step()
            num_tokens = engine.stats().num_generated_tokens - num_before
            bar.update(sum(search.is_over for search in searches), num_tokens)
            check_interrupts()
        while engine.has_work:  # steps that were submitted ahead
            engine.step()
            check_interrupts()


def _output(source: Input, search: BeamSearch, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    def sequence(found: Hypothesis) -> BeamSearchSequence:
        tokens = [*source.prompt_token_ids, *found.token_ids]
        return BeamSearchSequence(
            tokens=tokens,
            text=tokenizer.decode(tokens) if tokenizer is not None else None,
            cum_logprob=found.cum_logprob,
            finish_reason=found.finish_reason,
        )

    return BeamSearchOutput(
        sequences=[] if search.error else [sequence(found) for found in search.finished],
        prompt=source.prompt,
        prompt_token_ids=source.prompt_token_ids,
        num_cached_tokens=search.num_cached_tokens,
        error=search.error,
    )
