"""One run of a program, in a copy of its folder: what its ranks say, and what it leaves."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.ecosystem.registry import FOLDER, Program
from tests.harness import COMMAND, Job, wait_for

_STEP = re.compile(r"step (\d+) rank (\d+) pid (\d+) at ([\d.]+)\n")
# torch.compile's cache, which the next run uses. torch makes the folder with the first optimizer, also in plain Python.
_INDUCTOR = "torchinductor_*"
# In the job's own mount namespace /dev/shm is a folder, so that only this job's files are in it.
_OWN_MEMORY = 'mount --bind "$0" /dev/shm && exec "$@"'


@dataclass(frozen=True)
class Step:
    """What a rank says at a step's end."""

    number: int
    rank: int
    pid: int
    at_s: float


class Place:
    """The folders of one run."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.program = program
        self.folder = folder / "programs"
        shutil.copytree(FOLDER, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        # A socket's path has at most 107 characters, and DataLoaders make sockets there.
        self.temporary = Path(tempfile.mkdtemp(prefix="eco", dir="/tmp"))
        self.memory = folder / "shm"
        self.memory.mkdir()
        self.cache = folder / "cache"

    def job(self, *options: str, env: Mapping[str, str] | None = None, launcher: Sequence[str] = COMMAND) -> Job:
        """Start the program there."""
        prefix = ("unshare", "--mount", "sh", "-c", _OWN_MEMORY, str(self.memory)) if os.geteuid() == 0 else ()
        words = (*launcher, "--nproc-per-node", str(self.program.workers), *options, *self.program.words)
        own = {
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(self.cache),
            "HOME": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "WANDB_SILENT": "true",
            "WANDB_MODE": "offline",
            "OMP_NUM_THREADS": "1",
            "PET_VERBOSE": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return _Started(self.folder, *words, env={**own, **(env or {})}, prefix=prefix)

    def left(self) -> list[str]:
        """What is left in the temporary folder and in shared memory, but for what the library leaves on purpose."""
        found = [path.name for path in self.temporary.iterdir()]
        left_on_purpose = (_INDUCTOR, *self.program.leaves)
        kept = [name for name in found if not any(fnmatch(name, pattern) for pattern in left_on_purpose)]
        return sorted([*kept, *(f"/dev/shm/{path.name}" for path in self.memory.iterdir())])

    def remove(self) -> None:
        """Remove the temporary folder. The rest is the test's own."""
        shutil.rmtree(self.temporary, ignore_errors=True)


class _Started(Job):
    command = ()


def steps(job: Job) -> list[Step]:
    """All steps up to now, in the order of arrival."""
    return [Step(int(n), int(rank), int(pid), float(at_s)) for n, rank, pid, at_s in _STEP.findall(job.stdout)]


def steps_of_all(job: Job, program: Program, but: Sequence[int] = ()) -> dict[int, Step]:
    """The first step of each rank in processes other than `but`, once all ranks have made one."""

    def found() -> dict[int, Step] | None:
        first: dict[int, Step] = {}
        for step in steps(job):
            if step.pid not in but and (step.rank not in first or first[step.rank].pid != step.pid):
                first[step.rank] = step
        is_whole = len(first) == program.ranks
        assert is_whole or job.process.poll() is None, f"ended before all ranks made a step:\n{job.output}"
        return first if is_whole else None

    return wait_for(found, "a step of each rank", program.first_step_s)
