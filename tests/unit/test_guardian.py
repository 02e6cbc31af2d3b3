"""agent.guardian: who belongs to a job, and the sweep that ends them, with real processes."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress

import pytest

from elaunch.agent import guardian
from elaunch.agent.guardian import VARIABLE, marked, sweep
from tests.harness import wait_for

SLEEP = "import time; time.sleep(600)"
SETSID = f"import os; os.setsid(); print(os.getpid(), flush=True); {SLEEP}"
# The parent and its child end at once; the grandchild is left to init.
DOUBLE_FORK = f"""
import os
if os.fork():
    os.wait()
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
{SLEEP}
"""


class Nursery:
    """Starts processes with a marker, and ends what a test leaves."""

    def __init__(self) -> None:
        self.marker = secrets.token_hex(8)
        self._processes: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []

    def start(self, source: str, markers: str | None = None) -> subprocess.Popen[str]:
        """Start Python code that prints a line when it is ready."""
        environ = {**os.environ, VARIABLE: self.marker if markers is None else markers}
        process = subprocess.Popen([sys.executable, "-S", "-c", source], env=environ, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        return process

    def pid(self, source: str, markers: str | None = None) -> int:
        """Start such code and read the pid that it prints."""
        process = self.start(source, markers)
        assert process.stdout
        pid = int(process.stdout.readline())
        self._pids.append(pid)
        return pid

    def close(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until_gone(*pids: int) -> None:
    """A killed process has lost its environment, by which the sweep knows it, a moment before it is a zombie."""
    wait_for(lambda: not any(is_running(pid) for pid in pids), f"the end of {pids}", 5)


READY = f"import os; print(os.getpid(), flush=True); {SLEEP}"


@pytest.mark.parametrize("source", [READY, SETSID, DOUBLE_FORK], ids=["child", "own session", "double fork"])
def test_a_process_of_the_job_is_found_and_ended_wherever_it_stands(nursery: Nursery, source: str) -> None:
    pid = nursery.pid(source)

    wait_for(lambda: marked(nursery.marker) == [pid], "it alone, its parents gone")
    ended = sweep(nursery.marker)

    assert ended == 1
    wait_until_gone(pid)


def test_all_of_a_job_are_ended_at_once(nursery: Nursery) -> None:
    pids = [nursery.pid(source) for source in (READY, SETSID, DOUBLE_FORK, READY)]

    ended = sweep(nursery.marker)

    assert ended == 4
    wait_until_gone(*pids)
    assert marked(nursery.marker) == []


def test_strangers_survive(nursery: Nursery) -> None:
    other_job, no_job = nursery.pid(READY, secrets.token_hex(8)), nursery.pid(READY, "")
    mine = nursery.pid(READY)

    sweep(nursery.marker)

    wait_until_gone(mine)
    assert is_running(other_job)
    assert is_running(no_job)


def test_a_marker_in_another_variable_makes_nobody_a_member(nursery: Nursery) -> None:
    source = "import os, sys, time; os.execve(sys.executable, ['python', '-S', '-c', {!r}], {!r})"
    stranger = nursery.pid(source.format(READY, {"NOTE": nursery.marker, VARIABLE: "other", "AFTER": nursery.marker}))

    assert marked(nursery.marker) == []
    assert sweep(nursery.marker) == 0
    assert is_running(stranger)


def test_a_nested_agents_workers_belong_to_the_outer_job_too(nursery: Nursery) -> None:
    inner = secrets.token_hex(8)
    outer_worker, inner_worker = nursery.pid(READY), nursery.pid(READY, f"{nursery.marker},{inner}")

    inner_found, outer_found = marked(inner), marked(nursery.marker)

    assert inner_found == [inner_worker]
    assert sorted(outer_found) == sorted([outer_worker, inner_worker])


def test_who_is_spared_survives(nursery: Nursery) -> None:
    spared, ended = nursery.pid(READY), nursery.pid(READY)

    count = sweep(nursery.marker, (spared,))

    assert count == 1
    assert is_running(spared)
    wait_until_gone(ended)


def test_zombies_do_not_count(nursery: Nursery) -> None:
    zombie = nursery.start("import os; os._exit(0)")
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)

    found = marked(nursery.marker)
    ended = sweep(nursery.marker)

    assert os.path.exists(f"/proc/{zombie.pid}")  # noqa: PTH110
    assert (found, ended) == ([], 0)


def test_the_sweeper_spares_itself(nursery: Nursery) -> None:
    source = (
        "import sys\n"
        "from elaunch.agent.guardian import marked, sweep\n"
        f"print(marked({nursery.marker!r}), sweep({nursery.marker!r}))\n"
    )
    environ = {**os.environ, VARIABLE: nursery.marker}

    said = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True)

    assert said.stdout == "[] 0\n"


def test_a_job_without_processes_is_swept_at_once() -> None:
    marker = secrets.token_hex(8)

    assert (marked(marker), sweep(marker)) == ([], 0)


def test_who_is_born_after_the_look_is_ended_by_the_next(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    first, born = nursery.pid(READY), []

    def look(marker: str, spare: Collection[int]) -> list[int]:
        found = marked(marker, spare)
        if not born:
            born.append(nursery.pid(READY))
        return found

    monkeypatch.setattr(guardian, "marked", look)

    ended = sweep(nursery.marker)

    assert ended == 2
    wait_until_gone(first)
    wait_until_gone(born[0])
