"""What a run left on disk: its folder, the other nodes' folders of the same job, metrics and logs.

Files may be huge, torn, or not what they are called: every read has a limit, and only regular files are opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from elaunch.launcher.errors import UsageError
from elaunch.launcher.inspect.node_log import NodeLog, PastEvent, node_log, text

# Unlike `Path.is_file`, it is false where the folder cannot be read.
_is_file = os.path.isfile
TIMELINE = "timeline.jsonl"
STACKS = "stacks.txt"
# A week of a node's events is some 10 MB.
_BYTES_MAX = 256 << 20
# A line with a traceback has 64 kB.
_LINE_BYTES_MAX = 1 << 20
# Folders of one log folder that are looked into.
_FOLDERS_MAX = 2000


def find(path: Path) -> Path:
    """The run's folder that `path` means: itself, or the newest run of a --log-dir. Raises UsageError."""
    runs = [path] if _is_file(path / TIMELINE) else _runs(path)
    if not runs:
        raise UsageError(
            f"report: {path} holds no run with a {TIMELINE}; give a run's folder below --log-dir, or the --log-dir"
        )
    return max(runs, key=lambda run: (run / TIMELINE).stat().st_mtime).resolve()


def read_job(folders: Sequence[Path]) -> list[NodeLog]:
    """The given folders, and those beside them of the same job's other nodes. Raises UsageError without any event."""
    given = [read_folder(folder) for folder in folders]
    job = [folder for folder in given if folder.events]
    if not job:
        raise UsageError(
            f"report: {folders[0] / TIMELINE} holds no event: the job's agent ended before its first, or the file is"
            " another program's"
        )
    # Whoever may write into a shared --log-dir can name a folder as a job's.
    beside = {
        path.resolve()
        for folder in folders
        for path in _runs(folder.parent)
        if path.stat().st_uid == folder.stat().st_uid
    }
    # Each folder has the job's name in its own, and other jobs' files are not read.
    names = {log.started.text("run_id").replace("/", "_") for log in job} - {""}
    named = sorted(path for path in beside - set(folders) if any(name in path.name for name in names))
    # A name may be used again: a later run has other nodes.
    known = {node for log in job for node in _nodes(log)}
    return job + [log for log in map(read_folder, named) if not known.isdisjoint(_nodes(log))]


def read_folder(folder: Path) -> NodeLog:
    """One node's log. Without a timeline that can be read it has no events."""
    return node_log(str(folder), lines_of(folder / TIMELINE))


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a regular file; nothing if it cannot be read. A line that is too long comes in pieces."""
    # A pipe would wait for its writer, and a device has no end.
    if not _is_file(path):
        return
    with suppress(OSError), path.open("rb") as file:
        while file.tell() < _BYTES_MAX and (line := file.readline(_LINE_BYTES_MAX)):
            yield line


def metrics_path(started: PastEvent) -> Path | None:
    """The metrics file of the bundled trainer, by its command line (in `started`); None if there is none."""
    out = re.search(r"--out[= ]('[^']+'|\S+)", started.text("command"))
    path = Path(started.text("cwd") or ".", out[1].strip("'"), "metrics.jsonl") if out else None
    return path if path and _is_file(path) else None


def has_content(path: Path) -> bool:
    """Whether it is a regular file, no link, that is not empty."""
    return _is_file(path) and not path.is_symlink() and path.stat().st_size > 0


def _runs(folder: Path) -> list[Path]:
    try:
        entries = sorted((entry for entry in os.scandir(folder) if not entry.is_symlink()), key=lambda e: e.name)
    except OSError:
        return []
    return [Path(entry.path) for entry in entries[-_FOLDERS_MAX:] if _is_file(Path(entry.path, TIMELINE))]


def _nodes(log: NodeLog) -> Iterator[tuple[str, str]]:
    """The job's name with the name of each of its nodes, as the folder's agent has joined or seen in tables."""
    run_id = log.started.text("run_id")
    tables = [event.items("nodes") for event in log.events if event.event in ("sealed", "spare")]
    names = [text(seat.get("node_id")) for table in tables for seat in table if isinstance(seat, dict)]
    names += [event.text("node_id") for event in log.events if event.event == "joined"]
    return ((run_id, name) for name in names if run_id and name)
