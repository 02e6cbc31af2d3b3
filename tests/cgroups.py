"""Cgroups (v2) below this process's own, for tests."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_EMPTY_S = 5.0


def own_cgroup() -> Path | None:
    """This process's folder in the cgroup2 hierarchy, wherever that is mounted."""
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), None)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if own and right.startswith("cgroup2 "):
            root, mount = left.split()[3:5]
            # In a container the mount may show a part of the tree only.
            with suppress(ValueError):
                return Path(mount) / Path(own).relative_to(root)
    return None


def make_cgroup(name: str) -> Path | None:
    """A new cgroup of that name; None where this user may make none, or the kernel is older than 5.14."""
    own = own_cgroup()
    if own is None:
        return None
    folder = own / name
    try:
        folder.mkdir()
    except OSError:
        return None
    if (folder / "cgroup.kill").exists():
        return folder
    folder.rmdir()
    return None


def kill_cgroup(folder: Path) -> None:
    """SIGKILL all processes of the cgroup and below, wait until they are gone, and remove it."""
    with suppress(OSError):
        (folder / "cgroup.kill").write_text("1")
        until_s = time.monotonic() + _EMPTY_S
        while "populated 1" in (folder / "cgroup.events").read_text() and time.monotonic() < until_s:
            time.sleep(0.001)
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(path).rmdir()
