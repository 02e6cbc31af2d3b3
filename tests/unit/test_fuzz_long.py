"""The fuzz tests with many examples, other ones each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# 2000 examples of one file take minutes.
LIMIT_S = 3600
FILES = sorted(str(path.relative_to(HERE)) for path in HERE.rglob("test_fuzz.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_examples_find_nothing(name: str) -> None:
    env = {"ELAUNCH_FUZZ_EXAMPLES": "2000", **os.environ}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        str(HERE / name),
    ]

    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )

    assert done.returncode == 0, done.stdout
