"""Each check is a process of its own: what hangs, crashes or fails costs its own line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elaunch.launcher.doctor import children, health
from elaunch.launcher.doctor.checks import Check, examine
from elaunch.launcher.doctor.children import Task, Unfinished, run_all
from elaunch.launcher.doctor.facts import CpuFacts, Needs
from elaunch.launcher.doctor.findings import Finding, Grade, ok
from tests.faults.processes import is_alive
from tests.harness import DEADLINE_S, RUN_LIMIT_S, environment, wait_for


def fail() -> object:
    raise ValueError("no such thing")


def crash() -> object:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def hang() -> object:
    subprocess.run(["sleep", "1000.25"], check=True, timeout=RUN_LIMIT_S)
    return None


def sleepers() -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if "1000.25" in (each.info["cmdline"] or ())]


def own_children() -> set[int]:
    """The children of this process. Another test's fixture may have some."""
    return {child.pid for child in psutil.Process().children()}


def test_each_task_has_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine even a killed process takes its time to end.
    monkeypatch.setattr(children, "_REAP_S", DEADLINE_S)
    before = own_children()
    facts = CpuFacts(2, 2)
    tasks = {"well": Task(lambda: facts, 300), "fails": Task(fail, 300), "crashes": Task(crash, 300)}
    start_s = time.monotonic()

    found = run_all({**tasks, "hangs": Task(hang, 0.5)})

    assert time.monotonic() - start_s < 60
    assert found["well"] == facts
    assert found["fails"] == Unfinished("the check failed (ValueError: no such thing)")
    assert found["crashes"] == Unfinished("its process ended without an answer")
    assert found["hangs"] == Unfinished("no answer within 0.5 s", is_late=True)
    wait_for(lambda: not sleepers(), "what the hanging task has started ends, too")
    assert own_children() <= before


def test_a_task_writes_nothing_to_the_terminal(capfd: object) -> None:
    def chatter() -> object:
        os.write(1, b"out")
        os.write(2, b"err")
        return 1

    assert run_all({"chatters": Task(chatter, 300)}) == {"chatters": 1}
    assert capfd.readouterr() == ("", "")  # type: ignore[attr-defined]


def test_a_check_that_hangs_and_a_fault_in_a_judgement_are_lines() -> None:
    def faulty(_facts: object, _needs: Needs) -> tuple[Finding, ...]:
        raise KeyError("x")

    late = Check("disk", hang, lambda facts, needs: (ok("fine"),), 0.3)
    checked = examine((late, Check("cpu", lambda: 1, faulty)), Needs())

    assert [each.grade for each in checked] == [Grade.BAD, Grade.BAD]
    assert checked[0].findings[0].found == "disk: no answer within 0.3 s"
    assert "KeyError" in checked[1].findings[0].found


def test_a_killed_doctor_leaves_no_process_not_even_the_one_that_imports_torch(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 1000.5\n")
    slow.chmod(0o755)
    program = tmp_path / "torch_check.py"
    program.write_text(
        "from elaunch.launcher.doctor.children import Task, run_all\n"
        "from elaunch.launcher.doctor.reading.programs import read_torch\n"
        f"read = lambda: read_torch({str(slow)!r}, uses_python=True, has_gpus=False, limit_s=90)\n"
        "run_all({'torch': Task(read, 100)})\n"
    )

    def importer() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if "1000.5" in (each.info["cmdline"] or ())]

    with subprocess.Popen([sys.executable, str(program)], env=environment()) as doctor:
        wait_for(importer, "the import begins")
        doctor.kill()

    wait_for(lambda: not importer(), "nothing is left")


def test_a_killed_doctor_leaves_no_process(tmp_path: Path) -> None:
    program = tmp_path / "hang.py"
    program.write_text(
        "import time\nfrom elaunch.launcher.doctor.children import Task, run_all\n"
        "run_all({'a': Task(lambda: time.sleep(1000), 100)})\n"
    )
    with subprocess.Popen([sys.executable, str(program)], env=environment()) as doctor:
        child = wait_for(lambda: psutil.Process(doctor.pid).children(), "a child")[0]
        # The kernel's promise holds from the child's first steps on.
        wait_for(lambda: os.getpgid(child.pid) == child.pid and child.status() == "sleeping", "it works")
        doctor.kill()

    wait_for(lambda: not is_alive(child), "the child ends")


def test_a_job_that_is_over_takes_its_health_check_with_it(monkeypatch: object) -> None:
    monkeypatch.setattr(health, "_complaints", lambda *_: time.sleep(1000))  # type: ignore[attr-defined]
    # On a busy machine a killed process needs its time to end.
    monkeypatch.setattr(health, "_CLOSE_S", DEADLINE_S)  # type: ignore[attr-defined]
    monkeypatch.setattr(children, "_REAP_S", DEADLINE_S)  # type: ignore[attr-defined]
    said: list[str] = []
    before = own_children()
    for is_strict in (False, True):
        check = health.HealthCheck(1, {}, is_strict=is_strict)
        if not is_strict:
            check.done(said.append)

        check.close()

        assert own_children() <= before
    assert not said
