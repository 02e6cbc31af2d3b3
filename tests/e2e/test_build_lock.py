"""A rank that is killed while it builds a torch extension."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, script

pytestmark = pytest.mark.usefixtures("without_torch")

# As torch.utils.cpp_extension.load does it: who makes the lock builds, and all others wait until it is gone.
# torch's own file is read, without the second of importing torch.
TRAIN = """
import os, pathlib, runpy, signal, sys, time

baton = runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2], 0.01)
if baton.try_acquire():
    if os.environ["ELAUNCH_GENERATION"] == "0":
        # Until the other rank waits.
        while not pathlib.Path("waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    pathlib.Path(sys.argv[2]).with_name("built").touch()
    baton.release()
else:
    pathlib.Path("waits").touch()
    baton.wait()
print("loaded", os.environ["ELAUNCH_GENERATION"], flush=True)
"""


def test_the_next_generation_is_warned_of_the_lock_of_a_killed_builder(tmp_path: Path) -> None:
    from importlib.util import find_spec

    torch = find_spec("torch")
    assert torch
    assert torch.origin
    lock = tmp_path / "extensions" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    script(tmp_path, TRAIN)

    with Job(
        tmp_path,
        *("--preload", "json", "--nproc-per-node", "2", "train.py"),
        *(str(Path(torch.origin).parent / "utils" / "file_baton.py"), str(lock)),
        env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
    ) as job:
        job.wait_for_output(f"{lock} is the lock of a torch extension's build")
        lock.unlink()
        assert job.wait() == 0, job.stderr

    assert job.stdout.count("loaded 1") == 2, job.stdout
