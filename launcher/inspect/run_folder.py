"""What a run left on disk: its folder, the other nodes' folders of the same job, metrics, logs and stacks.

Files may be huge, torn, or not what they are called: every read has a limit, and only regular files are opened.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from elaunch.launcher.errors import UsageError
from elaunch.launcher.inspect.node_log import NodeFolder, PastEvent, node_folder, text

TIMELINE = "timeline.jsonl"
STACKS = "stacks.txt"
# A week of a node's events is some 10 MB.
_BYTES_MAX = 256 << 20
# A line with a traceback has 64 kB.
_LINE_BYTES_MAX = 1 << 20
TAIL_BYTES = 16 << 10
# Folders of one log folder that are looked into.
_FOLDERS_MAX = 2000
# `2026-11-23_11-32-27_<run id>_<8 digits>`; several nodes have their host in it.
_NAME = re.compile(r"(?:\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_)?(?P<run>.+)_[0-9a-f]{8}")


def find(path: Path) -> Path:
    """The run's folder that `path` means: itself, or the newest run of a --log-dir. Raises UsageError."""
    way_out = "give a run's folder below --log-dir, or the --log-dir"
    try:
        if not path.is_dir():
            what = "is no folder" if path.exists() else "does not exist"
            raise UsageError(f"report: {path} {what}; {way_out}")
        runs = [path] if (path / TIMELINE).is_file() else _runs(path)
        if not runs:
            raise UsageError(f"report: {path} holds no run with a {TIMELINE}; {way_out}")
        return max(runs, key=lambda run: (run / TIMELINE).stat().st_mtime).resolve()
    except OSError as error:
        raise UsageError(f"report: {path} cannot be read ({error.strerror}); {way_out}") from None


def read_job(folders: Sequence[Path]) -> list[NodeFolder]:
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
    others = [read_folder(path) for path in sorted(beside - set(folders)) if _may_belong(path, job)]
    while joined := [other for other in others if any(_is_one_job(one, other) for one in job)]:
        job += joined
        others = [other for other in others if other not in joined]
    return job


def read_folder(folder: Path) -> NodeFolder:
    """One node's folder. Without a timeline that can be read it has no events."""
    name = _NAME.fullmatch(folder.name)
    return node_folder(str(folder), name["run"] if name else folder.name, lines_of(folder / TIMELINE))


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a regular file; nothing if it cannot be read. A line that is too long comes in pieces."""
    descriptor = _opened(path)
    if descriptor is None:
        return
    with os.fdopen(descriptor, "rb") as file, suppress(OSError):
        while file.tell() < _BYTES_MAX and (line := file.readline(_LINE_BYTES_MAX)):
            yield line


def tail(path: Path) -> str | None:
    """The last lines of a log, without half a line at its beginning; None if there is no log.

    No link is followed: the folder may be another user's, and the page must not show what that user cannot read. So
    `path` is one without links.
    """
    descriptor = _opened(path)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            if Path(f"/proc/self/fd/{descriptor}").readlink() != path:
                return None
            size = os.fstat(descriptor).st_size
            file.seek(max(size - TAIL_BYTES, 0))
            content = file.read(TAIL_BYTES)
        except OSError:
            return None
    if size > TAIL_BYTES:
        content = content.partition(b"\n")[2] or content
    return content.decode(errors="replace").replace("\r\n", "\n")


def metrics_path(started: PastEvent) -> Path | None:
    """The metrics file of the bundled trainer, by its command line (in `started`); None if there is none."""
    out = re.search(r"--out[= ]('[^']+'|\S+)", started.text("command"))
    path = Path(started.text("cwd") or ".", out[1].strip("'"), "metrics.jsonl") if out else None
    return path if path and "\0" not in str(path) and _is_file(path) else None


def has_content(path: Path) -> bool:
    """Whether it is a regular file, no link, that is not empty."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def _runs(folder: Path) -> list[Path]:
    try:
        entries = sorted((entry for entry in os.scandir(folder) if not entry.is_symlink()), key=lambda e: e.name)
    except OSError:
        return []
    return [Path(entry.path) for entry in entries[-_FOLDERS_MAX:] if _is_file(Path(entry.path, TIMELINE))]


def _may_belong(path: Path, job: Sequence[NodeFolder]) -> bool:
    """Whether a folder's name allows that it is of the same job: other jobs' files are not read."""
    name = _NAME.fullmatch(path.name)
    run = name["run"] if name else path.name
    wanted = {folder.started.text("run_id").replace("/", "_") or folder.run_id for folder in job}
    return any(run == each or run.startswith(f"{each}_") for each in wanted)


def _is_one_job(one: NodeFolder, other: NodeFolder) -> bool:
    """Whether two folders are of one job: one run id, and one's node in a table of the other. Names are used again."""
    run_id = one.started.text("run_id")
    if not other.events or not run_id or other.started.text("run_id") != run_id:
        return False
    return bool(_own_ids(other) & _seats(one) or _own_ids(one) & _seats(other))


def _own_ids(folder: NodeFolder) -> set[str]:
    """The names that the folder's agent had in the job."""
    return {event.text("node_id") for event in folder.events if event.event == "joined"} - {""}


def _seats(folder: NodeFolder) -> set[str]:
    """The names of all nodes in the folder's tables."""
    tables = [event.items("nodes") for event in folder.events if event.event in ("sealed", "spare")]
    return {text(seat.get("node_id")) for table in tables for seat in table if isinstance(seat, dict)} - {""}


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _opened(path: Path) -> int | None:
    """A descriptor of a regular file: a pipe would wait for its writer, and a device has no end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None
