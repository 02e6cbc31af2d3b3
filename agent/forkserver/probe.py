"""Imports a module in a forked process that is thrown away, to see what the fork server must not import.

A module that is unsuitable cannot be taken out of a process again: a thread, an attribute that it has set elsewhere or
an entry in a registry would stay. So the fork server never runs such a module (decision 044).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NoReturn

from elaunch.agent.environment import RANK_VARIABLES
from elaunch.agent.forkserver.fork_safety import cuda_is_on, open_files, shadows
from elaunch.agent.forkserver.selection import Load, Selection, select
from elaunch.agent.linux import die_with_parent
from elaunch.rendezvous.job_spec import Program


class Unsuited(Exception):
    """Nothing of a module can be preloaded; the text says why."""


def probe(name: str, program: Program, loaded_at_start: Collection[str]) -> Selection:
    """Import `name` in a child, and return what this process may import of it. Raises Unsuited."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _be_the_probe(parent, name, program, loaded_at_start, write_fd)
    os.close(write_fd)
    with open(read_fd, "rb") as answer:  # noqa: PTH123
        said = answer.read()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError):
        # The processes that the module has started. The number is theirs until the probe is reaped.
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not said:
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        raise Unsuited(f"the process that tried to import it {ended}")
    told = json.loads(said)
    if "failed" in told:
        raise Unsuited(told["failed"])
    entries, left_out, reasons, left_out_s = told["selection"]
    return Selection(tuple(entries), frozenset(left_out), tuple(reasons), left_out_s)


def _be_the_probe(
    parent: int, name: str, program: Program, loaded_at_start: Collection[str], write_fd: int
) -> NoReturn:
    try:
        die_with_parent(parent, signal.SIGKILL)
        os.setsid()
        # What the module prints comes once, from the import that counts.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
        selection = _ImportWatch().selection(name, program, loaded_at_start)
        told: dict[str, Any] = {
            "selection": (selection.entries, [*selection.left_out], selection.reasons, selection.left_out_s)
        }
    except Unsuited as error:
        told = {"failed": str(error)}
    except BaseException as error:
        told = {"failed": f"importing it failed: {type(error).__name__}: {error}"}
    with open(write_fd, "w") as answer:
        json.dump(told, answer)
    os._exit(0)


class _ImportWatch:
    """Sees every import in this process: which module it is for, how long it takes, and what it leaves behind.

    It replaces functions of Python's import system, and does not put them back.
    """

    def __init__(self) -> None:
        self._root = Load("")
        self._running = [self._root]
        # Threads and open files that were there when somebody last looked, and who has begun those that came later.
        self._known = set(_kept())
        self._begun: dict[str, Load] = {}
        self._watch_loads()
        self._watch_requests()
        self._watch_variables()

    def selection(self, name: str, program: Program, loaded_at_start: Collection[str]) -> Selection:
        """Import `name`. Raises Unsuited, and what the import raises."""
        importlib.import_module(name)
        self._look()
        still = _kept()
        for what, load in self._begun.items():
            if what in still:
                load.why = load.why or still[what]
        loads = {load.name: load for load in self._root.all()}
        for shadowed, file in shadows(program, loaded_at_start):
            if shadowed in loads:
                loads[shadowed].why = f"has the name of {file}"
        selection = select(self._root.loads)
        if self._root.why or (cuda_is_on() and not selection.reasons):
            raise Unsuited(f"it {self._root.why or 'starts CUDA'}")
        return selection

    def _look(self) -> None:
        """Blame the module that runs now for what is new."""
        now = _kept()
        for what in now.keys() - self._known:
            self._begun[what] = self._running[-1]
        self._known = set(now)

    def _watch_loads(self) -> None:
        system: Any = importlib._bootstrap
        load_unlocked = system._load_unlocked

        def watched(spec: Any) -> Any:
            self._look()
            load = Load(spec.name)
            self._running[-1].asked.add(spec.name)
            self._running[-1].loads.append(load)
            self._running.append(load)
            begun_s = time.monotonic()
            try:
                return load_unlocked(spec)
            except BaseException:
                load.is_gone = True
                raise
            finally:
                took_s = time.monotonic() - begun_s
                load.own_s += took_s
                self._look()
                self._running.pop()
                self._running[-1].own_s -= took_s

        system._load_unlocked = watched

    def _watch_requests(self) -> None:
        """Note what a module asks for, also if that is loaded already."""
        ask, import_module = builtins.__import__, importlib.import_module

        def asked(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            whole = self._note(name, (globals or {}).get("__package__"), level)
            module = ask(name, globals, locals, fromlist, level)
            for item in fromlist or ():
                self._running[-1].asked.update(_sources(sys.modules.get(whole), item))
            return module

        def asked_for_module(name: str, package: str | None = None) -> Any:
            level = len(name) - len(name.lstrip("."))
            self._note(name[level:], package, level)
            return import_module(name, package)

        builtins.__import__ = asked
        importlib.import_module = asked_for_module

    def _note(self, name: str, package: str | None, level: int) -> str:
        whole = name
        if level:
            with suppress(ImportError):
                whole = importlib.util.resolve_name("." * level + name, package or "")
        self._running[-1].asked.add(whole)
        return whole

    def _watch_variables(self) -> None:
        environ: Any = type(os.environ)
        lookup: Callable[[Any, str], str] = environ.__getitem__

        def watched(variables: Any, name: str) -> str:
            if name in RANK_VARIABLES:
                self._running[-1].why = f"looks up {name}, which is another one in each worker"
            return lookup(variables, name)

        environ.__getitem__ = watched


def _sources(module: Any, item: str) -> set[str]:
    """The modules that `from module import item` may give a part of; the item's own text is not run."""
    known = vars(module) if module is not None else {}
    named = {f"{module.__name__}.{item}"} if module is not None else set()
    values = known.values() if item == "*" else (known.get(item),)
    found = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in values}
    return {name for name in (*named, *found) if isinstance(name, str) and name in sys.modules}


def _kept() -> dict[str, str]:
    """The threads and open files of this process, and what to say of one that a module leaves behind."""
    own = str(os.getpid())
    threads = {f"thread {tid}": "starts a thread" for tid in os.listdir("/proc/self/task") if tid != own}  # noqa: PTH208
    return {**threads, **{f"{fd} {path}": f"keeps {path} open" for fd, path in open_files().items()}}
