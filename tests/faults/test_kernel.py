"""The kernel's limits: a worker that is killed for memory, and a host that allows no other process."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.processes import Watched
from tests.harness import LIGHT, Job, script, wait_for

GREEDY = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(1000)
x = bytearray(1000 << 20)
for i in range(0, len(x), 4096):
    x[i] = 1
print("survived")
"""


@pytest.fixture
def tight_memory() -> Iterator[Path]:
    """The folder of a memory cgroup. Its limit is far above what the worker store needs: the worker is to be killed."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root, f"elaunch-test-{secrets.token_hex(4)}")
        with suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists():
                (folder / limit).write_text(str(500 << 20))
                yield folder
                wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the memory cgroup to empty")  # noqa: B023
                folder.rmdir()
                return
            folder.rmdir()
    pytest.skip("this user may make no memory cgroup")


def test_a_worker_killed_for_memory_is_distinguished_from_one_killed_by_hand(
    tmp_path: Path, tight_memory: Path
) -> None:
    def enter() -> None:
        (tight_memory / "cgroup.procs").write_text(str(os.getpid()))

    script(tmp_path, GREEDY)

    options = ("--no-preload", "--nproc-per-node", "2", "--max-restarts", "0")
    with Job(tmp_path, *options, "train.py", preexec_fn=enter) as job:
        assert job.wait() == 1

    assert "survived" not in job.output
    logged = (
        r"rank 1 .* was killed by SIGKILL \(out of memory, per the kernel log; it held \d+(\.\d)? MiB; its cgroup may"
        r" hold 500 MiB, of which (4\d\d|500) MiB were used\)"
    )
    assert re.search(logged, job.output), job.output
    assert re.search(r"^Next step: give the job more memory \(its limit is 500 MiB\)", job.output, re.MULTILINE)


# No other user's, and another one for each limit: the kernel counts the processes of a user.
USER = 54_321
# The files of this checkout may be closed to others. Not CAP_SYS_RESOURCE, to which the limit does not apply.
RIGHTS = "+dac_override"
_TOOLS = all(map(shutil.which, ("setpriv", "prlimit")))


@pytest.mark.skipif(os.geteuid() != 0 or not _TOOLS, reason="another user's limit needs root, setpriv and prlimit")
@pytest.mark.parametrize("most", [1, 3, 5])
def test_a_limit_of_processes_is_a_sentence_wherever_it_strikes(most: int, tmp_path: Path) -> None:
    user = ("setpriv", f"--reuid={USER + most}", "--clear-groups", f"--inh-caps={RIGHTS}", f"--ambient-caps={RIGHTS}")

    with Watched(tmp_path, *LIGHT, "-m", "this", prefix=(*user, "prlimit", f"--nproc={most}")) as job:
        code = job.wait()

        assert "Traceback" not in job.output
        job.assert_nothing_is_left()
    if "Beautiful is better" not in job.stdout:
        assert code in (1, 3)
        logged = (f"(ulimit -u is {most}, ", "raise the limit of processes and threads (ulimit -u, ")
        assert any(words in job.stderr for words in logged), job.stderr
