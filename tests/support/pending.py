"""Steps that are done as soon as they are submitted, for test runners."""

from __future__ import annotations

from collections.abc import Callable

from llmc.engine.plan import StepPlan, StepResult


class DoneStep:
    """A PendingStep with a result or an exception."""

    def __init__(self, outcome: StepResult | Exception) -> None:
        self._outcome = outcome

    def result(self) -> StepResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def run_now(execute: Callable[[StepPlan], StepResult], plan: StepPlan) -> DoneStep:
    """The return value of a runner's `submit` that runs the step immediately."""
    try:
        return DoneStep(execute(plan))
    except Exception as error:
        return DoneStep(error)
