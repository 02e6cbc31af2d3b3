"""agent.answers.usage: what is not known of a host is left out of the answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import psutil
import pytest

from elaunch.agent.answers.usage import with_usage
from elaunch.rendezvous.rules.reports import NodeReport, RankReport
from tests.harness import RUN_LIMIT_S

# In its own view of the processes, as systemd's ProcSubset=pid gives it to a service.
ONLY_PROCESSES = 'mount -t proc -o subset=pid proc /proc || exit 77; ! test -e /proc/meminfo && exec "$@"'
ASK = """
import os
from tests.unit.agent.answers.test_usage import report
from elaunch.agent.answers.usage import with_usage
told = with_usage(report(os.getpid()))
assert told.memory_bytes is None and told.ranks[0].memory_bytes > 0, told
"""


def report(pid: int) -> NodeReport:
    return NodeReport("node-a-01234567", "node-a", 1, "running", 1.0, ranks=(RankReport(0, 0, pid),))


def test_a_host_and_its_ranks_have_their_memory_and_load() -> None:
    told = with_usage(report(os.getpid()))

    assert told.memory_bytes == psutil.virtual_memory().total
    assert told.load is not None
    assert (told.ranks[0].memory_bytes or 0) > 1 << 20


def test_a_process_that_is_gone_has_no_memory() -> None:
    assert with_usage(report(2**22 - 1)).ranks[0].memory_bytes is None


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a mount namespace needs root and unshare")
def test_a_host_that_hides_its_memory_ends_no_job() -> None:
    words = (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        ONLY_PROCESSES,
        "sh",
        sys.executable,
        "-c",
        ASK,
    )
    asked = subprocess.run(words, capture_output=True, text=True, check=False, timeout=RUN_LIMIT_S)

    if asked.returncode == 77:
        pytest.skip("this kernel cannot mount a /proc without the host's files")
    assert asked.returncode == 0, asked.stderr
