"""Steps that are held up: logged once, with the cause that the kernel's counters name."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runner.slow_steps import SlowSteps, Waits, read_waits

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
