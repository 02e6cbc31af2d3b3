"""The scripts of docs/keeper.md and examples/trainer, and docs/trainer.md's object store: a kill costs no step."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import psutil
import pytest

from elaunch.trainer.ledger.ledger import audit_folder
from tests.faults.processes import described
from tests.harness import REPOSITORY, Job, script, wait_for
from tests.s3 import s3_server
from tests.warm import SharedStart

PAGE = REPOSITORY / "docs" / "trainer.md"
EXACTLY_ONCE = REPOSITORY / "examples" / "trainer" / "exactly_once.py"


def of_the_page() -> str:
    """The whole script of docs/keeper.md."""
    section = PAGE.with_name("keeper.md").read_text().split("## A whole script\n", 1)[1]
    block = re.search(r"\n```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert block
    return block[1]


def kept(folder: Path, program: str, *, steps: int) -> Path:
    """Write the program to a file, with this number of steps."""
    text, found = re.subn(r"keeper\.steps\(\d00\)", f"keeper.steps({steps})", program)
    assert found == 1
    return script(folder, text, "kept.py")


def test_a_killed_worker_costs_no_step(tmp_path: Path, keeper_start: SharedStart) -> None:
    path = kept(tmp_path, of_the_page(), steps=300)

    def a_worker() -> psutil.Process | None:
        named = [p for p in psutil.process_iter() if described(p).endswith(f" {path}") and p.pid != job.process.pid]
        return next((p for p in named if p.num_threads() > 1), None)

    with Job(tmp_path, *keeper_start.options, "--nproc-per-node", "2", str(path), env=keeper_start.env) as job:
        # Before it is time to kill it: the training may be at its end before all of a busy host's processes are read.
        victim = wait_for(a_worker, "a worker with threads")
        job.wait_for_output(r"step 50: loss")
        victim.kill()
        assert job.wait() == 0, job.output

    found = re.search(r"restored step (\d+) from memory \(of generation 0\); 0 steps are repeated", job.output)
    assert found, job.output
    assert 50 <= int(found[1]) < 300
    assert "step 300: loss" in job.output
    assert list((tmp_path / "checkpoints").glob("generation-0001-step-00000300*"))


def whole(folder: Path, victim: int | None = None, *, workers: int = 3, steps: int = 300) -> Job:
    """Run examples/trainer to its end. The worker with index `victim` is killed after step 50."""
    folder.mkdir()
    path = kept(folder, EXACTLY_ONCE.read_text(), steps=steps)
    with Job(folder, "--nproc-per-node", str(workers), str(path), env={"OMP_NUM_THREADS": "1"}) as job:
        if victim is not None:
            job.wait_for_output(r"step 50: loss")
            # The fork server's children are the workers and the worker store, but not the processes of data loaders.
            workers = [p for p in job.child("elaunch: fork server").children() if str(path) in p.cmdline()]
            workers[victim].kill()
        assert job.wait() == 0, job.output
    return job


def killed(folder: Path, victim: int, *, workers: int = 3, steps: int = 300) -> Job:
    """The whole script after a kill, with the verdict on its samples."""
    job = whole(folder, victim, workers=workers, steps=steps)
    assert re.search(r"restored step \d+ from memory \(of generation 0\); 0 steps are repeated", job.output)
    found = audit_folder(folder / "ledger", steps=steps)
    assert found.ok, found.text
    assert (found.samples, found.lost_steps) == (steps * 32, 0)
    return job


@pytest.mark.slow
def test_the_command_for_an_object_store_works_and_goes_on_from_there(tmp_path: Path) -> None:
    section = PAGE.read_text().split("### In an object store\n", 1)[1]
    words = section.split("```sh\n", 1)[1].splitlines()[0].split()
    assert words[0] == "elaunch"
    size = ["--steps", "20", "--layers", "1", "--width", "16", "--heads", "2", "--checkpoint-every", "10"]
    size += ["--global-batch", "4", "--micro-batch", "2", "--context", "16"]

    with s3_server() as s3:
        env = {**s3.env, "OMP_NUM_THREADS": "1"}
        with Job(tmp_path, *words[1:], *size, env=env) as job:
            assert job.wait() == 0, job.output
        assert any(key.endswith("manifest.json") for key in s3.keys("first/generation-0000-step-00000020"))
        shutil.rmtree(tmp_path / "runs")
        with Job(tmp_path, *words[1:], *size, env=env) as again:
            assert again.wait() == 0, again.output

    assert "restored step 20 from the checkpoint in s3://bucket/first" in again.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_the_whole_script_loses_no_bit_by_a_kill(tmp_path: Path, victim: int) -> None:
    last = re.compile(r"^\[0\] (step 300: loss .*)$", re.MULTILINE)

    assert last.findall(killed(tmp_path / "killed", victim).stdout) == last.findall(whole(tmp_path / "calm").stdout)
