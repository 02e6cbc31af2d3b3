"""launcher.schedulers.submit_slurm: the batch script for Slurm, and what is wrong with a request."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.schedulers.submit_slurm import COMMAND, job_of, script
from tests.commands import call, read
from tests.harness import REPOSITORY, RUN_LIMIT_S

SHIPPED = REPOSITORY / "deploy" / "slurm" / "train.sbatch"


def written(*argv: str) -> str:
    ctx = read(COMMAND, *argv)
    return script(job_of(ctx), ctx.params)


def test_the_script_that_is_shipped_is_the_one_that_submit_writes() -> None:
    assert written("--nodes", "2", "--gpus", "8", "--time", "24:00:00", "train.py") == SHIPPED.read_text()


def test_options_of_sbatch_are_lines_and_those_of_elaunch_follow_it() -> None:
    text = written(
        "--nodes=4", "--cpus", "16", "--partition", "h100", "--account", "me", "--sbatch=--constraint=ib",
        "--max-restarts", "5", "train.py", "--nodes", "9", "a word",
    )  # fmt: skip

    for line in ("--nodes=4", "--cpus-per-task=16", "--partition=h100", "--account=me", "--constraint=ib"):
        assert f"#SBATCH {line}\n" in text
    assert "--exclusive" not in text
    assert "--gpus-per-node" not in text
    assert "\nsrun --cpus-per-task=16 --cpu-bind=none --kill-on-bad-exit=0 elaunch --max-restarts 5 train.py" in text
    assert " train.py --nodes 9 'a word'\n" in text


@pytest.mark.parametrize("code", [0, 1, 138, 140])
def test_the_script_ends_as_the_job_and_queues_itself_again_after_a_notice(tmp_path: Path, code: int) -> None:
    for name, text in (("srun", f"exit {code}"), ("scontrol", "echo asked to $1 $2 >&2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", written("train.py")], env=env, capture_output=True, text=True, timeout=RUN_LIMIT_S
    )

    assert done.returncode == code
    assert done.stderr == ("asked to requeue 7\n" if code >= 138 else "")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--nodes", "3:2", "t.py"], "--nodes 3:2 is neither a number of nodes nor a range"),
        (["--gpus", "many", "t.py"], "--gpus many is not a whole number"),
        (["--name", "a\n#SBATCH --uid=0", "t.py"], "one line"),
        (["--nodes", "2", "--nnodes", "4", "t.py"], "--nnodes 4 is more than .*--nodes 2"),
        (["--nodes", "2:4", "--nnodes", "3:4", "t.py"], "--nnodes 3 is more than .*--nodes 2"),
        (["--nodes", "2", "--standalone", "t.py"], "--standalone is the same on all nodes"),
        (["--nodes", "2", "--nnodes", "2", "--node-rank", "1", "t.py"], "--node-rank is the same on all nodes"),
        (["-"], "has no stdin"),
    ],
)
def test_a_wrong_request_is_a_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        written(*argv)


def test_a_script_that_is_not_there_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    with pytest.raises(UsageError, match=r"trian.py does not exist in .*; if only the nodes"):
        call(COMMAND, "trian.py")
    assert call(COMMAND, "train.py") == 0
    assert call(COMMAND, "--sbatch=--chdir=/elsewhere", "trian.py") == 0
    assert call(COMMAND, "-m", "pkg.trian") == 0
    assert call(COMMAND, "--dry-run", "trian.py") == 0
