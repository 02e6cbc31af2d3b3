"""Finds and checks processes for the fault tests, by a variable of their own and not by the product's marker."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from elaunch.agent.guardian.guardian import RUN_DIRS
from tests.harness import DEADLINE_S, LIGHT, RUN_LIMIT_S, Job, wait_for, with_environment
from tests.standin import WITHOUT_TORCH

TAG = "FAULT_TEST_JOB"

# Lines for the beginning of a worker's script.
SAY = """
import os, signal, subprocess, sys, time

def say(name, pid):
    print(f"{name} pid {pid}", flush=True)

GENERATION = int(os.environ["ELAUNCH_GENERATION"])
RANK = int(os.environ["RANK"])
"""

# Processes that a worker may leave: a child, a child in a session of its own, and an orphan.
CHILDREN = """
say("sleep", subprocess.Popen(["sleep", "600"]).pid)
say("setsid", subprocess.Popen(["setsid", "sleep", "600"]).pid)
between = os.fork()
if between == 0:
    os.setsid()
    daemon = os.fork()
    if daemon:
        say("daemon", daemon)
        os._exit(0)
    os.execvp("sleep", ["sleep", "600"])
os.waitpid(between, 0)
"""


class Watched(Job):
    """A job whose every process carries a tag of the test's own, and whose temporary folder is the test's own.

    What its workers leave running (`CHILDREN`) has no time to end by itself, also after a success.
    """

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None, **popen: object) -> None:
        self.tag = secrets.token_hex(8)
        self.tmp = folder / "tmp"
        self.tmp.mkdir(exist_ok=True)
        self._guardians: set[psutil.Process] = set()
        self._memory_dirs: set[Path] = set()
        own = {TAG: self.tag, "TMPDIR": str(self.tmp), "PET_CHILDREN_GRACE": "0"}
        super().__init__(folder, *args, env={**own, **(env or {})}, **popen)

    def __exit__(self, *_: object) -> None:
        self.processes()
        self.process.kill()
        self.process.wait(DEADLINE_S)
        # The test itself ends what the guardians should have ended.
        with suppress(AssertionError):
            wait_for(lambda: not any(is_alive(guardian) for guardian in self._guardians), "the guardians' end")
        for path in self.memory_dirs():
            shutil.rmtree(path, ignore_errors=True)
        super().__exit__()

    def processes(self) -> list[psutil.Process]:
        """All living processes of the job but the agent, whoever their parent is; no zombies."""
        self._guardians |= set(self._guardians_now())
        found = [p for p in self._guardians if is_alive(p)]
        found += [p for p in with_environment(self.tag) if p.pid != self.process.pid and is_alive(p)]
        return found

    def guardian(self) -> psutil.Process:
        """The agent's guardian, which does not have the tag in its environment."""
        return wait_for(lambda: next(iter(self._guardians_now(deep=False)), None), "a guardian")

    def fork_server(self) -> psutil.Process:
        return self.child("elaunch: fork server")

    def run_dirs(self) -> list[Path]:
        """The private run directories; multiprocessing and torch have things of their own in the temporary folder."""
        return list(self.tmp.glob("elaunch*"))

    def memory_dirs(self) -> list[Path]:
        """The memory folders that outlive workers (`ELAUNCH_MEMORY`), of all agents that were seen."""
        self._guardians_now()
        return [path for path in self._memory_dirs if path.exists()]

    def kill_agent(self) -> float:
        """SIGKILL the agent. Returns the time. `left` then knows what the job had."""
        had = self.processes()
        assert self.process.poll() is None, f"it ended before the kill:\n{self.output}"
        assert had, "no process of the job is alive; the kill would prove nothing"
        killed_at_s = time.monotonic()
        self.process.kill()
        assert self.process.wait(DEADLINE_S) == -signal.SIGKILL
        return killed_at_s

    def assert_nothing_is_left(self, pids: Collection[psutil.Process | int] = ()) -> None:
        """No process, run directory or memory of the job is left, or soon none (test_kill_agent.py: how soon)."""
        until_s = time.monotonic() + DEADLINE_S
        while True:
            looked_at_s = time.monotonic()
            left = [f"{p.pid} {described(p)}" for p in self.processes()]
            left += [f"{pid} (logged by a worker)" for pid in pids if is_alive(pid)]
            left += [str(path) for path in (*self.run_dirs(), *self.memory_dirs())]
            if not left:
                return
            # The last look that began in time decides.
            assert looked_at_s < until_s, f"left after {DEADLINE_S:g} s: {left}\n{self.output}"
            time.sleep(0.005)

    def logged_by_agent(self) -> list[str]:
        """The agent's own log lines, without the name in front."""
        return re.findall(r"^elaunch: (.*)$", self.stderr, re.MULTILINE)

    def _guardians_now(self, *, deep: bool = True) -> list[psutil.Process]:
        try:
            children = psutil.Process(self.process.pid).children(recursive=deep)
        except psutil.Error:
            return []
        found = [p for p in children if is_alive(p) and "guardian.py" in described(p)]
        # Folders outside of the test's own temporary folder are found by the names that the guardian has to remove.
        for guardian in found:
            with suppress(psutil.Error):
                folders = json.loads(guardian.environ().get(RUN_DIRS, "[]"))
                self._memory_dirs |= {Path(folder) for folder in folders if folder.endswith("_memory")}
        return found


class Light(Watched):
    """A watched job in which nothing imports torch: the fork server does not, nor does the worker store."""

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None, **popen: object) -> None:
        super().__init__(folder, *LIGHT, *args, env={**WITHOUT_TORCH, **(env or {})}, **popen)


def is_alive(process: psutil.Process | int) -> bool:
    """Whether the process is there and no zombie. A dead orphan stays a zombie under a process 1 that does not reap."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def described(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def library(folder: Path, name: str, text: str) -> dict[str, str]:
    """Install a module that can be preloaded. Returns the environment that finds it, and not torch."""
    place = folder / "lib"
    place.mkdir(exist_ok=True)
    (place / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join((os.fspath(place), *WITHOUT_TORCH.values()))}


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size, in the form that mount takes."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, timeout=RUN_LIMIT_S)
