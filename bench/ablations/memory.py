"""Rows of memory, counted on the real scheduler without a model: paging, shared prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType

from bench.ablations.row import Figures, Row, computed
from bench.ablations.subject import Bench
from llmc.engine.core import EngineCore
from llmc.engine.kv.layout import WHOLE, AttentionWindow
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import EagerReason, PendingStep, StepPlan, StepResult
from llmc.sampling_params import SamplingParams

BLOCK = 16
CONTEXT = 2048  # tokens in a contiguous reservation
POOL = 16 * CONTEXT  # tokens in the cache


class NoModel:
    """A runner that samples token 7 for every request."""

    max_in_flight = 1
    num_runtime_compiles = 0
    eager_steps: Mapping[EagerReason, int] = MappingProxyType({})

    def submit(self, plan: StepPlan) -> PendingStep:
        done: Future[StepResult] = Future()
        done.set_result(StepResult(token_ids=[7] * sum(work.num_samples for work in plan.work)))
        return done


def engine(num_blocks: int, **options: bool) -> EngineCore:
    return EngineCore(
        NoModel(),
        EngineLimits(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            max_model_len=CONTEXT,
            vocab_size=100,
        ),
        EngineFeatures(enable_prefix_caching=False, **options),
    )


def lengths(count: int) -> list[tuple[int, int]]:
    """Lengths (prompt, output) as in chats: log-normal, medians 150 and 120, cut at the context."""
    rng = random.Random(0)

    def draw(median: float, spread: float, most: int) -> int:
        return max(1, min(most, round(median * 2.718281828 ** rng.gauss(0, spread))))

    return [(draw(150, 1.0, CONTEXT // 2), draw(120, 0.9, CONTEXT // 2)) for _ in range(count)]


@dataclass(kw_only=True)
class Use:
    """Cache use while requests queue: how many run at once, and the share without a token."""

    running: float
    wasted: float


def paged(count: int) -> Use:
    core = engine(POOL // BLOCK)
    trace = lengths(count)
    for i, (prompt, output) in enumerate(trace):
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        core.add(AddRequest(request_id=str(i), prompt_token_ids=[5] * prompt, sampling=sampling))
    num_tokens = {str(i): prompt for i, (prompt, _) in enumerate(trace)}
    live: set[str] = set()
    running: list[int] = []
    wasted: list[float] = []
    while core.stats().num_waiting or not running:
        for update in core.step():
            live.add(update.request_id)
            num_tokens[update.request_id] += len(update.new_token_ids)
            if update.finish_reason is not None:
                live.discard(update.request_id)
        stats = core.stats()
        taken = (stats.num_blocks - stats.num_free_blocks) * BLOCK
        if taken and stats.num_waiting:
            running.append(stats.num_running)
            # the newest token of a request is not in a block before the next step
            wasted.append(max(0.0, 1 - sum(num_tokens[name] for name in live) / taken))
    return Use(running=sum(running) / len(running), wasted=sum(wasted) / len(wasted))


def contiguous(count: int) -> Use:
    """Every request reserves the whole context from its first step to its last."""
    queue = list(reversed(lengths(count)))
    slots = POOL // CONTEXT
    active: list[tuple[int, int]] = []  # (tokens in the cache, tokens to come)
    running: list[int] = []
    wasted: list[float] = []
    while queue:
        while queue and len(active) < slots:
            active.append(queue.pop())
        running.append(len(active))
        wasted.append(1 - sum(tokens for tokens, _ in active) / (len(active) * CONTEXT))
        active = [(tokens + 1, left - 1) for tokens, left in active if left > 1]
    return Use(running=sum(running) / len(running), wasted=sum(wasted) / len(wasted))


def _of_trace(pick: Callable[[Use], float]) -> Callable[[Bench], Figures]:
    def measure(bench: Bench) -> Figures:
        count = bench.size(600, 120)
        note = f"trace of {count} chats, cache of {POOL} tokens, context {CONTEXT}; computed"
        return computed(pick(paged(count)), pick(contiguous(count)), note)

    return measure


def _copy_on_write(bench: Bench) -> Figures:
    prompt, outputs, n = 1000, 100, 8

    def most_blocks(share: bool) -> int:
        core = engine(POOL // BLOCK, share_prompts=share)
        for i in range(n):
            sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
            core.add(
                AddRequest(
                    request_id=str(i),
                    prompt_token_ids=[5] * prompt,
                    sampling=sampling,
                    fork_of="0" if i else None,
                )
            )
        most = 0
        while core.has_work:
            core.step()
            stats = core.stats()
            most = max(most, stats.num_blocks - stats.num_free_blocks)
        return most

    blocks = -(-prompt // BLOCK)
    bound = blocks + n * (-(-outputs // BLOCK) + 1)
    note = f"prompt of {prompt}, {n} outputs of {outputs} tokens; the bound is {bound}; computed"
    return computed(most_blocks(True), most_blocks(False), note)


def _windows(bench: Bench) -> Figures:
    """One layer in four attends to the whole sequence, the others to the last 512 tokens."""
    prompt, output, count = 8000, 200, bench.size(64, 12)

    def running(windows: Sequence[AttentionWindow]) -> float:
        core = EngineCore(
            NoModel(),
            EngineLimits(
                num_blocks=4 * 8 * 8192 // BLOCK,  # eight such requests, if every layer keeps all
                block_size=BLOCK,
                max_num_seqs=256,
                max_num_batched_tokens=2048,
                max_model_len=16384,
                vocab_size=100,
            ),
            EngineFeatures(enable_prefix_caching=False, windows=windows),
        )
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        for i in range(count):
            core.add(
                AddRequest(request_id=str(i), prompt_token_ids=[5] * prompt, sampling=sampling)
            )
        seen = []
        while core.has_work:
            core.step()
            if core.stats().num_waiting:
                seen.append(core.stats().num_running)
        return max(seen)

    note = f"prompts of {prompt} tokens, window 512 in three groups of four; computed"
    windowed = [WHOLE, *[AttentionWindow(window=512)] * 3]
    return computed(running(windowed), running([WHOLE] * 4), note)


ROWS = (
    Row(
        name="windows",
        what="windowed layers give blocks back: long requests that run at once",
        on="block tables by group, windows drop what they left",
        off="every layer keeps the whole text",
        unit="requests",
        model="none",
        better="higher",
        measure=_windows,
    ),
    Row(
        name="paged-fit",
        what="paged cache: requests that run at once",
        on="blocks of 16 tokens as they are needed",
        off="the whole context reserved for each",
        unit="requests",
        model="none",
        better="higher",
        measure=_of_trace(lambda use: use.running),
    ),
    Row(
        name="paged-waste",
        what="paged cache: reserved memory that holds no token",
        on="blocks of 16 tokens as they are needed",
        off="the whole context reserved for each",
        unit="share",
        model="none",
        measure=_of_trace(lambda use: use.wasted),
    ),
    Row(
        name="copy-on-write",
        what="n=8 on one prompt: blocks in use at most",
        on="the prompt's blocks are shared",
        off="each has its own",
        unit="blocks",
        model="none",
        measure=_copy_on_write,
    ),
)
