"""A worker that crashes in native code leaves its Python stack for the report, and nothing else that is new."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import Job, finished, script, slow

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload", "json")
EXEC = ("--no-preload",)
BOTH = pytest.mark.parametrize("start", [LIGHT, slow(EXEC)], ids=["forked", "exec'd"])

CRASHES = """
import ctypes, os, sys
BEFORE

def forward():
    print("before the crash", file=sys.stderr)
    ctypes.string_at(0)

forward()
"""
# The numbers of closed descriptors are taken again by files.
TAKES_FDS = """
os.closerange(3, 4096)
os.mkdir("files")
files = [open(f"files/{number}", "w") for number in range(500)]
"""
CHILD = """
import ctypes, os, sys

def inside_the_child():
    ctypes.string_at(0)

child = os.fork()
if not child:
    inside_the_child()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11
END
"""


def crashed(folder: Path, start: tuple[str, ...], text: str, env: dict[str, str] | None = None) -> tuple[Job, str, str]:
    """The job, what it wrote before the report, and the report."""
    script(folder, text)
    job = finished(folder, *start, "--max-restarts", "0", "train.py", env=env)
    before, line, report = job.stderr.partition("=" * 72)
    assert line, job.output
    return job, before, report


@BOTH
def test_the_report_has_the_stack_and_the_users_innermost_line(start: tuple[str, ...], tmp_path: Path) -> None:
    job, before, report = crashed(tmp_path, start, CRASHES.replace("BEFORE", ""))

    assert re.search(r"was killed by SIGSEGV \(crashed in \S+/train\.py:7 in forward\) in generation 0\.", report), (
        job.output
    )
    assert re.search(
        r'  traceback :\n    Fatal Python error: Segmentation fault\n.*train\.py", line 7 in forward', report, re.S
    )
    assert "exitcode  : -11" in report
    assert "before the crash\n" in before
    assert "Fatal Python error" not in before, "a fresh interpreter would not have written it"


@pytest.mark.parametrize(
    ("before", "env"),
    [("import faulthandler; faulthandler.enable()", {}), ("", {"PYTHONFAULTHANDLER": "1"})],
    ids=["enabled", "PYTHONFAULTHANDLER"],
)
def test_a_user_of_faulthandler_gets_the_stack_on_stderr_as_ever(
    before: str, env: dict[str, str], tmp_path: Path
) -> None:
    _, written, report = crashed(tmp_path, EXEC, CRASHES.replace("BEFORE", before), env)

    assert written.count("Fatal Python error: Segmentation fault") == 1
    assert report.count("Fatal Python error: Segmentation fault") == 1
    assert re.search(r"\(crashed in \S+/train\.py:7 in forward\)", report)


def test_a_program_that_turns_faulthandler_off_crashes_without_a_stack(tmp_path: Path) -> None:
    before = "import faulthandler; faulthandler.disable()"

    _, _, report = crashed(tmp_path, EXEC, CRASHES.replace("BEFORE", before))

    assert "was killed by SIGSEGV in generation 0" in report


@BOTH
def test_the_stack_of_a_program_that_has_closed_everything_gets_into_no_file_of_its_own(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    _, _, report = crashed(tmp_path, start, CRASHES.replace("BEFORE", TAKES_FDS))

    assert "was killed by SIGSEGV" in report
    written = {path.name for path in (tmp_path / "files").iterdir() if path.stat().st_size}
    assert written == set()


def test_a_crash_of_a_child_process_is_not_the_workers(tmp_path: Path) -> None:
    _, _, report = crashed(tmp_path, EXEC, CHILD.replace("END", "raise SystemExit(3)"))

    assert "exited with code 3 in generation 0" in report
    assert "inside_the_child" not in report


def test_the_last_crash_is_the_workers_own(tmp_path: Path) -> None:
    _, _, report = crashed(tmp_path, EXEC, CHILD.replace("END", "def own():\n    ctypes.string_at(0)\nown()"))

    assert re.search(r"\(crashed in \S+/train\.py:\d+ in own\)", report)
    assert "inside_the_child" not in report
