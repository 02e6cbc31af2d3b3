"""Leaves a warm fork server behind, asks those that stay for their state, and ends them."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.warm.client import ANSWER_S, LOOK_S, Cold, WarmKind, connected, greeted, next_packet
from elaunch.agent.forkserver.warm.handover import MARKER_ROOM
from elaunch.agent.forkserver.warm.holders import holders
from elaunch.agent.forkserver.warm.interpreter import without_program
from elaunch.agent.forkserver.warm.place import NoPlace, checked, folder, made, reason_file, socket_path
from elaunch.agent.forkserver.wire import PROCESS_NAME, Boot, pausing
from elaunch.agent.guardian.guardian import VARIABLE
from elaunch.agent.linux import credentials, name
from elaunch.agent.linux import state as process_state

# One that has begun to import so lately may still do so.
_YOUNG_S = 60.0
_END_S = 1.0
_LOCK = "lock"
_BACKLOG = 64


def leave_behind(
    kind: WarmKind,
    environment: Mapping[str, str],
    packages: tuple[str, ...],
    idle_s: float,
    *,
    in_place: bool,
    sharers: int = 0,
) -> None:
    """Start a fork server that outlives this process. Raises NoPlace, OSError.

    One that is there it ends; without `in_place` only if that does not answer: it came while this job ran.
    The new one has not imported yet when this returns. `environment` is without the job's marker. `packages`
    and `sharers` as in `Boot`.
    """
    program = without_program(kind.program)
    path = socket_path(made(folder(os.environ)), program, kind.preload)
    with _locked(path.parent) as is_ours:
        if not is_ours:
            # Another elaunch is doing just this.
            return
        if not in_place and _is_of_use(path):
            return
        try:
            stop(path)
        except Cold as error:
            raise NoPlace(str(error)) from error
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(os.fspath(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            try:
                _start(
                    Boot(
                        os.getpid(),
                        listener.fileno(),
                        program,
                        kind.preload,
                        environment.get("PYTHONPATH"),
                        packages=packages,
                        warm_s=idle_s,
                        sharers=sharers,
                    ),
                    environment,
                    path.parent,
                )
            except BaseException:
                path.unlink()
                raise


def _is_of_use(path: Path) -> bool:
    """Whether a server is there that answers, or that may still import."""
    with suppress(Cold, OSError), connected(path) as connection:
        answers = select.select([connection], [], [], LOOK_S)[0] and wire.receive(connection) is not None
        return bool(answers) or time.time() - path.stat().st_mtime < _YOUNG_S
    return False


def _start(boot: Boot, environment: Mapping[str, str], place: Path) -> None:
    boot_fd = boot.memfd()
    try:
        subprocess.Popen(
            boot.program.argv,
            # The room for a job's marker: see adopting.py.
            env={**pausing(environment, boot_fd), VARIABLE: "-" * MARKER_ROOM},
            stdin=subprocess.DEVNULL,
            # What its imports print, the job's fork server has printed already.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(boot_fd, boot.control_fd),
            start_new_session=True,
            # What modules keep of it is found again: see folder.py.
            cwd=place,
        )
    finally:
        os.close(boot_fd)


@contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Whether nobody else starts a server meanwhile."""
    fd = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def servers() -> list[Path]:
    """The sockets of this user's warm fork servers. Raises NoPlace."""
    place = checked(folder(os.environ))
    return sorted(path for path in place.iterdir() if path.name != _LOCK and not path.suffix) if place else []


def state(path: Path) -> dict[str, Any]:
    """What the server at `path` says of itself. Raises Cold."""
    return _asked(path, "state")


def stop(path: Path) -> bool:
    """End the server at `path`, also one that does not answer; no job has to do with it. Returns whether it was there.

    Raises Cold if it cannot be ended.
    """
    pid, is_there, is_stuck = 0, True, False
    try:
        with connected(path) as connection:
            pid = credentials(connection)[0]
    except Cold as error:
        if not error.is_gone and not error.is_stuck:
            raise
        is_there = is_stuck = error.is_stuck
    # One that takes no connection does not tell its pid. Until it has come to its name, the socket has that of the
    # process which has started it.
    pids = [] if not is_there else [pid] if name(pid) == PROCESS_NAME else holders(path)
    if not pids and (is_stuck or name(pid)):
        who = f"the process {pid}" if pid else "a process"
        raise Cold(f"{path} is a socket of {who}, which is no fork server yet; try again, or remove it")
    for each in pids:
        _kill(each)
    path.unlink(missing_ok=True)
    reason_file(path).unlink(missing_ok=True)
    return is_there


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + _END_S
        while process_state(pid) not in ("", "Z") and time.monotonic() < until_s:
            time.sleep(0.005)


def _asked(path: Path, what: str) -> dict[str, Any]:
    with connected(path) as connection:
        greeted(connection)
        wire.send(connection, {"op": what})
        said, _ = next_packet(connection, time.monotonic() + ANSWER_S)
    if not said:
        raise Cold("it has ended", is_gone=True)
    return said
