"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Under nohup, or in a script's background (`make test &`), as some run a suite, every job would ignore these too.
for signum in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(signum, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    """With CI=true nothing may be left out: a skip is a failure."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"skipped under CI=true: {report.longrepr}"
    return report
