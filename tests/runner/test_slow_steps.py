"""Steps that are held up: logged once, with the cause that the kernel's counters name."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.engine.plan import RowWork, StepPlan
from llmc.runner.slow_steps import SlowSteps, Waits, read_waits, size_of

NOTHING = Waits(cores=0.0, quota=0.0, faults=0)


class Machine:
    """Clocks and counters that a step moves on."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.waits = NOTHING

    def step(self, took: float, used: float, waits: Waits = NOTHING) -> str:
        self.now += took
        self.used += used
        self.waits = Waits(
            cores=self.waits.cores + waits.cores,
            quota=self.waits.quota + waits.quota,
            faults=self.waits.faults + waits.faults,
        )
        return "result"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(SlowSteps, "is_logged", False)
    return Machine()


def watch(machine: Machine) -> SlowSteps:
    return SlowSteps(lambda: machine.now, lambda: machine.used, lambda: machine.waits)


@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        (Waits(cores=0.3, quota=0.0, faults=0), "other programs use the cores"),
        (Waits(cores=0.3, quota=0.3, faults=0), "this container uses up its CPU quota"),
        (Waits(cores=0.1, quota=0.0, faults=50), "350 pages of its memory had to be read"),
    ],
)
def test_the_cause_is_logged_once(
    machine: Machine, caplog: pytest.LogCaptureFixture, waits: Waits, cause: str
) -> None:
    machine.waits = Waits(cores=9.0, quota=9.0, faults=99)  # from before
    slow_steps = watch(machine)
    for _ in range(20):
        assert slow_steps.run(lambda: machine.step(0.4, 0.1, waits)) == "result"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"steps take 4 times as long as they need: {cause}" in caplog.text
    for _ in range(20):  # another engine of this process
        watch(machine).run(lambda: machine.step(0.4, 0.1, waits))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("took", "used", "waits"),
    [
        (0.4, 0.4, NOTHING),
        (0.4, 0.2, Waits(cores=0.2, quota=0.0, faults=0)),  # twice as long
        (0.4, 0.1, NOTHING),  # for a reason that is not known
    ],
    ids=["at full speed", "a little slower", "no cause"],
)
def test_others_are_not(
    machine: Machine, caplog: pytest.LogCaptureFixture, took: float, used: float, waits: Waits
) -> None:
    slow_steps = watch(machine)
    for _ in range(20):
        slow_steps.run(lambda: machine.step(took, used, waits))
    assert not caplog.records


@pytest.mark.parametrize("others", [0.4, 0.29], ids=["slow", "a little slower"])
def test_steps_that_were_faster_before_name_the_memory(
    machine: Machine, caplog: pytest.LogCaptureFixture, others: float
) -> None:
    slow_steps = watch(machine)
    for _ in range(3):
        slow_steps.run(lambda: machine.step(0.1, 0.1), "size")
    for size in (None, "larger"):
        for _ in range(20):
            slow_steps.run(lambda: machine.step(0.4, 0.4), size)
    for _ in range(20):
        slow_steps.run(lambda: machine.step(0.05, 0.05), None)
    assert not caplog.records
    for _ in range(20):
        slow_steps.run(lambda: machine.step(others, others), "size")
    if others == 0.4:
        assert "times as long as they need: the same steps were faster before" in caplog.text
    else:
        assert not caplog.records


def test_a_step_that_another_thread_did_is_no_limit(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    slow_steps = watch(machine)
    slow_steps.run(lambda: machine.step(0.4, 0.01), "size")  # the rest of the team computed it
    for _ in range(20):
        slow_steps.run(lambda: machine.step(0.4, 0.4), "size")
    assert not caplog.records


def test_only_decodes_of_the_same_rows_and_about_the_same_contexts_are_compared() -> None:
    def decode(*starts: int, num_tokens: int = 1) -> StepPlan:
        rows = enumerate(starts)
        work = [RowWork(row=r, start=n, num_tokens=num_tokens, sample=True) for r, n in rows]
        return StepPlan(step=0, work=work)

    assert size_of(decode(20)) == size_of(decode(31)) != size_of(decode(32))
    assert size_of(decode(10, 10)) not in (size_of(decode(20)), None)
    assert size_of(decode(20, num_tokens=2)) is None


def test_fastest_steps_are_forgotten_in_the_end(machine: Machine) -> None:
    slow_steps = watch(machine)
    for size in range(5000):
        slow_steps.run(lambda: machine.step(0.0, 0.0), size)
    assert len(slow_steps._fastest) <= 1024


def test_nor_is_one_long_pause(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    slow_steps = watch(machine)
    for i in range(100):
        pause = 60.0 if i == 50 else 0.0
        waits = Waits(cores=pause, quota=0.0, faults=0)
        slow_steps.run(lambda p=pause, w=waits: machine.step(0.1 + p, 0.1, w))  # type: ignore[misc]
    assert not caplog.records


def test_the_kernels_counters(tmp_path: Path) -> None:
    assert read_waits(tmp_path).cores == read_waits(tmp_path).quota == 0.0
    for name, text in {
        "proc/thread-self/schedstat": "500000000 1500000000 7\n",
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/cpu.stat": "usage_usec 9\nthrottled_usec 250000\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    waits = read_waits(tmp_path)
    assert (waits.cores, waits.quota) == (1.5, 0.25)
