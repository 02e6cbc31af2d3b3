"""docs/security.md names a test for each promise: they are there."""

from __future__ import annotations

import re

from tests.harness import REPOSITORY

HERE = REPOSITORY / "tests"
PAGE = (REPOSITORY / "docs" / "security.md").read_text()


def test_each_promise_names_tests_that_are_there() -> None:
    promises = re.findall(r"^\| .+ \| (.*`test_.*) \|$", PAGE, re.MULTILINE)
    there = {name for path in HERE.rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    there |= {path.name for path in HERE.rglob("test_*.py")}

    assert len(promises) >= 18
    for named in promises:
        assert not {name for name in re.findall(r"`([^`]+)`", named) if name not in there}
