"""Rows of serving: how requests are batched. Whole engines on the same weights, alternating."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.ablations.row import Figures, Row, in_turn
from bench.ablations.subject import LARGE, SMALL, Bench, Served, Subject, add, serve, step


def _continuous(bench: Bench) -> Figures:
    """Answers of very different lengths, as in chats: every fourth is long."""
    subject, rows = bench.large, 4
    rng = random.Random(0)
    jobs = [
        (
            subject.prompt(rng.randint(8, 64)),
            bench.size(48, 12) if i % 4 == 0 else rng.randint(4, 8),
        )
        for i in range(bench.size(16, 8))
    ]
    rng.shuffle(jobs)
    tokens = sum(length for _, length in jobs)
    steps: dict[int, int] = {}

    def run(batches: Sequence[Sequence[tuple[list[int], int]]]) -> float:
        engine = subject.engine(max_num_seqs=rows)
        start = time.perf_counter()
        for batch in batches:
            for prompt, length in batch:
                add(engine, prompt, length)
            serve(engine)
        steps[len(batches)] = engine.stats().num_steps
        return tokens / (time.perf_counter() - start)

    static = [jobs[i : i + rows] for i in range(0, len(jobs), rows)]
    figures = in_turn(lambda: run([jobs]), lambda: run(static), bench.rounds, warm=False)
    note = (
        f"{len(jobs)} answers of 4 to 8 tokens, every fourth of {bench.size(48, 12)}, {rows} rows: "
        f"{steps[1]} steps against {steps[len(static)]}"
    )
    return Figures(on=figures.on, off=figures.off, note=note)


def _chunked(bench: Bench) -> Figures:
    """Gaps between the tokens of four answers while a long prompt is processed."""
    subject = bench.large
    length, chunk = bench.size(1536, 300), bench.size(128, 32)
    prompts = [subject.prompt(16) for _ in range(4)]
    long_prompt = subject.prompt(length)
    decoded = bench.size(40, 16)

    def run(budget: int) -> float:
        engine = subject.engine(max_num_batched_tokens=budget)
        served = {}
        for prompt in prompts:
            served[add(engine, prompt, decoded)] = Served(sent_s=time.perf_counter())
        while min(len(one.times_s) for one in served.values()) < 4:
            step(engine, served)
        add(engine, long_prompt, 1)
        serve(engine, served)
        gaps = sorted(gap for one in served.values() for gap in one.gaps_s)
        return gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] * 1e3

    note = f"a prompt of {length} tokens, in chunks of {chunk} or whole, beside 4 answers"
    return in_turn(lambda: run(chunk), lambda: run(2048), bench.rounds, note=note, warm=False)


def _async(bench: Bench) -> Figures:
    subject, rows = bench.small, 8
    prompts = [subject.prompt(16) for _ in range(rows)]
    length = bench.size(200, 20)

    def run(ahead: bool) -> float:
        return subject.seconds(prompts, length, async_scheduling=ahead) / length * 1e3

    note = f"{rows} rows; on a CPU the same cores plan and compute, so it is off there by default"
    return in_turn(lambda: run(True), lambda: run(False), bench.rounds, note=note)


def _prefix(shared_share: float) -> Callable[[Bench], Figures]:
    def measure(bench: Bench) -> Figures:
        subject, count = bench.large, bench.size(6, 4)
        length = bench.size(512, 128)
        shared = int(length * shared_share)
        common = subject.prompt(shared)
        prompts = [common + subject.prompt(length - shared) for _ in range(count)]

        def run(cached: bool) -> float:
            """One after another, as turns of many users arrive."""
            engine = subject.engine(enable_prefix_caching=cached)
            start = time.perf_counter()
            for prompt in prompts:
                add(engine, prompt, 1)
                serve(engine)
            return (time.perf_counter() - start) / count * 1e3

        note = f"{count} prompts of {length} tokens, {shared} of them shared; the first is cold"
        return in_turn(lambda: run(True), lambda: run(False), bench.rounds, note=note)

    return measure


def _states(bench: Bench) -> Figures:
    """The second turn of a chat: the first turn, its answer, and a new question."""
    subject, num_tokens = bench.hybrid, 32
    prompt, question = subject.prompt(bench.size(1024, 160)), subject.prompt(20)
    found: set[int] = set()
    first_ms: dict[bool, list[float]] = {True: [], False: []}

    def run(cached: bool) -> float:
        engine = subject.engine(
            enable_prefix_caching=cached,
            share_prompts=False,
            num_snapshots=subject.started.info.num_snapshots if cached else 0,
        )
        chat, sent_s = list(prompt), time.perf_counter()
        add(engine, prompt, num_tokens)
        while engine.has_work:
            chat += [token for update in engine.step() for token in update.new_token_ids]
        first_ms[cached].append((time.perf_counter() - sent_s) * 1e3)
        served = Served(sent_s=time.perf_counter())
        serve(engine, {add(engine, chat + question, 1): served})
        found.add(engine.stats().prefix_cache_hits)
        return served.ttft_s * 1e3

    figures = in_turn(lambda: run(True), lambda: run(False), bench.rounds)
    length = len(prompt) + num_tokens + len(question)
    on, off = (statistics.median(first_ms[cached]) for cached in (True, False))
    note = f"a second turn of {length} tokens, {max(found)} of them found; the first with its "
    return replace(figures, note=f"{note}{num_tokens} answered tokens took {on:.0f} and {off:.0f}")


def _swap(bench: Bench) -> Figures:
    """How long a request pauses when it is preempted by an urgent one."""
    subject = bench.large
    block, length = subject.started.info.block_size, bench.size(1024, 256)
    prompt, urgent = subject.prompt(length), subject.prompt(4 * block)
    swap = subject.swap_config()
    seen: dict[bool, str] = {}

    def run(swaps: bool) -> float:
        engine = subject.engine(
            num_blocks=length // block + 3,
            scheduling_policy="priority",
            swap_config=swap if swaps else None,
        )
        served = Served(sent_s=time.perf_counter())
        paused = {add(engine, prompt, 12, priority=1): served}
        while len(served.times_s) < 4:
            step(engine, paused)
        add(engine, urgent, 2, priority=0)
        serve(engine, paused)
        stats = engine.stats()
        seen[swaps] = f"{stats.num_preemptions} preemptions, {stats.num_swaps} swapped"
        return max(served.gaps_s) * 1e3

    figures = in_turn(lambda: run(True), lambda: run(False), bench.rounds)
    note = (
        f"a request of {length} tokens, an urgent one of {len(urgent)}: "
        f"{seen[True]}; without: {seen[False]}"
    )
    return Figures(on=figures.on, off=figures.off, note=note)


def _priority(bench: Bench) -> Figures:
    subject, rows = bench.small, 4
    crowd = [subject.prompt(16) for _ in range(bench.size(24, 8))]
    urgent = [subject.prompt(16) for _ in range(4)]
    length = bench.size(64, 12)

    def run(policy: str) -> float:
        engine = subject.engine(max_num_seqs=rows, scheduling_policy=policy)
        for prompt in crowd:
            add(engine, prompt, length, priority=1)
        served: dict[str, Served] = {}
        for prompt in urgent:
            for _ in range(length // 2):
                step(engine, served)
            sent = Served(sent_s=time.perf_counter())
            served[add(engine, prompt, length, priority=0)] = sent
        serve(engine, served)
        return statistics.median(one.ttft_s for one in served.values()) * 1e3

    note = f"4 urgent requests among {len(crowd)} others, {rows} rows"
    return in_turn(lambda: run("priority"), lambda: run("fcfs"), bench.rounds, note=note)


def _repeating(subject: Subject, length: int) -> list[int]:
    """A prompt from which the answer will copy: the same passage repeated."""
    passage = subject.prompt(12)
    return (passage * (length // len(passage) + 1))[:length]


def _speculation(bench: Bench) -> Figures:
    from llmc.engine.spec_decode.ngram import NgramSpeculation
    from llmc.speculative_config import SpeculativeConfig

    subject = bench.large
    prompt, length = _repeating(subject, 96), bench.size(64, 32)
    # A random model does not copy. A bias for the passage's tokens makes its answer a loop of few
    # tokens, like that of a model that copies.
    options = {"sampling": {"logit_bias": dict.fromkeys(prompt[:3], 100.0)}}
    seen = {}

    def run(drafts: bool) -> float:
        speculation = NgramSpeculation(SpeculativeConfig()) if drafts else None
        engine = subject.engine(speculation=speculation)
        start = time.perf_counter()
        add(engine, prompt, length, **options)
        serve(engine)
        seconds = time.perf_counter() - start
        stats = engine.stats()
        seen[drafts] = (stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens)
        return length / seconds

    figures = in_turn(lambda: run(True), lambda: run(False), bench.rounds)
    steps, drafted, accepted = seen[True]
    note = f"{length} tokens in {steps} steps, {accepted} of {drafted} drafts accepted; one request"
    return Figures(on=figures.on, off=figures.off, note=note)


ROWS = (
    Row(
        name="continuous",
        what="continuous batching",
        on="a row that is free is filled at once",
        off="a batch ends before the next begins",
        unit="tokens/s",
        model=LARGE,
        better="higher",
        measure=_continuous,
    ),
    Row(
        name="chunked",
        what="chunked prefill: p99 between tokens while a long prompt comes",
        on="prompts in chunks beside decodes",
        off="a prompt in one step",
        unit="ms",
        model=LARGE,
        measure=_chunked,
    ),
    Row(
        name="async",
        what="steps planned ahead",
        on="two steps in flight",
        off="one",
        unit="ms a step",
        model=SMALL,
        measure=_async,
    ),
    Row(
        name="prefix-0",
        what="prefix cache, nothing shared: time to first token",
        on="with",
        off="without",
        unit="ms",
        model=LARGE,
        measure=_prefix(0.0),
    ),
    Row(
        name="prefix-90",
        what="prefix cache, 90 % shared: time to first token",
        on="with",
        off="without",
        unit="ms",
        model=LARGE,
        measure=_prefix(0.9),
    ),
    Row(
        name="prefix-states",
        what="prefix cache of a model with recurrent layers: time to first token",
        on="with snapshots of states",
        off="without",
        unit="ms",
        model="0.35B shape, random weights",
        measure=_states,
    ),
    Row(
        name="speculation",
        what="prompt lookup on text that repeats",
        on="up to 4 draft tokens",
        off="none",
        unit="tokens/s",
        model=LARGE,
        better="higher",
        measure=_speculation,
    ),
    Row(
        name="swap",
        what="swap: pause of a request that is preempted",
        on="its blocks wait in host memory",
        off="they are computed again",
        unit="ms",
        model=LARGE,
        measure=_swap,
    ),
    Row(
        name="priority",
        what="priority: first token of urgent requests in a crowd",
        on="urgent ones first",
        off="first come, first served",
        unit="ms",
        model=SMALL,
        measure=_priority,
    ),
)
