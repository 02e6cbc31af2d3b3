"""What a check finds: a grade, a sentence, and the way out. Checks of this host: shared memory and limits."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from elaunch.rendezvous.format import bytes_text

_MIB = 1 << 20
# A worker's share of /dev/shm: NCCL's segments take up to 10 MB for each channel and peer, a data loader's processes
# pass two batches each through it. Docker's default is 64 MiB for the whole container.
_SHM_MIN, _SHM_WANTED, _SHM_NODE_WANTED = 32 * _MIB, 256 * _MIB, 1024 * _MIB
# A limit, what each worker and the agent need at least, and what they may need.
# The agent's own open files: pipes, a link and log files each; and what a data loader's tensors take beside them.
FILES = ("open files (ulimit -n)", (6, 64), (128, 512))
# Threads of one worker: OpenMP, NCCL, gloo, autograd, data loaders.
THREADS = ("this user's threads (ulimit -u)", (32, 64), (256, 64))

_GROW_SHM = "mount -o remount,size=16G /dev/shm; docker run --shm-size 16g; in a pod an emptyDir with medium Memory"


class Grade(str, Enum):
    """How a check ended. Only `BAD` means that training fails, or cannot start."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `advice` is the way out; it is empty for a check that is ok."""

    grade: Grade
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Needs:
    """What the job with these options needs of this node.

    `workers` is their number here. `ports` are those that MASTER_PORT may be; empty for any. `uses_python` is false for
    a program that is a command. `wants_gpus`: the user requested one worker per GPU.
    """

    workers: int = 1
    nodes_max: int = 1
    ports: tuple[int, ...] = ()
    interpreter: str = ""
    uses_python: bool = True
    wants_gpus: bool = False

    def need(self, what: str) -> str:
        return f"{self.workers} worker{' needs' if self.workers == 1 else 's need'} {what}"


def ok(found: str) -> Finding:
    return Finding(Grade.OK, found)


def warn(found: str, advice: str) -> Finding:
    return Finding(Grade.WARN, found, advice)


def bad(found: str, advice: str) -> Finding:
    return Finding(Grade.BAD, found, advice)


def worst(findings: Iterable[Finding]) -> Grade:
    """The worst of their grades; OK if there are none."""
    return max((each.grade for each in findings), key=[*Grade].index, default=Grade.OK)


def check_shm(needs: Needs, path: str = "/dev/shm") -> Iterator[Finding]:
    """Whether NCCL and data loaders find room; without it a bus error ends the job."""
    if not os.access(path, os.W_OK | os.X_OK):
        yield bad(f"{path} cannot be used by user {os.geteuid()}", _GROW_SHM)
        return
    known = os.statvfs(path)
    free, total = known.f_bavail * known.f_frsize, known.f_blocks * known.f_frsize
    text = f"{bytes_text(free)} of {bytes_text(total)} are free in {path}"
    least, wanted = _SHM_MIN * needs.workers, max(_SHM_WANTED * needs.workers, _SHM_NODE_WANTED)
    if free < least:
        yield bad(f"{text}; {needs.need(bytes_text(least))}, or a bus error (SIGBUS) ends the job", _GROW_SHM)
    elif free < wanted:
        yield warn(f"{text}; data loaders and NCCL may need {bytes_text(wanted)}", _GROW_SHM)
    else:
        yield ok(text)


def check_limits(needs: Needs) -> Iterator[Finding]:
    """Whether the limits of open files and of threads are enough."""
    yield judge_limit(FILES, _soft(resource.RLIMIT_NOFILE), needs)
    yield judge_limit(THREADS, sys.maxsize if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC), needs)


def judge_limit(rule: tuple[str, tuple[int, int], tuple[int, int]], limit: int, needs: Needs) -> Finding:
    """The finding about a limit, `sys.maxsize` if there is none."""
    what, *numbers = rule
    least, wanted = (each * needs.workers + own for each, own in numbers)
    text = f"the limit of {what} is {'none' if limit == sys.maxsize else limit}"
    if limit < least:
        return bad(f"{text}, and {needs.need(str(least))}", f"raise it to {wanted}")
    if limit < wanted:
        return warn(f"{text}: with data loaders {needs.need(str(wanted))}", f"raise it to {wanted}")
    return ok(text)


def _soft(kind: int) -> int:
    limit = resource.getrlimit(kind)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
