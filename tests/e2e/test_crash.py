"""A worker that crashes in native code leaves its Python stack for the report, and nothing else that is new."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import FRESH, LIGHT, Job, finished, script, slow

pytestmark = pytest.mark.usefixtures("without_torch")

BOTH = pytest.mark.parametrize("start", [LIGHT, slow(FRESH)], ids=["forked", "exec'd"])

CRASHES = """
import ctypes, os, sys
BEFORE

def forward():
    print("before the crash", file=sys.stderr)
    ctypes.string_at(0)

forward()
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
