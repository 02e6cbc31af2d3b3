"""What elaunch says if this host gives it no other process or thread."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.faults.processes import Watched
from tests.harness import LIGHT

# Nobody's, and another one for each limit: the kernel counts the processes of a user.
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
        said = (f"(ulimit -u is {most}, ", "raise the limit of processes and threads (ulimit -u, ")
        assert any(words in job.stderr for words in said), job.stderr
