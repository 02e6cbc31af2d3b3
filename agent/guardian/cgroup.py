"""A cgroup (v2) for each generation's processes, where this process may make one.

The cgroup holds every process that a worker starts, also one that has cleared or overwritten its environment. One write
ends all of them. No controller is switched on: limits and accounting stay as they are.

The kernel takes 10 to 30 ms to move a process to another cgroup (Linux 6.18: it waits until all CPUs have seen it), and
none for a child that is born there. So it is the fork server that moves, before it has to fork and while nobody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from elaunch.agent.guardian.guardian import kill_cgroup

# The kernel lets a move wait for so long at most, as far as is known. What has not moved then is ended with the rest.
_MOVE_S_MAX = 5.0


class JobCgroup:
    """The job's cgroup below this process's own. If none can be made, `path` is empty and the methods do nothing."""

    def __init__(self, name: str) -> None:
        own = own_cgroup()
        self.path = str(own / name) if own else ""
        self._moving: threading.Thread | None = None

    def make(self) -> None:
        """Make the cgroup. Call it once the guardian runs, which removes the cgroup."""
        path = Path(self.path)
        try:
            path.mkdir()
            if not (path / "cgroup.kill").exists():  # Linux before 5.14
                path.rmdir()
                self.path = ""
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

    def move(self, pids: Collection[int], generation: int) -> None:
        """Move processes to a generation's cgroup, and do not wait for it: what they fork is born there then."""
        self.wait()
        folder = self.generation(generation)
        if folder and (outside := set(pids).difference(self.pids(generation))):
            moving = threading.Thread(target=_move, args=(outside, folder), name="elaunch-cgroup", daemon=True)
            # Where the system gives no thread (`pids.max`), the workers move themselves.
            with suppress(RuntimeError):
                moving.start()
                self._moving = moving

    def wait(self) -> None:
        """Wait until the processes have moved, if some do."""
        moving, self._moving = self._moving, None
        if moving:
            moving.join(_MOVE_S_MAX)

    def end(self, generation: int, spare: Collection[int], meanwhile: Callable[[], None]) -> None:
        """End all processes of a generation. Those in `spare` move to the next; `meanwhile` as in `kill_cgroup`."""
        if not self.path:
            return
        self.wait()
        if inside := set(spare).intersection(self.pids(generation)):
            _move(inside, self.generation(generation + 1) or self.path)
        kill_cgroup(str(Path(self.path, f"generation_{generation}")), meanwhile)


def _move(pids: Collection[int], folder: str) -> None:
    there = Path(folder, "cgroup.procs")
    for pid in pids:
        # It has ended, or may not be moved. Then the processes that it forks move themselves.
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
