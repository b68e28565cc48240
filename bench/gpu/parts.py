"""The parts of a run, the most important first: what each does, and its time limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.gpu.record import Record
from bench.gpu.settings import Settings

Run = Callable[[Settings, Record], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`most_s`: time limit. `timed` parts have the machine to themselves; the others run
    concurrently before them."""

    name: str
    about: str
    expected_s: int
    most_s: int
    load: Callable[[], Run]
    timed: bool = True


def _smoke() -> Run:
    from bench.gpu import smoke

    return smoke.run


def _ladder() -> Run:
    from bench.gpu import ladder

    return ladder.run


def _limits() -> Run:
    from bench.gpu import limits

    return limits.run


def _tests() -> Run:
    from bench.gpu import start_parts

    return start_parts.run_tests


def _warm() -> Run:
    from bench.gpu import start_parts

    return start_parts.run_warm


def _cold() -> Run:
    from bench.gpu import start_parts

    return start_parts.run_cold


def _kernels() -> Run:
    from bench.gpu import kernels_part

    return kernels_part.run


def _prompts() -> Run:
    from bench.gpu import prompts_part

    return prompts_part.run


def _ablate() -> Run:
    from bench.gpu import ablation

    return ablation.run


def _model(name: str) -> Run:
    from bench.gpu import model_part

    return partial(model_part.run, name)


def _tune() -> Run:
    from bench.gpu import tune_part

    return tune_part.run


def _tuned(name: str) -> Run:
    from bench.gpu import model_part

    return partial(model_part.run_tuned, name)


def _peer(name: str) -> Run:
    from bench.gpu import peer

    return partial(peer.run, name)


PARTS = (
    Part(
        name="smoke", about="every op once; a small model's graphs, also from another thread",
        expected_s=45, most_s=120, timed=False, load=_smoke,
    ),
    Part(name="tests", about="pytest -m gpu", expected_s=114, most_s=250, timed=False, load=_tests),
    Part(
        name="warm", about="compile all that later parts run, cold, several at a time",
        expected_s=100, most_s=170, timed=False, load=_warm,
    ),
    Part(
        name="ladder", about="-O0, -O1, -O2, and -O1 without dependent launch, on Qwen3-0.6B",
        expected_s=40, most_s=120, load=_ladder,
    ),
    Part(
        name="limits", about="bandwidths; cuBLAS at 8192 cubed and at the models' shapes",
        expected_s=14, most_s=45, load=_limits,
    ),
    Part(
        name="8b", about="all figures of Llama-3.1-8B",
        expected_s=42, most_s=270, load=partial(_model, "8b"),
    ),
    Part(
        name="0.6b", about="all figures of Qwen3-0.6B",
        expected_s=27, most_s=200, load=partial(_model, "0.6b"),
    ),
    Part(
        name="kernels", about="single ops, compared with torch",
        expected_s=51, most_s=80, load=_kernels,
    ),
    Part(
        name="peer-0.6b", about="Qwen3-0.6B compared with transformers",
        expected_s=50, most_s=90, load=partial(_peer, "0.6b"),
    ),
    Part(
        name="peer-8b", about="Llama-3.1-8B compared with transformers",
        expected_s=70, most_s=120, load=partial(_peer, "8b"),
    ),
    Part(
        name="1b", about="all figures of Llama-3.2-1B",
        expected_s=25, most_s=200, load=partial(_model, "1b"),
    ),
    Part(
        name="ablate", about="each pass off, async off, on Qwen3-0.6B",
        expected_s=45, most_s=140, load=_ablate,
    ),
    Part(
        name="tune", about="other launch options of whole decode steps: a table of faster ones",
        expected_s=215, most_s=330, load=_tune,
    ),
    Part(
        name="prompts", about="kernels for new prompts, by head size and length, to the same table",
        expected_s=18, most_s=60, load=_prompts,
    ),
    Part(
        name="8b-tuned", about="figures of Llama-3.1-8B with the table",
        expected_s=40, most_s=200, load=partial(_tuned, "8b"),
    ),
    Part(
        name="0.6b-tuned", about="figures of Qwen3-0.6B with the table",
        expected_s=25, most_s=150, load=partial(_tuned, "0.6b"),
    ),
    Part(
        name="peer-1b", about="Llama-3.2-1B compared with transformers",
        expected_s=40, most_s=80, load=partial(_peer, "1b"),
    ),
    Part(
        name="cold", about="a start of Llama-3.1-8B without compiled code",
        expected_s=70, most_s=120, load=_cold,
    ),
)  # fmt: skip


def choose(names: str | None) -> tuple[Part, ...]:
    """Parts by their names, separated by commas, in the order of PARTS; all for None."""
    known = {part.name: part for part in PARTS}
    if names is None:
        return PARTS
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise SystemExit(f"unknown part {unknown}; known are {', '.join(known)}")
    return tuple(part for part in PARTS if part.name in wanted)
