"""Steps that are over as soon as they are submitted, for runners that tests write."""

from __future__ import annotations

from collections.abc import Callable

from llmc.engine.plan import StepPlan, StepResult


class DoneStep:
    """A PendingStep: holds a result, or what went wrong."""

    def __init__(self, outcome: StepResult | Exception) -> None:
        self._outcome = outcome

    def result(self) -> StepResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def run_now(execute: Callable[[StepPlan], StepResult], plan: StepPlan) -> DoneStep:
    """What a runner's `submit` returns when it runs the step at once."""
    try:
        return DoneStep(execute(plan))
    except Exception as error:
        return DoneStep(error)
