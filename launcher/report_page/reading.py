"""Reads what a run left on disk: its folder, other nodes' folders of the same job, metrics, the ends of logs.

Files may be huge, torn, or not what they are called: every read has a limit, and only regular files are opened.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elaunch.launcher.errors import UsageError
from elaunch.launcher.report_page.events import PastEvent, ReadLines, read_lines, text
from elaunch.launcher.report_page.history import NodeFolder
from elaunch.launcher.report_page.metrics import StepMetrics

TIMELINE = "timeline.jsonl"
STACKS = "stacks.txt"
# The trainer's folder of a profile in a generation's folder, and its files there.
PROFILE, PROFILE_RECORD, PROFILE_TRACE = "profile", "profile.json", "trace.json.gz"
# A week of a node's events is some 10 MB. A timeline is kept in memory; of metrics only sums are.
TIMELINE_BYTES_MAX = 64 << 20
METRICS_BYTES_MAX = 4 << 30
PROFILE_BYTES_MAX = 16 << 20
# A line with a traceback has 64 kB.
LINE_BYTES_MAX = 1 << 20
TAIL_BYTES = 16 << 10
_PROFILES_MAX = 8
# Folders of one log folder that are looked into.
_FOLDERS_MAX = 2000
# Two agents of one job are at work at the same time, or one replaces the other within this.
_GAP_S = 300.0
# `2026-11-23_11-32-27_<run id>_<8 digits>`; older releases wrote no date, and several nodes have their host in it.
_NAME = re.compile(r"(?:\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_)?(?P<run>.+)_[0-9a-f]{8}")


@dataclass(frozen=True)
class LogFiles:
    """The files of one rank in one generation that are there and hold something. Paths as they are opened."""

    generation: int
    rank: int
    paths: tuple[str, ...]


def find(path: Path) -> Path:
    """The run's folder that `path` means: itself, or the newest run of a --log-dir. Raises UsageError."""
    try:
        return _found(path)
    except OSError as error:
        raise UsageError(f"report: {path} cannot be read ({error.strerror}); give a folder that you may read") from None


def _found(path: Path) -> Path:
    """As `find`. Raises OSError too."""
    if (path / TIMELINE).is_file():
        return path.resolve()
    if not path.exists():
        raise UsageError(f"report: there is no folder {path}; give a run's folder below --log-dir, or the --log-dir")
    if not path.is_dir():
        raise UsageError(f"report: {path} is no folder; give a run's folder below --log-dir, or the --log-dir")
    latest = path / "latest"
    if (latest / TIMELINE).is_file():
        return latest.resolve()
    runs = sorted(_runs(path), key=_written_at)
    if not runs:
        raise UsageError(
            f"report: {path} holds no run with a {TIMELINE}; give the --log-dir of a job, or one of the folders in it"
        )
    return runs[-1].resolve()


def read_job(folders: Sequence[Path]) -> list[NodeFolder]:
    """The given folders, and those beside them of the same job's other nodes. Raises UsageError without any event."""
    given = [read_folder(folder) for folder in folders]
    if not any(folder.lines.events for folder in given):
        raise UsageError(
            f"report: {folders[0] / TIMELINE} holds no event: the job's agent ended before its first, or the file is"
            " another program's"
        )
    job = [folder for folder in given if folder.lines.events]
    candidates = {
        path.resolve() for folder in folders for path in _runs(folder.parent) if _is_of_one_user(folder, path)
    } - set(folders)
    others = [read_folder(path) for path in sorted(candidates) if _may_belong(path, job)]
    while joined := [other for other in others if any(_is_one_job(one, other) for one in job)]:
        job += joined
        others = [other for other in others if other not in joined]
    return job


def read_folder(folder: Path) -> NodeFolder:
    """One node's folder. Without a timeline that can be read it has no events."""
    name = _NAME.fullmatch(folder.name)
    lines = read_lines(lines_of(folder / TIMELINE, TIMELINE_BYTES_MAX))
    if _size(folder / TIMELINE) > TIMELINE_BYTES_MAX:
        lines = ReadLines(lines.events, lines.unreadable, is_cut=True)
    return NodeFolder(str(folder), "this node", name["run"] if name else folder.name, lines)


def lines_of(path: Path, bytes_max: int) -> Iterator[bytes]:
    """The lines of a regular file; nothing if it cannot be read. A line that is too long comes cut, and is no event."""
    descriptor = _opened(path)
    if descriptor is None:
        return
    with os.fdopen(descriptor, "rb") as file, suppress(OSError):
        left = bytes_max
        while left > 0 and (line := file.readline(LINE_BYTES_MAX)):
            left -= len(line)
            more = b"" if line.endswith(b"\n") or len(line) < LINE_BYTES_MAX else line
            while more and not more.endswith(b"\n"):
                line, more = line[:1], file.readline(LINE_BYTES_MAX)
                left -= len(more)
            yield line + more[-1:]


def tail(folder: Path, names: Sequence[str]) -> str | None:
    """The last lines of the log `names` below `folder`, without half a line at its beginning; None if there is no log.

    No link is followed: the folder may be another user's, and the page must not show what that user cannot read.
    """
    descriptor = _opened_below(folder, names)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            size = os.fstat(descriptor).st_size
            file.seek(max(size - TAIL_BYTES, 0))
            content = file.read(TAIL_BYTES)
        except OSError:
            return None
    if size > TAIL_BYTES:
        content = content.partition(b"\n")[2] or content
    return content.decode(errors="replace").replace("\r\n", "\n")


def metrics_path(event: PastEvent | None) -> Path | None:
    """The metrics file of the bundled trainer, as its command line (in `started`) says; None if there is none."""
    if event is None:
        return None
    try:
        words = shlex.split(event.text("command"))
    except ValueError:
        return None
    out = ""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        if word == "--out":
            out = value
        elif word.startswith("--out="):
            out = word.removeprefix("--out=")
    path = Path(event.text("cwd") or ".", out, "metrics.jsonl")
    return path if out and "\0" not in str(path) and _is_file(path) else None


def read_metrics(path: Path) -> StepMetrics | None:
    """What a metrics file says; None if it has no line with a step."""
    found = StepMetrics().add_all(lines_of(path, METRICS_BYTES_MAX))
    return found if found.steps else None


def log_files(folder: Path, limit: int) -> list[LogFiles]:
    """The ranks' files below a run's folder, at most `limit` ranks of generations: the newest."""
    found: list[LogFiles] = []
    for attempt in sorted(_numbered(folder, "attempt_"), reverse=True):
        for rank in sorted(_numbered(folder / f"attempt_{attempt}", "")):
            if len(found) >= limit:
                return found[::-1]
            if paths := rank_files(folder, attempt, rank):
                found.append(LogFiles(attempt, rank, paths))
    return found[::-1]


def rank_files(folder: Path, generation: int, rank: int) -> tuple[str, ...]:
    """The files of one rank in one generation that are there and hold something."""
    place = folder / f"attempt_{generation}" / str(rank)
    names = ("stderr.log", "stdout.log", "error.json")
    return tuple(str(place / name) for name in names if _has_content(place / name))


def stacks_file(folder: Path, generation: int) -> str:
    """The file with the stacks of a node's ranks in a hang of that generation; empty if there is none."""
    path = folder / f"attempt_{generation}" / STACKS
    return str(path) if _has_content(path) else ""


def profiles(folder: Path) -> list[tuple[bytes, tuple[str, ...]]]:
    """The records of the profiles below a run's folder, of the newest generations, with their files that are there."""
    found: list[tuple[bytes, tuple[str, ...]]] = []
    for attempt in sorted(_numbered(folder, "attempt_"), reverse=True):
        place = (f"attempt_{attempt}", PROFILE)
        descriptor = _opened_below(folder, (*place, PROFILE_RECORD))
        if descriptor is None or len(found) >= _PROFILES_MAX:
            continue
        with os.fdopen(descriptor, "rb") as file, suppress(OSError):
            content = file.read(PROFILE_BYTES_MAX + 1)
            paths = tuple(str(folder.joinpath(*place, name)) for name in (PROFILE_TRACE, PROFILE_RECORD))
            if len(content) <= PROFILE_BYTES_MAX:
                found.append((content, tuple(path for path in paths if _has_content(Path(path)))))
    return found[::-1]


def _numbered(folder: Path, prefix: str) -> list[int]:
    try:
        names = [entry.name.removeprefix(prefix) for entry in os.scandir(folder) if entry.name.startswith(prefix)]
    except OSError:
        return []
    return [int(name) for name in names if re.fullmatch(r"[0-9]{1,9}", name)]


def _runs(folder: Path) -> list[Path]:
    try:
        entries = sorted((entry for entry in os.scandir(folder) if not entry.is_symlink()), key=lambda e: e.name)
    except OSError:
        return []
    return [Path(entry.path) for entry in entries[-_FOLDERS_MAX:] if _is_file(Path(entry.path, TIMELINE))]


def _is_of_one_user(one: Path, other: Path) -> bool:
    """Whether one user made both folders. Whoever may write into a shared --log-dir can name a folder as a job's."""
    try:
        return one.stat().st_uid == other.stat().st_uid
    except OSError:
        return False


def _may_belong(path: Path, job: Sequence[NodeFolder]) -> bool:
    """Whether a folder's name allows that it is of the same job: other jobs' files are not read."""
    name = _NAME.fullmatch(path.name)
    run = name["run"] if name else path.name
    wanted = {_started_text(folder, "run_id").replace("/", "_") or folder.run_id for folder in job}
    return any(run == each or run.startswith(f"{each}_") for each in wanted)


def _is_one_job(one: NodeFolder, other: NodeFolder) -> bool:
    """Whether two folders tell of one job: one run id, and at work at the same time. A name may be used again later.

    Where the tables of one or the other name their nodes, these decide.
    """
    if not other.lines.events or not (run_id := _started_text(one, "run_id")):
        return False
    if _started_text(other, "run_id") != run_id:
        return False
    seats = [_seats(folder) for folder in (one, other)]
    if _own_ids(other) & seats[0] or _own_ids(one) & seats[1]:
        return True
    if any(seats):
        return False
    (begin, end), (other_begin, other_end) = (_times(folder) for folder in (one, other))
    return begin <= other_end + _GAP_S and other_begin <= end + _GAP_S and not _is_new_start(one, other)


def _is_new_start(one: NodeFolder, other: NodeFolder) -> bool:
    """Whether one began after the other had ended for good: the same command, typed again."""
    first, second = sorted((one, other), key=lambda folder: folder.lines.events[0].at_s)
    return has_ended(first) and second.lines.events[0].at_s > _times(first)[1]


def _own_ids(folder: NodeFolder) -> set[str]:
    """The names that the folder's agent had in the job."""
    return {event.text("node_id") for event in folder.lines.events if event.event == "joined"} - {""}


def _seats(folder: NodeFolder) -> set[str]:
    """The names of all nodes in the tables of which the folder tells; empty for logs of older releases."""
    tables = [event.fields.get("nodes") for event in folder.lines.events if event.event in ("sealed", "spare")]
    seats = [seat for table in tables if isinstance(table, list) for seat in table if isinstance(seat, dict)]
    return {text(seat.get("node_id")) for seat in seats} - {""}


def has_ended(folder: NodeFolder) -> bool:
    """Whether the node's agent said that the job ended there."""
    return any(event.event == "ended" for event in folder.lines.events)


def owner(folder: Path) -> int:
    """The id of the user whose folder this is, -1 if it is gone."""
    try:
        return folder.stat().st_uid
    except OSError:
        return -1


def _times(folder: NodeFolder) -> tuple[float, float]:
    return folder.lines.events[0].at_s, folder.lines.events[-1].at_s


def _started_text(folder: NodeFolder, field: str) -> str:
    return next((event.text(field) for event in folder.lines.events if event.event == "started"), "")


def _written_at(folder: Path) -> float:
    try:
        return (folder / TIMELINE).stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _has_content(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def _opened_below(folder: Path, names: Sequence[str]) -> int | None:
    """A descriptor of the regular file that is reached from `folder` by these names, and by no link."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        below = os.open(folder, flags | os.O_DIRECTORY)
    except OSError:
        return None
    for name in names[:-1]:
        try:
            inner = os.open(name, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=below)
        except OSError:
            return None
        finally:
            os.close(below)
        below = inner
    try:
        return _opened(names[-1], below)
    finally:
        os.close(below)


def _opened(path: Path | str, below: int | None = None) -> int | None:
    """A descriptor of a regular file: a pipe would wait for its writer, and a device has no end.

    With `below`, a folder's descriptor, `path` is a name in it, and no link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if below is None else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, dir_fd=below)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None
