"""Signals to the job: which processes get them, how long a stop may take, and the exit code of the command."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import SAY, TAG, Light, Watched, is_alive
from tests.harness import FRESH, LIGHT, script, slow, wait_for
from tests.standin import WITHOUT_TORCH
from tests.terminal import Terminal

# A program that prints the signal that came, "saves", and exits with 0.
SAVES = f"""{SAY}
def save(signum, frame):
    print("saved on", signal.Signals(signum).name, flush=True)
    sys.exit(0)

for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(signum) != signal.SIG_IGN:
        signal.signal(signum, save)
say("worker", os.getpid())
while True:
    signal.sigtimedwait([], 0.1)  # not pause(): it would miss a signal that comes just before it
"""

# Rank 1 has no handler.
ONE_SAVES = SAVES.replace("for signum in (", "for signum in () if RANK == 1 else (")

STUBBORN = f"""{SAY}
signal.signal(signal.SIGTERM, lambda *_: say("asked", os.getpid()))
signal.signal(signal.SIGINT, lambda *_: say("asked", os.getpid()))
say("worker", os.getpid())
while True:
    signal.sigtimedwait([], 0.1)  # not pause(): it would miss a signal that comes just before it
"""


def workers_up(job: Watched, count: int) -> list[int]:
    wait_for(lambda: len(job.pids("worker")) == count, f"{count} workers")
    return job.pids("worker")


def assert_stopped(job: Watched, code: int) -> None:
    """Check that the job was stopped, not restarted, and is gone."""
    assert job.wait() == code
    assert "generation 1" not in job.output
    assert "FAILED" not in job.output
    job.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("how", "signum", "code"),
    [
        # Each kind of worker, with one signal, and a notice. The core's own tests have all signals.
        (LIGHT, signal.SIGINT, 130),
        (LIGHT, signal.SIGUSR2, 140),
        (FRESH, signal.SIGTERM, 143),
    ],
)
def test_workers_get_the_signal_and_their_exit_0_does_not_hide_it(
    tmp_path: Path, how: tuple[str, ...], signum: signal.Signals, code: int
) -> None:
    """Rank 0 has a handler. Rank 1 has none, and ends at once, however long the grace period is."""
    script(tmp_path, ONE_SAVES)
    how = (*how, "--nproc-per-node", "2", "--stop-grace", "600")
    with Watched(tmp_path, *how, "train.py", env=WITHOUT_TORCH) as job:
        workers_up(job, 2)

        job.signal(signum)

        assert_stopped(job, code)
        assert job.stdout.count(f"saved on {signum.name}") == 1
        assert job.stderr.count(f"{signum.name}: stopping 2 workers") == 1


def stop_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the worker to stop")


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    script(tmp_path, STUBBORN)
    with Light(tmp_path, "--nproc-per-node", "2", "--stop-grace", "3", "train.py") as job:
        workers_up(job, 2)
        sent_at_s = time.monotonic()

        job.signal(signal.SIGTERM)

        wait_for(lambda: len(job.pids("asked")) == 2, "both workers are asked")
        assert_stopped(job, 143)
        assert time.monotonic() - sent_at_s >= 3
        assert "still ran after 3 s; SIGKILL" in job.stderr


def test_a_second_sigint_kills_at_once_however_long_the_grace(tmp_path: Path) -> None:
    script(tmp_path, STUBBORN)
    with Light(tmp_path, "--nproc-per-node", "2", "--stop-grace", "600", "train.py") as job:
        pids = workers_up(job, 2)
        job.signal(signal.SIGINT)
        wait_for(lambda: len(job.pids("asked")) == 2, "both workers are asked")
        assert all(is_alive(pid) for pid in pids)

        job.signal(signal.SIGINT)

        assert_stopped(job, 130)
        assert "SIGINT again: killing the workers now" in job.stderr


def test_under_nohup_sighup_changes_nothing(tmp_path: Path) -> None:
    script(tmp_path, f"{SAY}\nsay('worker', os.getpid())\nwhile not os.path.exists('go'): time.sleep(0.01)")
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    with Watched(tmp_path, *LIGHT, "--nproc-per-node", "2", "train.py", **ignore) as job:
        pids = workers_up(job, 2)

        # A terminal that hangs up signals every process.
        for pid in (*pids, job.fork_server().pid, job.guardian().pid, job.process.pid):
            os.kill(pid, signal.SIGHUP)

        assert all(is_alive(pid) for pid in pids)
        (tmp_path / "go").touch()
        assert job.wait() == 0
        assert "SIGHUP" not in job.output
        assert len(job.pids("worker")) == 2


def test_a_notice_that_a_scheduler_sends_to_all_processes_reaches_a_worker_once(tmp_path: Path) -> None:
    counts = 'signal.signal(signal.SIGUSR1, lambda *_: say("noticed", os.getpid()))'
    script(tmp_path, f"{SAY}\n{counts}\nsay('worker', os.getpid())\nwhile not os.path.exists('go'): time.sleep(0.01)")
    with Light(tmp_path, "train.py") as job:
        [worker] = workers_up(job, 1)
        job.signal(signal.SIGUSR1)
        # The agent has ordered the fork server by now to pass it on.
        wait_for(lambda: "SIGUSR1: stopping" in job.stderr, "the agent stops the job")

        for pid in (job.fork_server().pid, worker):
            os.kill(pid, signal.SIGUSR1)

        (tmp_path / "go").touch()
        assert_stopped(job, 128 + signal.SIGUSR1)
        assert job.pids("noticed") == [worker]


@pytest.mark.parametrize("agent_first", [slow(True), False], ids=["agent-first", "workers-first"])
def test_sigterm_to_all_processes_at_once_is_a_stop_and_no_failure(tmp_path: Path, agent_first: bool) -> None:
    script(tmp_path, ONE_SAVES)
    with Watched(tmp_path, *LIGHT, "--nproc-per-node", "2", "train.py") as job:
        workers_up(job, 2)
        others = [p.pid for p in job.processes()]
        assert len(others) >= 4
        agent = job.process.pid

        # While the agent is stopped, all of them are one moment to it.
        stop_all([agent])
        for pid in [agent, *others] if agent_first else [*others, agent]:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                assert pid != agent
        job.signal(signal.SIGCONT)

        assert_stopped(job, 143)


def test_a_rank_that_signals_its_parent_stops_the_job_as_a_person_does(tmp_path: Path) -> None:
    signals = "if RANK == 1: os.kill(os.getppid(), signal.SIGTERM)"
    script(tmp_path, f"{SAY}\nsay('worker', os.getpid())\n{signals}\nwhile True: signal.pause()")
    with Light(tmp_path, "--nproc-per-node", "2", "train.py") as job:
        assert_stopped(job, 130)
        assert "SIGTERM from rank 1 to its parent process" in job.stderr


def test_a_worker_saves_in_its_handler_while_its_data_loaders_still_work(tmp_path: Path) -> None:
    script(
        tmp_path,
        f"""{SAY}
from torch.utils.data import DataLoader

batches = iter(DataLoader(range(1 << 20), 2, num_workers=2, prefetch_factor=1, multiprocessing_context="fork"))

def save(*_):
    # More than what was fetched ahead: the loaders must work on.
    for _ in range(20):
        batch = next(batches)
    assert all(process.is_alive() for process in batches._workers)
    print("saved after batch of", batch[0].item(), flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
next(batches)
for process in batches._workers:
    say("loader", process.pid)
say("worker", os.getpid())
while True:
    signal.sigtimedwait([], 0.1)  # not pause(): it would miss a signal that comes just before it
""",
    )
    with Watched(tmp_path, "--preload", "torch", "--nproc-per-node", "1", "train.py") as job:
        workers_up(job, 1)
        loaders = job.pids("loader")
        assert len(loaders) == 2

        job.signal(signal.SIGTERM)

        assert_stopped(job, 143)
        assert "saved after batch of 40" in job.stdout
        assert not any(is_alive(pid) for pid in loaders)


def test_a_program_below_a_shell_wrapper_gets_the_signal_and_the_time_to_save(tmp_path: Path) -> None:
    # The shell ends at once, and the save takes longer.
    script(
        tmp_path,
        SAVES.replace("    sys.exit(0)", "    time.sleep(0.5)\n    print('to the end', flush=True)\n    sys.exit(0)"),
    )
    script(tmp_path, f"{sys.executable} train.py\necho wrapper goes on\n", "wrapper.sh")
    with Watched(tmp_path, "--no-python", "--nproc-per-node", "2", "bash", "wrapper.sh", env=WITHOUT_TORCH) as job:
        workers_up(job, 2)

        job.signal(signal.SIGTERM)

        assert_stopped(job, 143)
        assert job.stdout.count("saved on SIGTERM") == 2
        assert job.stdout.count("to the end") == 2


@pytest.mark.parametrize("workers", [slow(1), 2])
def test_ctrl_c_on_a_terminal_interrupts_every_worker_once(tmp_path: Path, workers: int) -> None:
    script(
        tmp_path,
        f"""{SAY}
try:
    say("worker", os.getpid())
    while True:
        time.sleep(600)
except KeyboardInterrupt:
    # One write: a lone worker shares the terminal with the agent, whose line may come between two.
    print(f"interrupted {{os.isatty(1)}}")
time.sleep(0.3)  # A second one would be seen.
print("bye", flush=True)
""",
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = (*LIGHT, "--nproc-per-node", str(workers), "--max-restarts", "3", "train.py")
    with Terminal(tmp_path, *words, env={TAG: "terminal", "TMPDIR": str(temporary)}) as terminal:
        terminal.read_until("worker pid", times=workers)
        pids = [int(pid) for pid in re.findall(r"worker pid (\d+)", terminal.text)]

        terminal.type("\x03")

        assert terminal.read_all() == 130, terminal.text
        assert terminal.text.count(f"interrupted {workers == 1}") == workers, terminal.text
        assert terminal.text.count("bye") == workers, terminal.text
        assert "Traceback" not in terminal.text
        assert not any(is_alive(pid) for pid in pids)
        assert not list(temporary.glob("elaunch*"))
