"""Imports a module in a forked process that is thrown away, to see what the fork server must not import.

A module that is unsuitable cannot be taken out of a process again: a thread, an attribute that it has set elsewhere or
an entry in a registry would stay. So the fork server never runs such a module (decision 044).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from elaunch.agent.environment import RANK_VARIABLES
from elaunch.agent.forkserver.fork_safety import cuda_is_on, open_files, shadows
from elaunch.agent.forkserver.imported import is_suitable
from elaunch.agent.forkserver.kept_at_import import rank_statement
from elaunch.agent.forkserver.loads import Load, select
from elaunch.agent.forkserver.lookups import EnvironmentCopies, keeper
from elaunch.agent.forkserver.selection import ProbeAnswer, Selection, Wanted
from elaunch.agent.linux import die_with_parent
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.job_spec import Program

# In the probe of a program that runs: it takes CPU time that nobody else wants.
_LOWEST_PRIORITY = 19
# An import that never ends is ended.
_CPU_S_MAX = 120


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
    told = decode(ProbeAnswer, said.decode())
    if told.failed:
        raise Unsuited(told.failed)
    return told.selection


def probe_for_agent(wanted_fd: int, answer_fd: int, program: Program, loaded_at_start: Collection[str]) -> NoReturn:
    """In a child of the fork server: import what a `Wanted` names, and write a `ProbeAnswer` for the agent."""
    os.nice(_LOWEST_PRIORITY)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S_MAX, _CPU_S_MAX))
    with open(wanted_fd) as file:
        wanted = decode(Wanted, file.read())
    _answer(answer_fd, lambda: _ImportWatch(wanted).selection_of_all(program, loaded_at_start))
    # With the processes that modules have started.
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _be_the_probe(
    parent: int, name: str, program: Program, loaded_at_start: Collection[str], write_fd: int
) -> NoReturn:
    die_with_parent(parent, signal.SIGKILL)
    os.setsid()
    # What the module prints comes once, from the import that counts.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    _answer(write_fd, lambda: _ImportWatch(Wanted((name,))).selection(name, program, loaded_at_start))
    os._exit(0)


def _answer(write_fd: int, find: Callable[[], Selection]) -> None:
    try:
        found = ProbeAnswer(find())
    except Unsuited as error:
        found = ProbeAnswer(failed=str(error))
    except BaseException as error:
        found = ProbeAnswer(failed=f"importing it failed: {type(error).__name__}: {error}")
    with open(write_fd, "w") as answer:
        answer.write(encode(found))


class _ImportWatch:
    """Sees every import in this process: which module it is for, how long it takes, and what it leaves behind.

    It replaces functions of Python's import system, and does not put them back.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._environment = dict(os.environ)
        loaded = {name: module for name, module in sys.modules.items() if isinstance(module, ModuleType)}
        # A lazy module would import more if it were asked for an attribute that it lacks.
        self._origins = {name: _origins(vars(module).get("__spec__")) for name, module in loaded.items()}
        # Modules that keep the value of a variable, by that variable.
        self._keepers: dict[str, set[str]] = {}
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
        return self._selected(program, loaded_at_start)

    def selection_of_all(self, program: Program, loaded_at_start: Collection[str]) -> Selection:
        """Import all that is wanted, where that can be done here. Raises Unsuited."""
        for name in self._wanted.names:
            # A program may import a module in its own way, which fails here.
            with suppress(Exception, SystemExit):
                importlib.import_module(name)
        for load in (each for root in self._root.loads for each in root.all()):
            if not is_suitable(load.name, self._origins):
                load.why = "is not of an installed package"
        return self._selected(program, loaded_at_start)

    def _selected(self, program: Program, loaded_at_start: Collection[str]) -> Selection:
        self._look()
        still = _kept()
        for what, load in self._begun.items():
            if what in still:
                load.why = load.why or still[what]
        loads = {load.name: load for load in self._root.all()}
        for shadowed, file in shadows(program, loaded_at_start):
            if shadowed in loads:
                loads[shadowed].why = f"has the name of {file}"
        for variable, keepers in self._keepers.items():
            # A variable that an import sets has the same value for those that are imported later.
            if os.environ.get(variable) == self._environment.get(variable):
                for name in keepers & loads.keys():
                    loads[name].why = loads[name].why or f"looks up {variable}, which the program sets"
        selection = select(self._root.loads, {*self._wanted.refused})
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
            self._origins[spec.name] = _origins(spec)
            self._running[-1].asked.add(spec.name)
            self._running[-1].loads.append(load)
            self._running.append(load)
            begun_s = time.process_time()
            try:
                return load_unlocked(spec)
            except BaseException:
                load.is_gone = True
                raise
            finally:
                took_s = time.process_time() - begun_s
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
        copies = EnvironmentCopies()

        def watched(variables: Any, name: str) -> str:
            frame = sys._getframe(1)
            if name in RANK_VARIABLES and not rank_statement(frame):
                self._running[-1].why = f"looks up {name}, which is another one in each worker"
            if name in self._wanted.variables and not copies.has(frame) and (reader := keeper(name, frame)):
                self._keepers.setdefault(name, set()).add(reader)
            return lookup(variables, name)

        environ.__getitem__, environ.keys = watched, copies.watched(environ.keys)


def _origins(spec: Any) -> tuple[str, ...]:
    """The file of a module, or the folders of a package that has no file of its own."""
    if spec is None or spec.origin:
        return (str(spec.origin),) if spec else ()
    return tuple(f"{place}/" for place in spec.submodule_search_locations or ())


def _sources(module: Any, item: str) -> set[str]:
    """The modules that `from module import item` may give a part of; the item's own text is not run."""
    known = vars(module) if module is not None else {}
    named = {f"{module.__name__}.{item}"} if module is not None else set()
    values = known.values() if item == "*" else (known.get(item),)
    found = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in values}
    return {name for name in (*named, *found) if isinstance(name, str) and name in sys.modules}


def _kept() -> dict[str, str]:
    """The threads, open files and CPUs of this process, and what to say of what a module leaves behind."""
    own = str(os.getpid())
    threads = {f"thread {tid}": "starts a thread" for tid in os.listdir("/proc/self/task") if tid != own}  # noqa: PTH208
    files = {f"{fd} {path}": f"keeps {path} open" for fd, path in open_files().items()}
    return {**threads, **files, f"CPUs {sorted(os.sched_getaffinity(0))}": "binds its process to other CPUs"}
