"""A cgroup (v2) for each generation's processes, where this process may make one.

It holds whatever a worker starts, also what has cleared or overwritten its environment, and ends it in one write. No
controller is switched on: limits and accounting stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elaunch.agent.guardian.guardian import kill_cgroup


class JobCgroup:
    """The job's cgroup below this process's own; `path` is empty where none can be made, and then nothing is done."""

    def __init__(self, name: str) -> None:
        own = _own_cgroup()
        self.path = str(own / name) if own else ""

    def make(self) -> None:
        """Make it, now that somebody is there to remove it."""
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

    def end(self, generation: int, meanwhile: Callable[[], None]) -> None:
        """End all processes of a generation; `meanwhile` as in `kill_cgroup`."""
        if self.path:
            kill_cgroup(str(Path(self.path, f"generation_{generation}")), meanwhile)


def _own_cgroup() -> Path | None:
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
