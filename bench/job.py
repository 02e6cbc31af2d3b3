"""One run of a launcher: its start, its stamps, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import psutil

from bench.contenders import Contender, environment
from bench.stamps import Stamp, parse

Fact = TypeVar("Fact")
SCRIPTS = Path(__file__).parent / "scripts"
_LOOK_S = 0.01
_GONE_S = 15.0
_MARKER = "BENCH_JOB"


class Trouble(Exception):
    """A job did not do what was asked of it; the message says what, in a few words."""


class Job:
    """A launcher that runs `program` (script and arguments); a context manager, whose end kills all that is left.

    `started_s` is the monotonic time just before its process was made. stdout goes to `stdout`, or to a file, as
    stderr does. `folder` is the job's own and is removed with it. `prefix` goes before the command and becomes it:
    where it runs. Several launchers of one job share the file `stamps`.
    """

    def __init__(
        self,
        contender: Contender,
        workers: int,
        program: tuple[str, ...],
        *,
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        timeline: bool = False,
        stdout: int | None = None,
        prefix: Sequence[str] = (),
        stamps: Path | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bench_"))
        self.contender = contender
        self.workers = workers
        self.stamps_path = stamps or self.folder / "stamps.jsonl"
        self._marker = secrets.token_hex(8)
        command = list(contender.command(workers, max_restarts))
        # Both commands lie beside the interpreter that runs this.
        command[0] = str(Path(sys.executable).with_name(command[0]))
        if timeline and contender.ours:
            command += ["--log-dir", str(self.folder / "logs")]
        # torchrun leaves folders of its own in the temporary folder.
        extra = {
            "TMPDIR": str(self.folder),
            "BENCH_STAMPS": str(self.stamps_path),
            _MARKER: self._marker,
            **(env or {}),
        }
        self._log = (self.folder / "log.txt").open("wb")
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [*prefix, *command, *program],
            cwd=self.folder,
            env=environment(os.environ, contender, extra),
            stdin=subprocess.DEVNULL,
            stdout=self._log if stdout is None else stdout,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def stamps(self) -> list[Stamp]:
        """What the workers have stamped so far."""
        with suppress(FileNotFoundError):
            return parse(self.stamps_path.read_text())
        return []

    def timeline(self) -> list[Stamp]:
        """What elaunch's agent has stamped so far; nothing for others."""
        return [stamp for path in self.folder.glob("logs/*/timeline.jsonl") for stamp in parse(path.read_text())]

    def wait_for(self, fact: Callable[[], Fact | None], what: str, limit_s: float) -> Fact:
        """The first value of `fact()` that is not None. Raises Trouble where the job ends or the time is up."""
        return wait_for([self], fact, what, limit_s)

    def close(self) -> None:
        """Kill what is left, wait until nothing of it is there, and remove its folder."""
        try:
            # The first look also finds elaunch's guardian, which does not carry the marker.
            left = {process.pid: process for process in (*self._family(), *self._marked())}
            guardians = {pid for pid, process in left.items() if _is_guardian(process)}
            end_s = time.monotonic() + _GONE_S
            while left and time.monotonic() < end_s:
                for pid, process in left.items():
                    # A guardian leaves by itself when its agent is gone; only a stuck one is killed.
                    if pid not in guardians:
                        _kill(process)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.02)
                old = {pid: process for pid, process in left.items() if _lives(process)}
                left = {**old, **{process.pid: process for process in self._marked()}}
            for process in left.values():
                _kill(process)
            self.process.wait()
        finally:
            self._log.close()
            if self.process.stdout:
                self.process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _family(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            return [*root.children(recursive=True), root]
        return []

    def _marked(self) -> list[psutil.Process]:
        needle = f"{_MARKER}={self._marker}".encode()
        found = []
        for name in os.listdir("/proc"):  # noqa: PTH208
            with suppress(OSError, psutil.Error):
                if name.isdigit() and needle in Path("/proc", name, "environ").read_bytes():
                    found.append(psutil.Process(int(name)))
        return found


def wait_for(jobs: Sequence[Job], fact: Callable[[], Fact | None], what: str, limit_s: float) -> Fact:
    """The first value of `fact()` that is not None. Raises Trouble where one of `jobs` ends or the time is up."""
    end_s = time.monotonic() + limit_s
    while True:
        ended = [code for job in jobs if (code := job.process.poll()) is not None]
        # What was stamped just before the end counts.
        found = fact()
        if found is not None:
            return found
        if ended:
            raise Trouble(f"the job ended with code {ended[0]} before {what}")
        if time.monotonic() > end_s:
            raise Trouble(f"did not come so far within {limit_s:g} s that {what}")
        time.sleep(_LOOK_S)


def _is_guardian(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.endswith("guardian.py") for word in process.cmdline())
    return False


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        # An orphan that nobody reaps is gone all the same.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(process: psutil.Process) -> None:
    # psutil looks whether the number still is that process's.
    with suppress(psutil.Error):
        process.kill()
