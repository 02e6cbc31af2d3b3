"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# A suite that runs under nohup, or in the background of a script (`make test &`), ignores these signals. Every job
# that it starts would ignore them too.
for signum in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(signum, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


# A test starts up to a dozen interpreters. Without caches each of them compiles all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before a test imports torch. On a busy machine threads of OpenMP that wait for each other in a loop take four times
# the CPU time of one thread. Jobs do not inherit it (tests/harness.py).
os.environ["OMP_NUM_THREADS"] = "1"

# A child's garbage collector leaves alone what its parent has made. The destructor of a gloo group waits for ever in a
# process that is without the group's threads.
os.register_at_fork(after_in_child=gc.freeze)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs remember there what their programs import: the user's own folder must not get a file of each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect without garbage collection, which would take a fifth of that time and find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        # What was collected lives until the end. Tests must not search it again and again.
        gc.freeze()
        gc.enable()


# A module that imports one of these starts servers: an etcd, the served store, a whole job, a server of S3.
_SERVERS = {"Etcd", "ServerProcess", "Job", "S3"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of modules that start servers or jobs: `make check` leaves them to `make test`.

    Torch at the top of a module in tests/e2e or tests/faults fails them all, since each process of `make test` would
    import it for 2 s, to collect.
    """
    imports_torch = "torch" in sys.modules and not {"tests.unit", "tests.integrations"} & sys.modules.keys()
    for item in items:
        if imports_torch:
            item.add_marker("torch_at_the_top")
        if isinstance(item, pytest.Function) and not _SERVERS.isdisjoint(vars(item.module)):
            item.add_marker("servers")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say it in each test: an error in a process of xdist that collects has no words."""
    if item.get_closest_marker("torch_at_the_top"):
        pytest.fail("collecting these tests has imported torch; import it in the tests that need it", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    """With CI=true nothing may be left out: a skip is a failure."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"skipped under CI=true: {report.longrepr}"
    return report
