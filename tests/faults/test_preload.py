"""A module that cannot be preloaded is left out with those that need it; all others are preloaded."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.faults.processes import LIGHT, Watched, library
from tests.harness import finished, script

# Each module notes the process that runs it. `settings` is changed by `ranked`, as lightning_utilities is by lightning.
BY = "import os\nBY = os.getpid()\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
# As lightning.fabric.utilities.rank_zero does.
KEEPS_RANK = "def zero(): pass\nzero.rank = getattr(zero, 'rank', int(os.environ.get('LOCAL_RANK', 9)))\n"
MODULES = {
    "settings": BY + "rank = 'unset'\n",
    "ranked": BY + "import settings\nsettings.rank = os.environ.get('LOCAL_RANK', 'none')\nprint('ranked runs')\n",
    "keeps_rank": BY + KEEPS_RANK,
    "uses_ranked": BY + "import plain, settings\nif True:\n    from ranked import settings as again\n",
    "plain": BY + "print('plain runs')\n",
    "threaded": BY + THREAD,
    "file_open": BY + "kept = open('/etc/hostname')\n",
    "profile": BY,
    "binding": BY + "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n",
    "starts": BY + "import subprocess\nsubprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3)\n",
    "failing": BY + "1 / 0\n",
    "leaving": BY + "raise SystemExit('no')\n",
    "crashing": BY + "import signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
}
# As an import of torch does it under OMP_PROC_BIND; in the fork server alone, so that a worker shows what it inherits.
BINDS = """
import os
if open("/proc/self/comm").read() == "elaunch-fork\\n":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
"""
SEVERAL_CPUS = pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two CPUs")
SAYS = """
import gc, json, os, sys, importlib
found = {"forked": gc.get_freeze_count() > 0, "early": "ranked" in sys.modules}
found["threads"] = len(os.listdir("/proc/self/task"))
for name in sys.argv[1:]:
    found[name] = importlib.import_module(name).BY == os.getppid()
import settings
found["rank"] = settings.rank == os.environ["LOCAL_RANK"]
import keeps_rank
found["kept"] = keeps_rank.zero.rank == int(os.environ["LOCAL_RANK"])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """An ended job of two workers that was to preload all of them."""
    folder = tmp_path_factory.mktemp("preload")
    for name, text in MODULES.items():
        env = library(folder, name, text)
    (folder / "mine").mkdir()
    script(folder / "mine", SAYS)
    (folder / "mine" / "profile.py").write_text("BY = 'the one beside the script'")
    names = ",".join(("json.nosuch", *(name for name in MODULES if name not in ("settings", "ranked", "plain"))))
    imported = ("uses_ranked", "ranked", "settings", "plain", "file_open", "profile", "keeps_rank")
    job = Watched(folder, "--preload-only", names, "--nproc-per-node", "2", "mine/train.py", *imported, env=env)
    with job:
        assert job.wait() == 0, job.output
    return job


def test_workers_are_forked_and_have_what_is_suitable(job: Watched) -> None:
    found = [json.loads(line[line.index("{") :]) for line in job.stdout.splitlines() if "{" in line]

    assert len(found) == 2
    for facts in found:
        assert facts == {
            "forked": True,
            "threads": 1,
            "early": False,
            "rank": True,
            "kept": True,
            "keeps_rank": True,
            "plain": True,
            "settings": True,
            **dict.fromkeys(("uses_ranked", "ranked", "file_open", "profile"), False),
        }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("uses_ranked", "ranked looks up LOCAL_RANK, which is another one in each worker"),
        ("threaded", "threaded starts a thread"),
        ("file_open", "file_open keeps /etc/hostname open"),
        ("profile", "profile has the name of .*/mine/profile.py"),
        pytest.param("binding", "binding binds its process to other CPUs", marks=SEVERAL_CPUS),
        ("failing", "importing it failed: ZeroDivisionError: division by zero"),
        ("leaving", "importing it failed: SystemExit: no"),
        ("crashing", "the process that tried to import it was killed by SIGKILL"),
        ("json.nosuch", "importing it failed: ModuleNotFoundError: No module named 'json.nosuch'"),
    ],
)
def test_what_is_left_out_is_named_once_with_the_reason(job: Watched, name: str, why: str) -> None:
    said = [line for line in job.said_by_agent() if re.search(rf"\b{name} is (not )?preloaded", line)]

    assert len(said) == 1, job.output
    assert re.search(f"which each worker imports itself.*{why}$|each worker imports it itself.*{why}$", said[0])


def test_a_module_runs_where_it_is_kept_and_nowhere_else_aloud(job: Watched) -> None:
    assert job.output.count("plain runs") == 1
    assert job.stdout.count("ranked runs") == 2
    assert "fresh interpreter" not in job.output


def test_who_only_looks_whether_an_unsuitable_module_is_there_finds_it_and_is_preloaded(tmp_path: Path) -> None:
    """As transformers does for each package that it can use."""
    env = library(tmp_path, "ranked", MODULES["ranked"])
    library(tmp_path, "settings", MODULES["settings"])
    library(tmp_path, "looking", "from importlib.util import find_spec\nis_there = find_spec('ranked') is not None")
    library(tmp_path, "both", "import looking, ranked")
    script(tmp_path, "import sys\nimport looking\nprint('there', looking.is_there, 'ranked' in sys.modules)")

    with Watched(tmp_path, "--preload-only", f"{LIGHT[1]},both", "train.py", env=env) as job:
        assert job.wait() == 0, job.output

    assert "there True False" in job.stdout
    assert "both is preloaded without 2 modules" in job.output


def test_a_module_that_is_asked_for_only_now_and_then_costs_no_more_than_what_was_tried(tmp_path: Path) -> None:
    """This one imports the unsuitable module if it is not in the process that is thrown away."""
    env = library(tmp_path, "ranked", MODULES["ranked"])
    library(tmp_path, "settings", MODULES["settings"])
    library(
        tmp_path, "moody", "import os\nif not os.path.exists('tried'): open('tried', 'w').close()\nelse: import ranked"
    )
    library(tmp_path, "both", "import moody, ranked")
    script(tmp_path, "import gc\nprint('forked', gc.get_freeze_count() > 0)")

    with Watched(tmp_path, "--preload-only", f"{LIGHT[1]},both", "train.py", env=env) as job:
        assert job.wait() == 0, job.output

    assert "forked True" in job.stdout
    assert "only json can be preloaded: ranked is imported only now and then" in job.output


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
