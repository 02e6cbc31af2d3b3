"""The script in docs/trainer.md is what it says: it survives a kill without a step lost, and runs without elaunch."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from tests.harness import Job, environment, script

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"


def kept(folder: Path) -> Path:
    """The page's script as a file."""
    section = PAGE.read_text().split("## Keeping the state\n", 1)[1]
    block = re.match(r"\n((?:    .*\n|\n)+)", section)
    assert block
    return script(folder, textwrap.dedent(block[1]), "kept.py")


def test_a_killed_worker_costs_no_step(tmp_path: Path) -> None:
    path = kept(tmp_path)

    with Job(tmp_path, "--nproc-per-node", "3", str(path), env={"OMP_NUM_THREADS": "1"}) as job:
        job.wait_for_output(r"step 50: loss")
        workers = [p for p in psutil.Process(job.process.pid).children(recursive=True) if str(path) in p.cmdline()]
        victim = next(p for p in workers if p.cmdline()[-1] == str(path) and p.num_threads() > 1)
        victim.kill()
        assert job.wait() == 0, job.output

    found = re.search(r"restored step (\d+) from memory \(of generation 0\); 0 steps are repeated", job.output)
    assert found, job.output
    assert 50 <= int(found[1]) < 400
    assert "step 400: loss" in job.output
    assert list((tmp_path / "checkpoints").glob("generation-0001-step-00000400"))


def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(kept(tmp_path))]

    ended = subprocess.run(
        command, cwd=tmp_path, env=environment({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True, timeout=120
    )

    assert ended.returncode == 0, ended.stderr
    assert "step 400: loss" in ended.stdout
