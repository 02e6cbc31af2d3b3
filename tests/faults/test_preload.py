"""If workers that are forked after the imports would differ from fresh interpreters, they are fresh ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.faults.processes import LIGHT, library
from tests.harness import finished, script

MODULES = {
    "ranked": "import os\nrank = os.environ.get('LOCAL_RANK', 'none')\n",
    "threaded": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    "file_open": "kept = open('/etc/hostname')\n",
    "profile": "",
    "failing": "1 / 0\n",
    "leaving": "raise SystemExit('no')\n",
}
# As an import of torch does it under OMP_PROC_BIND; in the fork server alone, so that a worker shows what it inherits.
BINDS = """
import os
if open("/proc/self/comm").read() == "elaunch-fork\\n":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
"""
SEVERAL_CPUS = pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two CPUs")
SAYS = "import gc, os, ranked\nprint(gc.get_freeze_count() > 0, ranked.rank == os.environ['LOCAL_RANK'])\n"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ranked", "a preloaded module looks up LOCAL_RANK, which is another one in each worker"),
        ("threaded", "a preloaded module started a thread"),
        ("file_open", "a preloaded module keeps /etc/hostname open"),
        ("profile", ".*/mine/profile.py has the name of a module that was preloaded"),
        ("failing", "importing failing failed: ZeroDivisionError: division by zero"),
        ("leaving", "importing leaving failed: SystemExit: no"),
        ("json.nosuch", "importing json.nosuch failed: ModuleNotFoundError: No module named 'json.nosuch'"),
    ],
)
def test_one_line_says_why_workers_are_fresh_interpreters(tmp_path: Path, name: str, why: str) -> None:
    for module, text in MODULES.items():
        env = library(tmp_path, module, text)
    (tmp_path / "mine").mkdir()
    script(tmp_path / "mine", SAYS)
    (tmp_path / "mine" / "profile.py").write_text("")

    job = finished(tmp_path, "--preload", f"{LIGHT[1]},{name}", "mine/train.py", env=env)

    assert job.stdout == "False True\n", job.output
    said = re.findall("fresh interpreter, which is slower: (.*)", job.stderr)
    assert len(said) == 1, job.output
    assert re.fullmatch(why, said[0])


@SEVERAL_CPUS
def test_no_worker_is_bound_to_the_cpus_to_which_imports_bind_the_fork_server(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    env = {**library(tmp_path, "sitecustomize", BINDS), "OMP_PROC_BIND": "close"}
    script(tmp_path, "import os\nprint(sorted(os.sched_getaffinity(0)))\n")

    job = finished(tmp_path, *LIGHT, "train.py", env=env)

    assert job.stdout == f"{cpus}\n", job.output
    way_out = "--no-preload avoids this warning, and without OMP_PROC_BIND the start is fast"
    assert (
        f"imports have bound the fork server to 1 of {len(cpus)} CPUs (OMP_PROC_BIND=close); {way_out}\n" in job.stderr
    )
