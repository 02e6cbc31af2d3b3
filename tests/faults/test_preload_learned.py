"""Without any option, a restart and the next start have imported what the program imports, where that is safe."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.processes import Watched, described, is_alive, library
from tests.harness import script, slow, wait_for

BY = "import os\nBY = os.getpid()\n"
SLOW = "import time\nuntil_s = time.process_time() + 0.3\nwhile time.process_time() < until_s: pass\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
# As six makes `six.moves`: its importer makes a module that has no file.
MAKER = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
class Importer:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name == "maker.moves" else None
    def create_module(self, spec):
        return ModuleType(spec.name)
    def exec_module(self, module):
        module.__path__ = []
__path__ = []
sys.meta_path.append(Importer())
"""
PACKAGES = {
    "maker": MAKER,
    # It costs time, sets a variable, prints, and needs a module without a file and one with the platform's name.
    # It copies all variables, of which it keeps none that the program sets.
    "heavy": BY + SLOW + "import maker.moves, sysconfig\nsysconfig.get_config_vars()\nKNOWN = 'X' in dict(os.environ)\n"
    "os.environ['HEAVY'] = 'is here'\nprint('heavy runs')\n",
    "ranked": BY + "RANK = os.environ.get('LOCAL_RANK', 'none')\n",
    "keeps": BY + "MODE = os.environ.get('MODE', 'unset')\n",
    "uses_keeps": BY + "import keeps\n",
}
FINDS = """
import json, os, sys, time
facts = {"early": "heavy" in sys.modules or "HEAVY" in os.environ}
os.environ["MODE"] = "the program's"
import heavy, ranked, keeps, uses_keeps, mine
for module in (heavy, ranked, keeps, uses_keeps, mine):
    facts[module.__name__] = module.BY == os.getppid()
facts["right"] = (ranked.RANK, keeps.MODE, os.environ["HEAVY"]) == (os.environ["RANK"], "the program's", "is here")
facts["pid"] = os.getpid()
"""
SAYS = "print('found', json.dumps(facts), flush=True)\n"
TRAIN = f"""{FINDS}
import torch.distributed as dist
dist.init_process_group("gloo")
{SAYS}
while not os.path.exists("end"):
    time.sleep(0.02)
# A rank that leaves while another one still joins would be that one's failure.
dist.barrier()
dist.destroy_process_group()
"""
# Python's imports then find no torch, as where it is not installed: a job has nothing else to preload.
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
ITSELF = dict.fromkeys(("heavy", "ranked", "keeps", "uses_keeps", "mine"), False)
# A busy machine has little time for processes of the lowest priority.
LEARNING_S = 480
LEARNED = r"the program spent 0\.\d s on imports that can be made ahead \(heavy 0\.\d s.*\)"


def facts(job: Watched) -> list[dict[str, Any]]:
    """What each worker has found, in the order of arrival."""
    return [json.loads(line[line.index("{") :]) for line in job.stdout.splitlines() if "found {" in line]


def installed(folder: Path, program: str = TRAIN) -> dict[str, str]:
    """The packages, in a folder for installed ones, and a module beside the program."""
    place = folder / "lib" / "site-packages"
    place.mkdir(parents=True)
    for name, text in PACKAGES.items():
        (place / f"{name}.py").write_text(text)
    script(folder, program)
    script(folder, BY, "mine.py")
    # The program sets MODE to another value.
    return {
        "PYTHONPATH": os.fspath(place),
        "XDG_CACHE_HOME": os.fspath(folder / "cache"),
        "MODE": "the shell's",
        "PET_VERBOSE": "1",
    }


def test_a_restart_and_the_next_start_have_what_is_slow_to_import(tmp_path: Path) -> None:
    env = installed(tmp_path)
    with Watched(tmp_path, "--nproc-per-node", "2", "train.py", env=env) as job:
        job.wait_for_output(LEARNED, LEARNING_S)
        job.wait_for_output(r"(?s)(found \{.*){2}")
        first = facts(job)
        os.kill(first[0]["pid"], signal.SIGKILL)
        job.wait_for_output(r"(?s)(found \{.*){4}")
        restarted = facts(job)[2:]
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.output
        job.assert_nothing_is_left()
    with Watched(tmp_path, "--nproc-per-node", "2", "train.py", env=env) as again:
        assert again.wait() == 0, again.output

    expected = {"early": False, "right": True, **ITSELF}
    assert [{**each, "pid": 0} for each in first] == [{**expected, "pid": 0}] * 2
    for each in (*restarted, *facts(again)):
        assert {**each, "pid": 0} == {**expected, "heavy": True, "pid": 0}, job.output + again.output
    assert job.output.count("heavy runs") == 2
    assert "imported before the workers start, as this program imported it last time: heavy 0." in again.output
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "cache/elaunch/imports").iterdir()] == [0o600]


@pytest.mark.parametrize("torch", [False, slow(True)], ids=["without torch", "with torch"])
def test_what_does_not_suit_any_more_costs_no_worker_what_else_is_preloaded(tmp_path: Path, torch: bool) -> None:
    env = installed(tmp_path, TRAIN if torch else FINDS + SAYS)
    place = tmp_path / "lib" / "site-packages"
    if not torch:
        script(place, NO_TORCH, "sitecustomize.py")
    (tmp_path / "end").touch()
    with Watched(tmp_path, "--preload", "heavy", "--nproc-per-node", "2", "train.py", env=env) as job:
        assert job.wait() == 0, job.output
    # Its folder shows nothing of this.
    (place / "heavy.py").write_text(THREAD + PACKAGES["heavy"])

    with Watched(tmp_path, "--preload", "heavy", "--nproc-per-node", "2", "train.py", env=env) as again:
        assert again.wait() == 0, again.output

    assert [each["heavy"] for each in facts(job)] == [True, True]
    assert [(each["heavy"], each["right"]) for each in facts(again)] == [(False, True)] * 2
    why = "(sitecustomize or )?a preloaded module started a thread"
    assert re.search(f"not imported as it was remembered: {why}", again.output), again.output
    assert "heavy is not preloaded, each worker imports it itself" in again.output, again.output
    assert "fresh interpreter" not in again.output


def test_a_name_of_preload_is_tried_once_and_remembered(tmp_path: Path) -> None:
    """Each import of the module makes a file."""
    text = "import os\nopen(f'imported.{os.getpid()}', 'w').close()\n"
    library(tmp_path, "noted", text)
    env = {"PYTHONPATH": os.fspath(tmp_path / "lib"), "XDG_CACHE_HOME": os.fspath(tmp_path / "cache")}
    script(tmp_path / "lib", NO_TORCH, "sitecustomize.py")
    script(tmp_path, "import noted, gc\nprint('forked', gc.get_freeze_count() > 0)")
    counts = []

    for _ in range(2):
        with Watched(tmp_path, "--preload", "noted", "train.py", env=env) as job:
            assert job.wait() == 0, job.output
        assert "forked True" in job.stdout
        counts.append(len(list(tmp_path.glob("imported.*"))))

    assert counts == [2, 3]


def two_fork_servers(job: Watched) -> tuple[psutil.Process, psutil.Process] | None:
    """The first one, and the one that imports beside the job; None before that one is there."""
    children = {child.pid for child in psutil.Process(job.process.pid).children()}
    servers = [each for each in job.processes() if described(each).startswith("elaunch: fork server")]
    found = sorted((each for each in servers if each.pid in children), key=lambda each: each.create_time())
    return (found[0], found[1]) if len(found) > 1 else None


@pytest.mark.slow
def test_a_restart_does_not_wait_for_the_fork_server_that_imports_beside_the_job(tmp_path: Path) -> None:
    env = installed(tmp_path)
    with Watched(tmp_path, "--nproc-per-node", "2", "train.py", env=env) as job:
        job.wait_for_output(r"(?s)(found \{.*){2}")
        first, second = wait_for(lambda: two_fork_servers(job), "a second fork server")
        os.kill(facts(job)[0]["pid"], signal.SIGKILL)
        job.wait_for_output(r"(?s)(found \{.*){4}")
        was_early = not re.search(LEARNED, job.output)
        job.wait_for_output(LEARNED, LEARNING_S)
        os.kill(facts(job)[2]["pid"], signal.SIGKILL)
        job.wait_for_output(r"(?s)(found \{.*){6}")
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.output
        job.assert_nothing_is_left()

    assert was_early, "the second fork server was ready before the restart: the test proves nothing"
    assert [each["heavy"] for each in facts(job)] == [False] * 4 + [True] * 2
    assert not is_alive(first)
    assert not is_alive(second)


@pytest.mark.slow
def test_the_first_fork_server_stays_if_the_second_is_killed(tmp_path: Path) -> None:
    env = installed(tmp_path)
    with Watched(tmp_path, "--nproc-per-node", "2", "train.py", env=env) as job:
        job.wait_for_output(r"(?s)(found \{.*){2}")
        first, second = wait_for(lambda: two_fork_servers(job), "a second fork server")
        second.kill()
        wait_for(lambda: not is_alive(second), "its end")
        os.kill(facts(job)[0]["pid"], signal.SIGKILL)
        job.wait_for_output(r"(?s)(found \{.*){4}")
        is_first_there = is_alive(first)
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.output
        job.assert_nothing_is_left()

    assert is_first_there
    assert [each["heavy"] for each in facts(job)] == [False] * 4
    assert [each["right"] for each in facts(job)] == [True] * 4


@pytest.mark.slow
def test_a_job_that_ends_before_its_second_fork_server_is_ready_has_taught_the_next_start(tmp_path: Path) -> None:
    env = installed(tmp_path)
    with Watched(tmp_path, "--nproc-per-node", "2", "train.py", env=env) as job:
        _, second = wait_for(lambda: two_fork_servers(job), "a second fork server", LEARNING_S)
        second.suspend()
        was_early = not re.search(LEARNED, job.output)
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.output
        job.assert_nothing_is_left()
    with Watched(tmp_path, "--nproc-per-node", "2", "train.py", env=env) as again:
        assert again.wait() == 0, again.output

    assert was_early, "the second fork server was ready: the test proves nothing"
    assert [(each["heavy"], each["early"], each["right"]) for each in facts(again)] == [(True, False, True)] * 2
