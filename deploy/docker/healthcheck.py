"""Whether the container's agent runs: exit code 1 where process 1 has no child that is awake (stopped, or a zombie)."""

import sys
from pathlib import Path


def awake(stat: Path) -> bool:
    """Whether that process is process 1's child and could do something now."""
    try:
        state, parent = stat.read_bytes().rpartition(b")")[2].split()[:2]
    except OSError:
        return False
    return parent == b"1" and state in (b"R", b"S", b"D", b"I")


if __name__ == "__main__":
    sys.exit(not any(awake(stat) for stat in Path("/proc").glob("[0-9]*/stat")))
