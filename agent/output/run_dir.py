"""Where a run keeps files: a private folder that is removed at the end, or the user's log folder, which is kept."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elaunch.agent.guardian.guardian import CLAIM, SOCKET_FOLDERS, boot_id
from elaunch.agent.linux import normal_path
from elaunch.agent.output.streams import LogFile

# The run's events as JSON lines (docs/events.schema.json), in the user's log folder.
TIMELINE = "timeline.jsonl"
SHARED_MEMORY = "/dev/shm"
# The link to the newest run's folder in the user's log folder.
LATEST = "latest"
# The mode of a run's folder in the user's log folder, less what the umask takes away. It also protects the files that
# workers write there with the user's umask.
LOGS_MODE = 0o750


class Places(NamedTuple):
    """Where a run's folders may be made, in this order: `private` files, the workers' `memory`, the agent's `socket`.

    Each kind has a random name of its own: a user who sees one folder cannot create the others before the run does.
    """

    private: tuple[str, ...]
    memory: tuple[str, ...]
    socket: tuple[str, ...]


def new_places() -> Places:
    """Places with new names; nothing is created yet.

    The private folder is in the user's folder for temporary files. The memory is in /dev/shm, else on a disk. The
    socket is where `elaunch status` finds it, which may have another TMPDIR.
    """
    chosen = [folder for variable in ("TMPDIR", "TEMP", "TMP") if (folder := os.environ.get(variable))]
    disks = [folder for folder in (*chosen, "/tmp", "/var/tmp") if SHARED_MEMORY not in folder]
    return Places(
        _named("", (*chosen, "/tmp", "/var/tmp", SHARED_MEMORY)),
        _named("_memory", (SHARED_MEMORY, *disks)),
        _named("_socket", (*SOCKET_FOLDERS, *chosen)),
    )


def _named(ending: str, folders: Iterable[str]) -> tuple[str, ...]:
    name = f"elaunch_{os.urandom(8).hex()}{ending}"
    # The paths are absolute: the guardian, which removes the folders, has another working directory.
    return tuple(dict.fromkeys(str(Path(folder, name).absolute()) for folder in folders))


class RunDir:
    """Folders of one run, one per generation and rank: `attempt_<generation>/<rank>/` (torchrun's tree).

    No generation reuses another's folder, so no restart deletes or overwrites a file. The run continues without a
    folder that cannot be created, except the log folder itself. `memory` is the folder for what workers keep beyond
    their own lives, in shared memory unless `memory_trouble` is the reason against it; both as of the workers' last
    start.
    """

    def __init__(
        self, log_dir: Path | None, run_id: str, warn: Callable[[str], None], places: Places | None = None
    ) -> None:
        """Use the first of each kind of `places` (else of new ones) that works.

        Raises OSError if `log_dir` cannot be written: the user must not learn at the end that there are no log files.
        """
        self._warn = warn
        self._places = places or new_places()
        # Whether something that belongs in these folders could not be written.
        self.is_incomplete = False
        self.memory: Path | None = None
        self.memory_trouble = ""
        self.logs: Path | None = None
        self.private: Path | None = None
        if log_dir:
            # The runs of a folder sort by their start.
            name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{run_id.replace('/', '_')}_{os.urandom(4).hex()}"
            logs = log_dir / name
            with suppress(FileExistsError):
                log_dir.mkdir(parents=True)
            logs.mkdir(mode=LOGS_MODE)
            _point_to(logs)
            self.logs = Path(normal_path(str(logs.absolute())))
        else:
            self.private = next(_made(self._places.private), None)
            if self.private is None:
                self.warn("no temporary folder can be written; exceptions are read from the workers' output instead")

    @property
    def root(self) -> Path | None:
        return self.logs or self.private

    def make_memory(self) -> None:
        """Before workers start: make `memory` if there is none yet, or if it was removed.

        systemd-logind does that when its user's last session ends (RemoveIPC). Call it only before workers start: those
        that run would save a state there that lacks what was removed.
        """
        removed = ""
        if self.memory:
            if _is_own(self.memory):
                return
            removed = (
                f"{self.memory} was removed while workers ran; it was recreated empty, so training continues from a"
                " copy on another node, else from the last checkpoint (if it was systemd-logind, at a logout: loginctl"
                " enable-linger keeps it)"
            )
        self.memory, trouble = _make_memory(self._places.memory)
        self.memory_trouble = "; ".join(filter(None, (removed, trouble)))

    def socket_folders(self) -> Iterator[Path]:
        """Private folders for the agent's socket, each made when it is needed; the first that works is kept."""
        return _made(self._places.socket)

    def generation(self, generation: int) -> Path | None:
        """The generation's folder."""
        return self._make(self.root / f"attempt_{generation}") if self.root else None

    def rank(self, generation: int, rank: int) -> Path | None:
        """The folder of one rank in one generation."""
        return self._make(self.root / f"attempt_{generation}" / str(rank)) if self.root else None

    def error_file(self, generation: int, rank: int) -> Path | None:
        """Where that rank of this node writes its exception, or has written it."""
        return self.root / f"attempt_{generation}" / str(rank) / "error.json" if self.root else None

    def warn(self, trouble: str) -> None:
        """Warn of what cannot be written, at the first call only: a full disk fails every stream of every rank."""
        if not self.is_incomplete:
            self.is_incomplete = True
            self._warn(f"{trouble}; further errors of this kind are not shown")

    def _make(self, path: Path) -> Path | None:
        try:
            if self.private and not _is_own(self.private):
                # A cleaner of temporary files has removed it.
                _make_private(str(self.private))
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.warn(f"{path} cannot be created ({error.strerror}); the run continues without it")
            return None
        return path.absolute()


def _point_to(logs: Path) -> None:
    """Point the link `latest` beside a run's folder to it. If several runs start at once, one wins.

    A file system without symbolic links gets none. A `latest` that is not a link is the user's, and is left alone.
    """
    link, making = logs.with_name(LATEST), logs.with_name(f".{LATEST}_{os.urandom(4).hex()}")
    with suppress(OSError):
        if link.is_symlink() or not link.exists():
            making.symlink_to(logs.name)
            try:
                making.replace(link)
            except OSError:
                making.unlink()


def _made(places: Iterable[str]) -> Iterator[Path]:
    for place in places:
        with suppress(OSError):
            yield _make_private(place)


def _make_private(place: str) -> Path:
    # The name cannot be guessed. If a folder of this name exists all the same, it is not ours.
    os.mkdir(place, 0o700)  # noqa: PTH102
    folder = Path(place).absolute()
    _claim(folder)
    return folder


def _is_own(folder: Path) -> bool:
    """Whether the private folder is there. Where one was removed, another user could create their own."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _claim(folder: Path) -> None:
    """Lock a file in `folder` as long as this process lives. A folder whose file is not locked will be removed.

    A disk without locks has no such file, and its folders are left alone. Children that are executed do not inherit it.
    """
    making = folder / f"{CLAIM}.new"
    with suppress(OSError):
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, boot_id())
        except OSError:
            os.close(descriptor)
            making.unlink()
        else:
            # The file gets its name only when it is locked.
            making.rename(folder / CLAIM)


def _make_memory(places: tuple[str, ...]) -> tuple[Path | None, str]:
    """Make the memory folder in the first of `places` where that works. Returns it, and why it is not in the first."""
    trouble = ""
    for place in places:
        try:
            folder = _make_private(place)
        except OSError as error:
            trouble = trouble or f"shared memory is not available ({place}: {error.strerror})"
            continue
        return folder, trouble and f"{trouble}; what workers keep for the next generation goes to {folder}"
    return None, f"{trouble}, nor is a temporary folder; workers keep nothing for the next generation"


class Timeline:
    """`timeline.jsonl` in `folder`; without a folder nothing is written.

    `later` runs the writing in another thread: a slow disk must not block the agent's loop. `warn` is called for a disk
    error, after which no more is written. Each of `observers` is called with each event, its fields and its time on the
    monotonic clock.
    """

    def __init__(
        self, folder: Path | None, warn: Callable[[str], None], later: Callable[[Callable[[], object]], None]
    ) -> None:
        self._file = LogFile(str(folder / TIMELINE), warn) if folder else None
        self._later = later
        self.observers: list[Callable[[str, Mapping[str, object], float], None]] = []

    def stamp(self, generation: int, event: str, **fields: object) -> None:
        """Record that `event` happens now. May be called from any thread. The values of `fields` have a JSON form.

        `at` is the wall clock (s), for people; `monotonic_s` is CLOCK_MONOTONIC, which every process of a host shares.
        """
        now_s = time.monotonic()
        for observe in self.observers:
            observe(event, fields, now_s)
        file = self._file
        if file is None:
            return
        entry = {"generation": generation, "event": event, "at": time.time(), "monotonic_s": now_s, **fields}
        line = json.dumps(entry).encode() + b"\n"
        self._later(lambda: file.write(line))
