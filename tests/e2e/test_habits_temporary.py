"""A temporary folder that cannot be written: the job runs all the same, or says in one sentence what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.habits import LIGHT, NO_PRELOAD, Run, fresh, worker
from tests.harness import RUN_LIMIT_S, script, slow

PLACES = ("/var/tmp", "/dev/shm")


@cache
def _namespace() -> tuple[str, ...] | None:
    """The command that gives a program mounts of its own. None if this user may not mount."""
    for command in (("unshare", "-m"), ("unshare", "-rm")):
        probe = [*command, "sh", "-c", "mount -t tmpfs none /mnt"]
        if (
            shutil.which("unshare")
            and subprocess.run(probe, capture_output=True, check=False, timeout=RUN_LIMIT_S).returncode == 0
        ):
            return command
    return None


def unwritable(folder: Path, kind: str, *, everywhere: bool = False) -> tuple[str, Sequence[str]]:
    """A folder that cannot be written, and the prefix of a command for it. With `everywhere` no other folder can."""
    command = _namespace()
    if command is None:
        # In a container without the right to mount, not even root can write here. Other folders can still be written.
        return "/proc/self", ()
    folder.mkdir(exist_ok=True)
    quoted = f"'{folder}'"
    if kind == "read-only":
        steps = [f"mount -t tmpfs -o ro none {quoted}"]
    else:
        steps = [f"mount -t tmpfs -o size=64k none {quoted}", f"head -c 1m /dev/zero > {quoted}/fill 2>/dev/null; true"]
    if everywhere:
        # A test's own folder is below /tmp. It becomes read-only too.
        steps += [f"mount -t tmpfs -o ro none {place}" for place in PLACES if Path(place).is_dir()]
        steps += [
            "mount --rbind /tmp /tmp",
            "mount -o remount,bind,ro /tmp",
            f"mount -o remount,bind,ro {quoted}; true",
        ]
    return str(folder), (*command, "sh", "-c", " && ".join(steps) + ' && cd "$PWD" && exec "$@"', "sh")


KINDS = pytest.mark.parametrize("kind", ["read-only", slow("full")])


# Python uses a folder for temporary files only if it can write a few bytes there.
UNUSABLE = """
import os, tempfile
try:
    print("unusable", tempfile.gettempdir() != os.environ["TMPDIR"])
except FileNotFoundError:
    print("unusable", True)
"""


def assert_ran_or_said(run: Run, out: bytes) -> None:
    """The job ran, with at most one sentence of trouble; or it did not, and one sentence says why and what to do."""
    if run.code == 0:
        assert run.out == out, str(run)
        assert len([line for line in run.said if re.search("temporary folder|cannot be", line)]) <= 1, str(run)
        # A preloaded module may need a temporary folder. Then workers are fresh interpreters, and one line says so.
        assert len(run.execed) <= 1
    else:
        assert run.code == 2, str(run)
        assert len(run.said) == 1, str(run)
        assert re.search("TMPDIR|--log-dir", run.said[0]), str(run)
    assert b"Traceback" not in run.err, str(run)


@pytest.mark.parametrize(
    ("how", "kind"),
    [(LIGHT, "read-only"), (NO_PRELOAD, "full"), slow(LIGHT, "full"), slow(NO_PRELOAD, "read-only")],
    ids=["forked-read-only", "no-preload-full", "forked-full", "no-preload-read-only"],
)
def test_a_job_runs_where_tmpdir_cannot_be_written(tmp_path: Path, kind: str, how: tuple[str, ...]) -> None:
    script(tmp_path, UNUSABLE)
    place, wrap = unwritable(tmp_path / "place", kind)
    env = {"TMPDIR": place}
    expected = fresh(tmp_path, "train.py", env=env, wrap=wrap)
    assert expected.out == b"unusable True\n", str(expected)

    run = worker(tmp_path, "train.py", how=how, env=env, wrap=wrap)

    assert run.code == 0, str(run)
    assert_ran_or_said(run, expected.out)


@KINDS
def test_a_job_that_fails_there_is_reported_with_its_exception(tmp_path: Path, kind: str) -> None:
    script(tmp_path, "def f():\n    raise ValueError('all the same')\nf()\n")

    place, wrap = unwritable(tmp_path / "place", kind)

    run = worker(tmp_path, "train.py", env={"TMPDIR": place}, wrap=wrap)

    assert run.code == 1, str(run)
    assert "raised ValueError: all the same" in str(run)


@KINDS
def test_a_job_runs_where_no_temporary_folder_can_be_written(tmp_path: Path, kind: str) -> None:
    (tmp_path / ".tmp").mkdir()
    script(
        tmp_path,
        "import tempfile\ntry: print(tempfile.gettempdir())\nexcept FileNotFoundError: print('there is none')\n",
    )

    place, wrap = unwritable(tmp_path / "place", kind, everywhere=True)
    expected = fresh(tmp_path, "train.py", env={"TMPDIR": place}, wrap=wrap)
    assert expected.out == b"there is none\n" or _namespace() is None, str(expected)

    run = worker(tmp_path, "train.py", env={"TMPDIR": place}, wrap=wrap)

    assert_ran_or_said(run, expected.out)


def test_a_failure_is_still_reported_where_no_temporary_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    script(tmp_path, "def f():\n    raise ValueError('all the same')\nf()\n")

    place, wrap = unwritable(tmp_path / "place", "read-only", everywhere=True)

    run = worker(tmp_path, "train.py", env={"TMPDIR": place}, wrap=wrap)

    assert run.code == 1, str(run)
    assert "ValueError: all the same" in str(run)


@pytest.mark.slow
def test_with_torch_preloaded_too(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    script(tmp_path, "import torch\nprint(torch.ones(2).sum().item())\n")
    place, wrap = unwritable(tmp_path / "place", "read-only", everywhere=True)
    run = worker(tmp_path, "train.py", how=("--preload", "torch"), env={"TMPDIR": place}, wrap=wrap)

    assert_ran_or_said(run, b"2.0\n")


@pytest.mark.parametrize("value", ["", slow("relative"), slow("/nowhere/at/all"), "/dev/null", slow("with space ü")])
def test_a_tmpdir_that_is_odd_stops_nobody(tmp_path: Path, value: str) -> None:
    (tmp_path / "with space ü").mkdir()
    (tmp_path / "relative").mkdir()
    script(tmp_path, "import os\nprint('ran', os.environ['TMPDIR'])\n")

    run = worker(tmp_path, "train.py", env={"TMPDIR": value})

    assert (run.code, run.out) == (0, f"ran {value}\n".encode()), str(run)
    for folder in ("relative", "with space ü"):
        assert not os.listdir(tmp_path / folder)  # noqa: PTH208
