"""A cgroup (v2) for each generation's processes, where this process may make one.

The cgroup holds every process that a worker starts, also one that has cleared or overwritten its environment. One write
ends all of them. No controller is switched on: limits and accounting stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elaunch.agent.guardian.guardian import kill_cgroup


class JobCgroup:
    """The job's cgroup below this process's own. If none can be made, `path` is empty and the methods do nothing."""

    def __init__(self, name: str) -> None:
        own = own_cgroup()
        self.path = str(own / name) if own else ""

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

    def end(self, generation: int, meanwhile: Callable[[], None]) -> None:
        """End all processes of a generation; `meanwhile` as in `kill_cgroup`."""
        if self.path:
            kill_cgroup(str(Path(self.path, f"generation_{generation}")), meanwhile)


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
