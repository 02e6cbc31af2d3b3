"""Runs the real command in a folder of its own, and waits for facts instead of sleeping."""

from __future__ import annotations

import codecs
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from elaunch.agent.environment import DEFAULT_PRELOAD
from elaunch.agent.guardian.guardian import VARIABLE

Fact = TypeVar("Fact")
# Generous: these machines are shared. A test that needs more has found a hang.
DEADLINE_S = 180.0
# A program that a test runs to its end. Its own waits end before, and say for what.
RUN_LIMIT_S = 2 * DEADLINE_S
# elaunch's variables; those of schedulers under which tests may run; pytest's, which differs in each test; and torch's,
# if a test has imported torch.
_NOT_FOR_JOBS = (
    *("ELAUNCH_", "PET_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "LSB_", "PBS_", "FLUX_", "JOB_COMPLETION_"),
    *("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"),
    # Those of the terminal in which the tests run.
    *("COLUMNS", "LINES"),
)
COMMAND = (sys.executable, "-m", "elaunch")
# Preload a light module in place of torch: the fork server does the same, without the two seconds of torch's import.
LIGHT = ("--preload", "json")
FRESH = ("--no-preload",)
REPOSITORY = Path(__file__).parents[1]


def slow(*values: Any) -> Any:
    """A set of a test's parameters that only the slow suite runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def preloading(module: str) -> tuple[str, str]:
    """The option that preloads `module` beside the default, which each worker of each generation would import else.

    All modules are named, so the job does not learn what its workers import: that takes a second import of them all.
    """
    return ("--preload", ",".join((*DEFAULT_PRELOAD, module)))


def require(package: str) -> None:
    """Skip the test if this package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make integrations` installs it")


def seeds(every: Sequence[int], check: int = 25) -> list[Any]:
    """A random test's seeds. `make check` takes the first `check` of them."""
    return [*every[:check], *(pytest.param(seed, marks=pytest.mark.thorough) for seed in every[check:])]


def wait_for(
    fact: Callable[[], Fact | None], what: str, deadline_s: float = DEADLINE_S, *, every_s: float | None = None
) -> Fact:
    """The first true value of `fact()`. Fails with `what` after the deadline.

    `fact()` is called every `every_s`. Without it, the longer it takes the seldomer: looks cost the jobs their CPU.
    """
    began_s = time.monotonic()
    while not (found := fact()):
        waited_s = time.monotonic() - began_s
        assert waited_s < deadline_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(min(max(waited_s / 20, 0.005), 0.05) if every_s is None else every_s)
    return found


def joined(*threads: threading.Thread) -> None:
    """Wait for the end of each of these threads."""
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"{thread.name} still runs"


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with `env`, but without the variables that a launcher sets for a job.

    elaunch's lines have no time, so that tests find them at a line's beginning.
    """
    # Look up each name: pytest removes a variable and sets it again, while a test's threads may call this.
    found = {name: os.environ.get(name) for name in os.environ if not name.startswith(_NOT_FOR_JOBS)}
    kept = {name: value for name, value in found.items() if value is not None}
    return {**kept, "PET_LOG_FORMAT": "plain", **(env or {})}


class Job:
    """One run of `elaunch` with its output; use it as a context manager, so that nothing outlives the test.

    `output` is stdout and stderr in the order of arrival, by lines; `stdout` and `stderr` are each alone. `prefix` goes
    before the command and becomes it: where it runs (tests/nodes.py). A subclass may run another launcher's `command`.
    """

    command: Sequence[str] = COMMAND

    def __init__(
        self,
        folder: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        **popen: object,
    ) -> None:
        options: dict[str, object] = {"stdin": subprocess.DEVNULL, "start_new_session": True, **popen}
        self.process = subprocess.Popen(
            [*prefix, *self.command, *args],
            cwd=folder,
            env=environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,  # type: ignore[call-overload]
        )
        self._pieces: list[tuple[str, str]] = []
        self._readers = [
            threading.Thread(target=self._read, args=(name, getattr(self.process, name)), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()
        self._markers: set[str] = set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.processes(), self.process]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait(DEADLINE_S)
        self._read_to_the_end()

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.returncode

    @property
    def output(self) -> str:
        return in_whole_lines(self._pieces)

    @property
    def stdout(self) -> str:
        return "".join(text for name, text in self._pieces if name == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(text for name, text in self._pieces if name == "stderr")

    def wait_for_output(self, pattern: str, deadline_s: float = DEADLINE_S) -> re.Match[str]:
        """The first match of `pattern` (multi-line) in the output."""

        def found() -> re.Match[str] | None:
            match = re.search(pattern, self.output, re.MULTILINE)
            assert match or self.process.poll() is None, f"ended without {pattern!r}:\n{self.output}"
            return match

        try:
            return wait_for(found, f"output like {pattern!r}", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code, all output read."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s:g} s:\n{self.output}") from None
        self._read_to_the_end()
        return code

    def signal(self, signum: signal.Signals) -> None:
        """Signal the agent alone."""
        self.process.send_signal(signum)

    def pids(self, name: str) -> list[int]:
        """The pids in the output lines that say `<name> pid <n>`, newest last."""
        return [int(pid) for pid in re.findall(rf"{name} pid (\d+)", self.output)]

    def child(self, title: str) -> psutil.Process:
        """The agent's descendant whose command line begins with `title` ("elaunch: fork server", …)."""

        def found() -> psutil.Process | None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    if " ".join(process.cmdline()).startswith(title):
                        return process
                except psutil.Error:
                    continue
            return None

        return wait_for(found, f"a child called {title!r}")

    def processes(self) -> list[psutil.Process]:
        """All living processes that carry the marker of this job's agent, whoever their parent is; no zombies."""
        self._markers |= set(self._seen_markers())
        return with_environment(*self._markers)

    def markers(self) -> set[str]:
        """The markers that the processes of this job's agent carry."""
        return wait_for(lambda: set(self._seen_markers()), "a process with a marker")

    def _seen_markers(self) -> list[str]:
        try:
            children = psutil.Process(self.process.pid).children()
            return [c.environ()[VARIABLE].split(",")[-1] for c in children if VARIABLE in c.environ()]
        except psutil.Error:
            return []

    def _read_to_the_end(self) -> None:
        """The process has ended: wait until its output is read. A process that it has left may hold its pipes open."""
        for reader in self._readers:
            reader.join(5)

    def _read(self, name: str, pipe: object) -> None:
        # A letter may come in two pieces.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for piece in iter(lambda: os.read(pipe.fileno(), 65536), b""):  # type: ignore[attr-defined]
            self._pieces.append((name, decoder.decode(piece)))


def in_whole_lines(pieces: Iterable[tuple[str, str]]) -> str:
    """The pieces of several streams, by name, in the order of arrival; the rest of a line goes where it begins."""
    found: list[str] = []
    # Where the stream's line that has no end yet is.
    begun: dict[str, int] = {}
    for name, text in list(pieces):
        rest = text
        if name in begun:
            end, newline, rest = text.partition("\n")
            found[begun[name]] += end + newline
            if newline:
                del begun[name]
        if rest:
            if not rest.endswith("\n"):
                begun[name] = len(found)
            found.append(rest)
    return "".join(found)


def with_environment(*texts: str) -> list[psutil.Process]:
    """All living processes with one of these texts in their environment, which no other process has; no zombies."""
    wanted = [text.encode() for text in texts]
    found: list[psutil.Process] = []
    # Not by psutil: it reads five files of each process on the machine.
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            content = Path(f"/proc/{pid}/environ").read_bytes()
            if any(text in content for text in wanted):
                found.append(psutil.Process(pid))
    return found


def finished(folder: Path, *args: str, env: Mapping[str, str] | None = None, **popen: object) -> Job:
    """Run a job to its end. Its temporary files go to `folder`."""
    with Job(folder, *args, env={"TMPDIR": str(folder), **(env or {})}, **popen) as job:
        job.wait()
    return job


def with_limits(limits: Mapping[str, float]) -> type[Job]:
    """A job of elaunch with these limits (s) by their full names, longer than its own: no wait for a CPU may decide.

    A name that does not exist ends it.
    """
    settings = [f"import {name.rpartition('.')[0]}\n{name}\n{name} = {limit_s}" for name, limit_s in limits.items()]
    text = "\n".join([*settings, "from elaunch.launcher.cli import main", "main()"])
    return type("Patient", (Job,), {"command": (sys.executable, "-c", text)})


def records(job: Job, word: str) -> list[dict[str, Any]]:
    """The objects that workers printed to stdout as `word {json}`, in the order of arrival."""
    found = re.findall(rf"^(?:\[\d+\] )?{word} (\{{.*\}})$", job.stdout, re.MULTILINE)
    return [json.loads(text) for text in found]


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """Write a user's script."""
    path = folder / name
    path.write_text(text)
    return path


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, below those that the kernel gives to connections.

    A client that tries such a port before its server listens could otherwise be connected to itself: the kernel may
    choose that very port for the client's end.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(lowest // 3, lowest)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe, suppress(OSError):
            probe.bind((host, port))
            if port not in found:
                found.append(port)
    return found
