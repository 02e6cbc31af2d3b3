"""A cgroup (v2) for each generation's processes, where this process may make one.

The cgroup holds every process that a worker starts, also one that has cleared or overwritten its environment. One write
ends all of them. No controller is switched on: limits and accounting stay as they are.

The kernel takes 8 to 30 ms to move a process to another cgroup (Linux 6.18: it waits until all CPUs have seen it), and
none for a child that is born there. So it is the fork server that moves, before it has to fork and while nobody waits.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from elaunch.agent.guardian.guardian import kill_cgroup

# A move takes longer where the kernel is short of memory, or others change cgroups all the time. It is not waited for
# longer than this at the end of a generation.
_MOVE_S_MAX = 1.0
_SLICE_S = 0.005
_LOCK_S_MAX = 0.2


class JobCgroup:
    """The job's cgroup below this process's own. If none can be made, `path` is empty and the methods do nothing."""

    def __init__(self, name: str) -> None:
        own = own_cgroup()
        self.path = str(own / name) if own else ""
        self._moving: threading.Thread | None = None

    def make(self) -> None:
        """Make the cgroup. Call it once the guardian runs, which removes the cgroup.

        It is locked as long as this process lives: a later guardian removes one that is empty and not locked.
        """
        path = Path(self.path)
        try:
            path.mkdir()
            if not (path / "cgroup.kill").exists():  # Linux before 5.14
                path.rmdir()
                self.path = ""
                return
            while not _is_locked(path):
                path.mkdir()
        except OSError:
            self.path = ""

    def generation(self, generation: int) -> str:
        """The folder of a generation's cgroup, made if need be; empty without one."""
        if not self.path:
            return ""
        leaf = Path(self.path, f"generation_{generation}")
        try:
            leaf.mkdir(exist_ok=True)
        except OSError:
            return ""
        return str(leaf)

    def pids(self, generation: int) -> list[int]:
        """The processes of a generation; none without a cgroup."""
        if not self.path:
            return []
        try:
            return [int(pid) for pid in Path(self.path, f"generation_{generation}", "cgroup.procs").read_text().split()]
        except (OSError, ValueError):
            return []

    @property
    def is_moving(self) -> bool:
        """Whether processes are still on their way."""
        return self._moving is not None and self._moving.is_alive()

    def move(self, pids: Collection[int], generation: int) -> bool:
        """Move processes to a generation's cgroup, and do not wait for it: what they fork is born there then.

        Returns whether they are there or on their way. Nothing moves while others do.
        """
        folder = self.generation(generation)
        if self.is_moving or not folder:
            return False
        if outside := set(pids).difference(self.pids(generation)):
            moving = threading.Thread(target=_move, args=(outside, folder), name="elaunch-cgroup", daemon=True)
            try:
                moving.start()
            except RuntimeError:
                # The system gives no thread (`pids.max`).
                return False
            self._moving = moving
        return True

    def release(self, pid: int) -> None:
        """Move a process out, which outlives the job."""
        if self.path:
            if self._moving:
                self._moving.join(_MOVE_S_MAX)
            _move([pid], str(Path(self.path).parent))

    def end(self, generation: int, spare: Collection[int], meanwhile: Callable[[], None]) -> None:
        """End all processes of a generation. Those in `spare` move to the next; `meanwhile` as in `kill_cgroup`.

        One that does not get out within a second ends with the generation, as a fork server that was killed.
        """
        if self.path:
            self._move_out(generation, spare, meanwhile)
            kill_cgroup(str(Path(self.path, f"generation_{generation}")), meanwhile)

    def _move_out(self, generation: int, spare: Collection[int], meanwhile: Callable[[], None]) -> None:
        until_s = time.monotonic() + _MOVE_S_MAX
        while time.monotonic() < until_s:
            if not self.is_moving:
                inside = set(spare).intersection(self.pids(generation))
                if not inside:
                    return
                if not self.move(inside, generation + 1):
                    _move(inside, self.path)
                    return
            meanwhile()
            if self._moving:
                self._moving.join(_SLICE_S)


def _is_locked(folder: Path) -> bool:
    """Lock `folder` as long as this process lives; False if a guardian has removed it just before."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    # A guardian holds it for a moment, but any user may hold it for ever. The cgroup is of use without the lock too.
    until_s = time.monotonic() + _LOCK_S_MAX
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until_s:
                time.sleep(_SLICE_S)
                continue
        except OSError:
            pass
        break
    if folder.exists():
        return True
    os.close(descriptor)
    return False


def _move(pids: Collection[int], folder: str) -> None:
    there = Path(folder, "cgroup.procs")
    for pid in pids:
        # One that has ended needs no move. What another one forks moves itself.
        with suppress(OSError):
            there.write_text(str(pid))


def own_cgroup() -> Path | None:
    """This process's folder in the cgroup2 hierarchy, wherever that is mounted."""
    try:
        # Folder names in these files may be in any encoding.
        groups = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
        own = next(line for line in groups.splitlines() if line.startswith("0::"))
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            left, _, right = line.partition(" - ")
            if right.startswith("cgroup2 "):
                root, mount = left.split()[3:5]
                # In a container the mount may show a part of the tree only.
                return Path(mount) / Path(own[3:]).relative_to(root)
    except (OSError, StopIteration, ValueError):
        return None
    return None
