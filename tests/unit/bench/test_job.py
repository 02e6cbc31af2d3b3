"""bench.job: a job of a bench ends with the bench."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from bench.job import TORCHRUN_FORK
from bench.job import environment as environment_of
from tests.faults.processes import is_alive
from tests.harness import DEADLINE_S, REPOSITORY, environment, script

BENCH = """
import signal, subprocess, sys
from bench.job import FRESH
from bench.job import Job
with Job(FRESH, 1, (sys.argv[1],), stdout=subprocess.PIPE) as job:
    print(job.process.pid, int(job.stdout.readline()), job.folder, flush=True)
    signal.pause()
"""


def test_sigterm_to_a_bench_that_handles_no_signal_ends_its_job_and_removes_its_folder(tmp_path: Path) -> None:
    program = script(tmp_path, "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", BENCH, str(program)],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as bench:
        assert bench.stdout
        launcher, worker, folder = bench.stdout.readline().split()
        below = [psutil.Process(int(pid)) for pid in (launcher, worker)]

        bench.send_signal(signal.SIGTERM)

        code = bench.wait(DEADLINE_S)
    left = [*filter(is_alive, below)]
    is_there = Path(folder).exists()
    for each in left:
        each.kill()
    shutil.rmtree(folder, ignore_errors=True)
    assert (code, left, is_there) == (143, [], False)


def test_a_contender_that_runs_a_script_by_its_path_finds_the_modules_beside_it() -> None:
    find = "import importlib.util; assert importlib.util.find_spec('first_line')"
    env = environment_of(dict(os.environ), TORCHRUN_FORK, {})

    done = subprocess.run([sys.executable, "-P", "-c", find], env=env, timeout=DEADLINE_S, check=False)

    assert done.returncode == 0
