"""Rows on the default model: its step with and without passes, compilation, kernels, formats of
weights and caches; whole requests; grammars, beams and a draft model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from bench.ablations.row import Figures, Row, computed, in_turn
from bench.ablations.subject import SMALL, Bench, Served, Subject, add, serve
from bench.clock import time_call
from bench.kernel_work import attention_case
from bench.rewrite_gguf import rewrite
from llmc.engine.plan import StepPlan
from llmc.kernels.cpu.pages import HugePages
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.process_logits import process_logits
from llmc.kernels.registry import Impl, Op
from llmc.kernels.sample import sample
from llmc.runner import model_runner
from llmc.runner.delta import Delta, encode
from llmc.sampling_params import BeamSearchParams, SamplingParams
from llmc.startup.default_model import default_model
from llmc.structured_outputs import StructuredOutputsParams
from llmc.text.detokenizer import IncrementalDecoder

PASSES = ("merge_linears", "share_rotary", "fuse_norms", "fuse_act_mul", "fuse_rope_write")
ANSWER_TOKENS = 64
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 100}  # longer than any answer
Start = Callable[[Bench], Subject]


@contextmanager
def references_only() -> Iterator[None]:
    """Inside this context, steps are bound to the references of all ops."""
    with mock.patch.object(Op, "best", lambda self, args, **options: None):
        yield


def _answer(subject: Subject, prompt: Sequence[int], length: int) -> tuple[float, float]:
    """(ms to the first token, median ms between tokens) of one request."""
    engine, served = subject.engine(), Served(sent_s=time.perf_counter())
    serve(engine, {add(engine, prompt, length): served})
    return served.ttft_s * 1e3, statistics.median(served.gaps_s) * 1e3


def _between_tokens(on: Start, off: Start) -> Callable[[Bench], Figures]:
    """Two ways to run the default model: the time between tokens, and in the note that before the
    first."""

    def measure(bench: Bench) -> Figures:
        subjects = {True: on(bench), False: off(bench)}
        length = bench.size(ANSWER_TOKENS, 8)
        prompt = bench.small.prompt(bench.size(256, 32))
        first_ms: dict[bool, list[float]] = {True: [], False: []}

        def run(is_on: bool) -> float:
            first, gap = _answer(subjects[is_on], prompt, length)
            first_ms[is_on].append(first)
            return gap

        figures = in_turn(lambda: run(True), lambda: run(False), bench.rounds)
        with_ms, without_ms = (statistics.median(first_ms[is_on]) for is_on in (True, False))
        note = (
            f"one request, {length} tokens; first token of a prompt of {len(prompt)} after "
            f"{with_ms:.0f} ms with and {without_ms:.0f} ms without"
        )
        return replace(figures, note=note)

    return measure


def _small(bench: Bench) -> Subject:
    return bench.small


def _without_pass(name: str) -> Start:
    return lambda bench: bench.variant(f"without {name}", passes={name: False})


def _bare(bench: Bench) -> Subject:
    return bench.variant("no optional passes", passes=dict.fromkeys(PASSES, False))


def _compiled(bench: Bench) -> Subject:
    return bench.variant("-O2", opt_level=2)


def _uncompiled(bench: Bench) -> Subject:
    return bench.variant("-O0", opt_level=0)


def _on_references(bench: Bench) -> Subject:
    with references_only():
        return bench.variant("references")


def _in_small_pages(bench: Bench) -> Subject:
    def empty(self: HugePages, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    with mock.patch.object(HugePages, "empty", empty):
        return bench.variant("small pages")


def _bfloat16(bench: Bench) -> Subject:
    source = default_model()
    path = bench.folder() / "bfloat16.gguf"
    rewrite(source.path, path, GGMLQuantizationType.BF16)
    return bench.variant("bfloat16 weights", model=str(path))


def _narrow_cache(dtype: str, bench: Bench) -> Figures:
    """Steps of many rows with long contexts, which read more of the cache than of the weights."""
    rows, length = bench.size(8, 2), bench.size(1000, 64)
    subjects = {True: bench.variant(f"{dtype} cache", kv_cache_dtype=dtype), False: bench.small}
    prompts = [bench.small.prompt(length) for _ in range(rows)]
    tokens = bench.size(32, 4)

    def run(is_on: bool) -> float:
        engine = subjects[is_on].engine()
        served = {}
        for prompt in prompts:
            served[add(engine, prompt, tokens)] = Served(sent_s=time.perf_counter())
        serve(engine, served)
        return statistics.median(gap for one in served.values() for gap in one.gaps_s) * 1e3

    room = {k: s.started.info.num_blocks * s.started.info.block_size for k, s in subjects.items()}
    note = (
        f"{rows} rows of {length} tokens; the same memory holds {room[True]} tokens and "
        f"{room[False]}"
    )
    return in_turn(lambda: run(True), lambda: run(False), bench.rounds, note=note)


def _grammar(bench: Bench) -> Figures:
    llm, rows = bench.llm(bench.small), bench.size(8, 2)
    tokens = bench.size(ANSWER_TOKENS, 8)
    prompts = [f"Write a list of {i + 3} animals." for i in range(rows)]

    def run(is_on: bool) -> float:
        rules = StructuredOutputsParams(json=SCHEMA) if is_on else None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=not is_on,
            structured_outputs=rules,
        )
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - start
        assert all(len(one.outputs[0].token_ids) == tokens for one in outputs)
        return seconds / tokens * 1e3

    note = f"{rows} rows, arrays of strings; the grammar is compiled once"
    return in_turn(lambda: run(True), lambda: run(False), bench.rounds, note=note)


def _beams(bench: Bench) -> Figures:
    llm, width = bench.llm(bench.small), 4
    tokens = bench.size(ANSWER_TOKENS, 8)
    prompt = "The capital of France is"

    def search() -> float:
        params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.beam_search(prompt, params, progress=False)
        return (time.perf_counter() - start) / tokens * 1e3

    def draw() -> float:
        params = SamplingParams(temperature=1.0, n=width, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompt, params, progress=False)
        return (time.perf_counter() - start) / tokens * 1e3

    note = f"one prompt, {tokens} tokens"
    return in_turn(search, draw, bench.rounds, note=note)


@contextmanager
def decoding_everything() -> Iterator[None]:
    """Inside this context, each new token decodes the whole answer again."""

    def push(self: Any, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        shown = getattr(self, "shown", "")
        if text.endswith("\ufffd"):
            return ""
        self.shown = text
        return text[len(shown) :]

    def flush(self: Any) -> str:
        return ""

    with mock.patch.multiple(IncrementalDecoder, push=push, flush=flush):
        yield


@contextmanager
def sampling_by_rows() -> Iterator[None]:
    """Inside this context, steps are bound to the references of the sampler, row by row."""

    def by_rows(op: Op, num_columns: int) -> Impl:
        """`num_columns`: the first arguments have a row for each sample, the others are tables."""

        def run(*args: Any) -> Tensor:
            columns, tables = args[:num_columns], args[num_columns:]
            rows = [
                op.reference(*(column[i : i + 1] for column in columns), *tables)
                for i in range(len(columns[0]))
            ]
            return torch.cat(rows) if rows else op.shape(**op.bind(args))

        namespace = f"llmc_by_rows_{op.name}"
        if not hasattr(getattr(torch.ops, namespace), op.name):
            op.declare(namespace, run)
        overload = getattr(getattr(torch.ops, namespace), op.name).default
        return Impl(name="cpu", op=lambda: overload, available=lambda: True)

    ops = ((process_logits, 3), (sample, len(sample.defaults)))
    with ExitStack() as stack:
        for op, num_columns in ops:
            stack.enter_context(mock.patch.object(op, "impls", [by_rows(op, num_columns)]))
        yield


def _requests_per_second(bench: Bench, subject: Subject) -> float:
    """Chats of natural length through the Python API, sampled as users do."""
    llm, count = bench.llm(subject), bench.size(32, 4)
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        repetition_penalty=1.1,
        seed=0,
        max_tokens=bench.size(192, 8),
        ignore_eos=True,
    )
    prompts = [f"Tell a story about {i + 2} travellers and what they found." for i in range(count)]
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return count / (time.perf_counter() - start)


def _detokenizer(bench: Bench) -> Figures:
    def naive() -> float:
        with decoding_everything():
            return _requests_per_second(bench, bench.small)

    note = f"{bench.size(32, 4)} requests at once, {bench.size(192, 8)} tokens each"
    return in_turn(lambda: _requests_per_second(bench, bench.small), naive, bench.rounds, note=note)


def _sampler(bench: Bench) -> Figures:
    with sampling_by_rows():
        slow = bench.variant("sampling row by row")
    note = f"{bench.size(32, 4)} requests at once, {bench.size(192, 8)} tokens each"
    return in_turn(
        lambda: _requests_per_second(bench, bench.small),
        lambda: _requests_per_second(bench, slow),
        bench.rounds,
        note=note,
    )


def _draft_model(bench: Bench) -> Figures:
    """The default model drafted by itself in int8: most draft tokens are accepted."""
    draft = {"method": "draft_model", "model": default_model().name, "quantization": "int8"}
    subject = bench.variant("draft model", speculative_config=draft, async_scheduling=False)
    speculation = subject.started.engine._features.speculation
    prompt, tokens = subject.prompt(64), bench.size(ANSWER_TOKENS, 16)
    seen: dict[bool, Any] = {}

    def run(is_on: bool) -> float:
        engine = subject.engine(speculation=speculation if is_on else None)
        start = time.perf_counter()
        add(engine, prompt, tokens)
        serve(engine)
        seen[is_on] = engine.stats()
        return tokens / (time.perf_counter() - start)

    figures = in_turn(lambda: run(True), lambda: run(False), bench.rounds)
    stats = seen[True]
    note = (
        f"one request, {stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens "
        f"accepted, {stats.num_steps} steps against {seen[False].num_steps}"
    )
    return replace(figures, note=note)


def _delta(bench: Bench) -> Figures:
    """Bytes that the host sends to decode one token of every row, against the rows' tables."""
    subject, rows = bench.small, bench.size(16, 2)
    prompts = [subject.prompt(bench.size(256, 32)) for _ in range(rows)]
    sent: list[int] = []

    def counted(tables: Any, plan: StepPlan, *options: Any, **named: Any) -> Delta:
        delta = encode(tables, plan, *options, **named)
        if all(work.num_tokens == 1 for work in plan.work):
            sent.append(delta.words.nbytes)
        return delta

    with mock.patch.object(model_runner, "encode", counted):
        engine = subject.engine()
        for prompt in prompts:
            add(engine, prompt, bench.size(ANSWER_TOKENS, 8))
        serve(engine)
    tables = subject.started.runner.rows.tables
    whole = rows * sum(table[0].nbytes for table in tables.values())
    note = f"{rows} rows, {len(sent)} decode steps"
    return computed(statistics.mean(sent), whole, note)


def _paged_kernel(bench: Bench) -> Figures:
    """Decode attention: keys and values in blocks, against the same in one piece per request."""
    rows, length = bench.size(8, 2), bench.size(1024, 64)
    heads, kv_heads, width = 9, 3, 64
    cpu = torch.device("cpu")
    case = attention_case([(1, length)] * rows, heads, kv_heads, width, torch.float32, cpu)
    query = torch.randn(rows, heads, 1, width)
    keys, values = torch.randn(2, rows, kv_heads, length, width).unbind()

    def paged() -> Tensor:
        out: Tensor = paged_attention.run(*case)
        return out

    def contiguous() -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def us(run: Callable[[], Tensor]) -> float:
        return time_call(run, cpu, budget_s=0.2).seconds * 1e6

    note = f"{rows} rows of {length} tokens, {heads} heads, {kv_heads} KV heads of {width}, float32"
    return in_turn(lambda: us(paged), lambda: us(contiguous), bench.rounds, note=note)


def _token_row(name: str, what: str, on: str, off: str, start_on: Start, start_off: Start) -> Row:
    """A row of the default model that compares the time between tokens of two ways to start it."""
    return Row(
        name=name,
        what=what,
        on=on,
        off=off,
        unit="ms a token",
        model=SMALL,
        measure=_between_tokens(start_on, start_off),
    )


def _pass_row(name: str) -> Row:
    off = f"`--disable-pass {name}`"
    return _token_row(f"pass-{name}", f"`{name}`", "with", off, _small, _without_pass(name))


ROWS = (
    Row(
        name="requests-detokenizer",
        what="incremental detokenization, end to end",
        on="a short window decoded for each token",
        off="the whole answer decoded for each token",
        unit="requests/s",
        model=SMALL,
        better="higher",
        measure=_detokenizer,
    ),
    Row(
        name="requests-sampler",
        what="vectorized sampler, end to end",
        on="all rows in one op",
        off="plain torch, row by row",
        unit="requests/s",
        model=SMALL,
        better="higher",
        measure=_sampler,
    ),
    *(_pass_row(name) for name in PASSES),
    _token_row("passes", "all of these passes", "with", "without", _small, _bare),
    _token_row("opt-level", "compilation with Inductor", "`-O2`", "`-O0`", _compiled, _uncompiled),
    _token_row(
        "kernels", "C++ ops", "with", "their references in plain torch", _small, _on_references
    ),
    _token_row("huge-pages", "weights in huge pages", "with", "without", _small, _in_small_pages),
    _token_row("low-bits", "weights of 4 bits", "Q4_1", "BF16", _small, _bfloat16),
    *(
        Row(
            name=f"{dtype.partition('_')[0]}-cache",
            what="8-bit KV cache",
            on=dtype,
            off="the default",
            unit="ms a step",
            model=SMALL,
            measure=partial(_narrow_cache, dtype),
        )
        for dtype in ("fp8_e4m3", "int8")
    ),
    Row(
        name="paged-kernel",
        what="paged attention",
        on="our op, keys and values in blocks",
        off="torch's attention, in one piece",
        unit="us a layer",
        model="none",
        measure=_paged_kernel,
    ),
    Row(
        name="delta",
        what="deltas of the rows' tables",
        on="what changed",
        off="the whole rows",
        unit="bytes a step",
        model=SMALL,
        measure=_delta,
    ),
    Row(
        name="draft-model",
        what="a draft model as large as the model, in int8",
        on="with",
        off="without",
        unit="tokens/s",
        model=SMALL,
        better="higher",
        measure=_draft_model,
    ),
    Row(
        name="grammar",
        what="a JSON schema",
        on="with",
        off="without",
        unit="ms a step",
        model=SMALL,
        measure=_grammar,
    ),
    Row(
        name="beams",
        what="beam search, against as many samples",
        on="4 beams",
        off="n=4",
        unit="ms a step",
        model=SMALL,
        measure=_beams,
    ),
)
