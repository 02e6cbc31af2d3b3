"""Runs a script as the ranks of one gloo group. The test itself says what each rank does, and when."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import DEADLINE_S, environment, free_ports, wait_for
from tests.standin import WITH_TORCH

# On a busy machine the imports of torch, of DCP and of s3fs take a minute.
START_S = 240.0


@dataclass(frozen=True)
class Ended:
    """How one rank ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """Its last line of output, which is JSON."""
        return self.notes[-1]

    @property
    def notes(self) -> list[Any]:
        """All notes. The last line of a killed rank may be missing."""
        return [json.loads(line) for line in self.out.splitlines()]


class RankForker:
    """A connection to the process that has imported torch and `modules`, and forks ranks. See tests/rank_forker.py.

    All test processes of a run share that process: `place` is the path of its socket. The first of them starts it.
    `env` are the variables that these modules need when they are imported.
    """

    def __init__(self, place: Path, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self._received: list[Any] = []
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._connect(place):
                place.unlink(missing_ok=True)
                command = [sys.executable, "-m", "tests.rank_forker", str(place), *modules]
                # The first test to need it may be one whose jobs have a stand-in for torch.
                variables = environment({"OMP_NUM_THREADS": "1", **WITH_TORCH, **(env or {})})
                self._process = subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True
                )
                wait_for(lambda: self._is_up(place), "a forker", START_S)

    def begin(self, script: Path, args: Iterable[str], envs: list[dict[str, str]], folder: Path) -> list[int]:
        """Fork the ranks; their pids."""
        before = len(self._groups())
        order = {"script": str(script), "args": list(args), "envs": envs, "folder": str(folder)}
        self._connection.sendall(json.dumps(order).encode() + b"\n")
        pids: list[int] = wait_for(lambda: self._groups()[before:], "the ranks to be forked")[0]
        return pids

    def code(self, pid: int) -> int | None:
        """The exit code, None while it runs."""
        logged = [each for each in list(self._received) if isinstance(each, dict)]
        # An earlier rank may have had the same pid.
        forked = max(number for number, each in enumerate(logged) if pid in each.get("pids", ()))
        ends = [each["code"] for each in logged[forked:] if each.get("pid") == pid]
        return ends[0] if ends else None

    def close(self) -> None:
        """Leave. The process ends when all have left."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join(DEADLINE_S)
        self._connection.close()

    def _is_up(self, place: Path) -> bool:
        assert self._process.poll() is None, f"the forker has exited with code {self._process.returncode}"
        return self._connect(place)

    def _connect(self, place: Path) -> bool:
        """Whether the process is there and takes this one as a client."""
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(str(place))
        except OSError:
            self._connection.close()
            return False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # It says that it is ready, or ends, since all others have left.
        wait_for(lambda: self._received or not self._reader.is_alive(), "the forker's first word")
        return bool(self._received)

    def _groups(self) -> list[list[int]]:
        return [each["pids"] for each in list(self._received) if isinstance(each, dict) and "pids" in each]

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile() as lines:
            for line in lines:
                self._received.append(json.loads(line))


@contextlib.contextmanager
def forker(place: Path, *modules: str, env: Mapping[str, str] | None = None) -> Iterator[RankForker]:
    held = RankForker(place, *modules, env=env)
    try:
        yield held
    finally:
        held.close()


class Ranks:
    """`world_size` processes of `script`, with torchrun's variables; use it as a context manager.

    `envs` holds further variables for single ranks, beside `env`.
    """

    def __init__(
        self,
        forker: RankForker,
        world_size: int,
        script: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        envs: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        port = str(free_ports(1)[0])
        common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(env or {})}
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **(envs or {}).get(rank, {})} for rank in range(world_size)]
        self._forker = forker
        self._folder = tempfile.TemporaryDirectory()
        self.pids = forker.begin(script, args, [{**common, **each} for each in own], Path(self._folder.name))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(len(self.pids)))
        for pid in self.pids:
            wait_for(lambda pid=pid: self._forker.code(pid) is not None, "a killed rank to be gone")  # type: ignore[misc]
        self._folder.cleanup()

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self._forker.code(self.pids[rank]) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)

    def end_of(self, rank: int, deadline_s: float = DEADLINE_S) -> Ended:
        """Wait for one rank's end, and return how it ended. Fails if it does not end."""
        pid = self.pids[rank]
        try:
            wait_for(lambda: self._forker.code(pid) is not None, f"the end of rank {rank}", deadline_s)
        except AssertionError as error:
            self._print_stacks(rank)
            raise AssertionError(f"{error}\n{self._read('err', rank)}") from None
        code = self._forker.code(pid)
        assert code is not None
        return Ended(code, self._read("out", rank), self._read("err", rank))

    def end(self, deadline_s: float = DEADLINE_S) -> list[Ended]:
        """How each of them ended, by rank."""
        return [self.end_of(rank, deadline_s) for rank in range(len(self.pids))]

    def answers(self, deadline_s: float = DEADLINE_S) -> list[Any]:
        """The answers of all ranks. Fails if one does not end with exit code 0."""
        ended = self.end(deadline_s)
        assert [rank.code for rank in ended] == [0] * len(ended), "\n".join(rank.err for rank in ended)
        return [rank.answer for rank in ended]

    def _print_stacks(self, rank: int) -> None:
        """End a rank that hangs. Its faulthandler writes to stderr where it hung."""
        with contextlib.suppress(ProcessLookupError, AssertionError):
            os.kill(self.pids[rank], signal.SIGABRT)
            wait_for(lambda: self._forker.code(self.pids[rank]) is not None, "its end", 10)

    def _read(self, name: str, rank: int) -> str:
        return (Path(self._folder.name) / f"{name}.{rank}").read_text()
