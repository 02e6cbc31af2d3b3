"""One run of a launcher: its command line and variables, its stamps, and its end, after which nothing is left."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import psutil

from bench.stamps import Stamp, parse

# Each generation gets a new store. Otherwise torchrun's workers may read what the generation before had written.
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
FORK_MODE = ("--run-path", "--start-method", "fork")
LIMIT_TORCH = "limit: import torch"
LIMIT_PRELOAD = "limit: import of what is preloaded"
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Contender:
    """`program` is elaunch or torchrun; `options` come before the script; `variables` are set in its environment."""

    name: str
    program: str
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.program == "elaunch"

    def with_fresh_store(self) -> Contender:
        """The same contender, but each generation has a store of its own."""
        name, value = FRESH_STORE.split("=")
        return Contender(f"{self.name}, {FRESH_STORE}", self.program, self.options, {**self.variables, name: value})

    def command(self, workers: int, max_restarts: int) -> tuple[str, ...]:
        """The command line up to the script."""
        counts = ("--nproc-per-node", str(workers), "--max-restarts", str(max_restarts))
        return (self.program, *self.options, *counts)


ELAUNCH = Contender("elaunch", "elaunch")
FRESH = Contender("elaunch --no-preload", "elaunch", ("--no-preload",))
TORCHRUN = Contender("torchrun", "torchrun")
# With --run-path a script does not find the modules beside it.
TORCHRUN_FORK = Contender(f"torchrun {' '.join(FORK_MODE)}", "torchrun", FORK_MODE, {"PYTHONPATH": str(SCRIPTS)})
# Keys are the names on the bench's command line.
ALL = {"elaunch": ELAUNCH, "no-preload": FRESH, "torchrun": TORCHRUN, "torchrun-fork": TORCHRUN_FORK}


def environment(inherited: Mapping[str, str], contender: Contender, extra: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment: `inherited` without the variables of a launcher above it; one thread per worker.

    Python may keep compiled code: pip compiles what it installs, but not the working tree that is measured.
    """
    left_out = ("ELAUNCH_", "PET_", "TORCHELASTIC_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in inherited.items() if not name.startswith(left_out)}
    return {**kept, "OMP_NUM_THREADS": "1", **contender.variables, **extra}


Fact = TypeVar("Fact")
_POLL_S = 0.01
_GONE_S = 15.0
_MARKER = "BENCH_JOB"


class Trouble(Exception):
    """A job did not do what it was to do. The message is short."""


class Job:
    """A launcher that runs `program` (script and arguments). At its end the context manager kills all that is left.

    `started_s` is the monotonic time just before the launcher's process was made. stdout goes to `stdout`, or, like
    stderr, to a file. `folder` is the job's own and is removed with it. `prefix` stands before the command, and execs
    it where it has to run. Several launchers of one job share the file `stamps`. SIGTERM to this process ends the job
    as Ctrl-C does, unless the process handles it itself.
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
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self.folder = Path(tempfile.mkdtemp(prefix="bench_"))
        self.contender = contender
        self.workers = workers
        self.stamps_path = stamps or self.folder / "stamps.jsonl"
        self._stamps: list[Stamp] = []
        self._read_to = 0
        self._marker = secrets.token_hex(8)
        command = list(contender.command(workers, max_restarts))
        # Both commands are in the folder of the interpreter that runs this code.
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
        """The workers' stamps up to now."""
        # There may be thousands: each is read once. A line that is still being written comes with the next call.
        with suppress(FileNotFoundError), self.stamps_path.open("rb") as file:
            file.seek(self._read_to)
            whole, end, _ = file.read().rpartition(b"\n")
            self._read_to += len(whole + end)
            self._stamps += parse((whole + end).decode())
        return self._stamps

    def timeline(self) -> list[Stamp]:
        """The stamps of elaunch's agent up to now. Other launchers have none."""
        return [stamp for path in self.folder.glob("logs/*_*/timeline.jsonl") for stamp in parse(path.read_text())]

    def wait_for(self, fact: Callable[[], Fact | None], what: str, limit_s: float) -> Fact:
        """The first value of `fact()` that is not None. Raises Trouble if the job ends or the time is over."""
        return wait_for([self], fact, what, limit_s)

    def close(self) -> None:
        """Kill the processes that are left, wait until all are gone, and remove the folder."""
        try:
            # The marker is not in the environment of elaunch's guardian. So the first search goes by parents too.
            left = {process.pid: process for process in (*self._family(), *self._marked())}
            guardians = {pid for pid, process in left.items() if _is_guardian(process)}
            end_s = time.monotonic() + _GONE_S
            while left and time.monotonic() < end_s:
                for pid, process in left.items():
                    # A guardian ends by itself when its agent is gone. Only a guardian that is stuck is killed.
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
    """The first value of `fact()` that is not None. Raises Trouble if one of `jobs` ends or the time is over."""
    end_s = time.monotonic() + limit_s
    while True:
        ended = [code for job in jobs if (code := job.process.poll()) is not None]
        # A stamp that was made just before the end counts.
        found = fact()
        if found is not None:
            return found
        if ended:
            raise Trouble(f"the job ended with code {ended[0]} before {what}")
        if time.monotonic() > end_s:
            raise Trouble(f"{limit_s:g} s passed before {what}")
        time.sleep(_POLL_S)


def kill_rank(rank: int, pid: int) -> float:
    """SIGKILL to its process. Returns the monotonic time just before. Raises Trouble if it is gone."""
    killed_s = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise Trouble(f"rank {rank} ended before it was killed") from None
    return killed_s


def _is_guardian(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.endswith("guardian.py") for word in process.cmdline())
    return False


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        # A zombie that no process reaps is gone too.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(process: psutil.Process) -> None:
    # psutil checks that the pid still belongs to this process.
    with suppress(psutil.Error):
        process.kill()
