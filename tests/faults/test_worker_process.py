"""A worker's process: its parent, what generations do not share, and when it is not forked at all.

tests/e2e/fidelity tests that a worker is what a fresh interpreter would be.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import LIGHT, Watched, library
from tests.harness import script

FRESH = ("--no-preload",)
WAYS = pytest.mark.parametrize("how", [LIGHT, FRESH], ids=["forked", "no-preload"])

# A program that looks at its process before it does anything else. Every interpreter has loaded os and sys already.
LOOK = """
import os
open_fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
import ctypes, json, signal

def died_with_parent():
    signum = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signum))
    return signum.value

with open("facts" + os.environ.get("RANK", ""), "w") as file:
    json.dump({
        "fds": open_fds,
        "parent": os.getppid(),
        "pid": os.getpid(),
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "death_signal": died_with_parent(),
    }, file)
"""


def looked_at(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


class TestFacts:
    @WAYS
    def test_its_place_among_processes(self, tmp_path: Path, how: tuple[str, ...]) -> None:
        script(tmp_path, LOOK + "\nprint('ready', flush=True)\nwhile True: signal.pause()")
        with Watched(tmp_path, *how, "--nproc-per-node", "2", "train.py") as job:
            job.wait_for_output(r"\[0\] ready")
            job.wait_for_output(r"\[1\] ready")

            ours = [looked_at(tmp_path / f"facts{rank}") for rank in range(2)]

            for facts in ours:
                assert facts["parent"] == job.fork_server().pid
                assert facts["session"] == facts["group"] == facts["pid"]
                assert facts["death_signal"] == 9
                # Fds 0, 1 and 2, the link, the file for a crash, and the fd that lists them.
                assert sorted(facts["fds"]) == [0, 1, 2, 3, 4, 1023]

    def test_random_numbers_differ_between_ranks_and_generations_and_nothing_of_torch_was_started(
        self, tmp_path: Path
    ) -> None:
        script(
            tmp_path,
            """
import json, os, random, signal, sys, time
threads = len(os.listdir("/proc/self/task"))
import numpy, torch, multiprocessing
facts = {
    "torch": torch.initial_seed(), "drawn": torch.rand(1).item(), "numpy": float(numpy.random.rand()),
    "random": random.random(), "authkey": bytes(multiprocessing.current_process().authkey).hex(),
    "threads": threads, "cuda": torch.cuda.is_initialized(), "bad_fork": torch.cuda._is_in_bad_fork(),
    "devices": [p for fd in os.listdir("/proc/self/fd") if os.path.exists(f := f"/proc/self/fd/{fd}")
                and (p := os.readlink(f)).startswith("/dev/nvidia")],
}
generation = os.environ["ELAUNCH_GENERATION"]
name = f"{generation}.{os.environ['RANK']}"
with open(f"{name}.part", "w") as file:
    json.dump(facts, file)
os.rename(f"{name}.part", name)
if generation == "0":
    while not (os.path.exists("0.0") and os.path.exists("0.1")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        )
        with Watched(tmp_path, "--preload", "torch", "--nproc-per-node", "2", "train.py") as job:
            assert job.wait() == 0, job.output

        facts = [json.loads((tmp_path / f"{g}.{r}").read_text()) for g in range(2) for r in range(2)]

        assert "generation 1" in job.stderr
        for source in ("torch", "drawn", "numpy", "random", "authkey"):
            assert len({f[source] for f in facts}) == 4, f"{source}: {[f[source] for f in facts]}"
        for f in facts:
            assert (f["threads"], f["cuda"], f["bad_fork"], f["devices"]) == (1, False, False, [])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Watched]:
    """Two ended jobs, by the module that each has preloaded. A signal was blocked when they were started."""
    found: dict[str, Watched] = {}
    for name, text in MODULES.items():
        folder = tmp_path_factory.mktemp(name)
        env = library(folder, name, text)
        script(folder, ABOUT_MODULES)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            found[name] = Watched(
                folder, "--preload", name, "--nproc-per-node", "2", "train.py", *[name] * (name == "told"), env=env
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with found[name] as job:
            assert job.wait() == 0, job.output
    return found


MODULES = {
    "told": "import os; BY = os.getpid()",
    "sitecustomize": "import os; os.environ.get('RANK')",
}
ABOUT_MODULES = """
import os, signal, sys
print("blocked", sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
told = len(sys.argv) > 1 and __import__(sys.argv[1])
print("forked", told and told.BY == os.getppid())
"""


class TestFallback:
    """If a forked worker would differ, workers are fresh interpreters, and one sentence says why."""

    def assert_fresh(self, job: Watched, why: str) -> None:
        assert job.wait() == 0, job.output
        told = [line for line in job.said_by_agent() if "fresh interpreter" in line]
        assert len(told) == 1, job.output
        assert why in told[0]

    def test_what_a_sitecustomize_changed_is_not_changed_twice(self, tmp_path: Path) -> None:
        counts = "import os; os.environ['COUNT'] = os.environ.get('COUNT', '') + 'I'; os.environ.get('RANK')"
        env = library(tmp_path, "sitecustomize", counts)
        script(tmp_path, "import os\nprint('count', os.environ['COUNT'])")

        with Watched(tmp_path, *LIGHT, "train.py", env=env) as job:
            self.assert_fresh(job, "looks up RANK")

        # The agent, which is a Python program too, adds one, and the worker adds one. The fork server adds none.
        assert "count II\n" in job.stdout

    def test_a_file_that_python_was_started_with_stays_open(self, tmp_path: Path) -> None:
        kept = "import os; kept = os.open(os.devnull, os.O_RDONLY)"
        env = library(tmp_path, "sitecustomize", kept)
        asks = "os.path.samestat(os.fstat(sitecustomize.kept), os.stat('/dev/null'))"
        script(tmp_path, f"import os, sitecustomize\nprint('open', {asks})")

        with Watched(tmp_path, *LIGHT, "train.py", env=env) as job:
            self.assert_fresh(job, "keeps /dev/null open")

        assert "open True" in job.stdout

    def test_without_a_reason_workers_are_forked(self, jobs: dict[str, Watched]) -> None:
        assert jobs["told"].stdout.count("forked True") == 2
        assert "fresh interpreter" not in jobs["told"].output

    @pytest.mark.parametrize("name", ["told", "sitecustomize"])
    def test_signals_that_were_blocked_when_it_started_are_so_in_every_worker(
        self, jobs: dict[str, Watched], name: str
    ) -> None:
        assert jobs[name].stdout.count(f"blocked [{int(signal.SIGUSR2)}]") == 2
