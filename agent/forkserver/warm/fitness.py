"""Whether a job may start from a warm fork server, decided in a fork of it: reading files may take long."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType

from elaunch.agent.forkserver.preload import shadows
from elaunch.agent.forkserver.warm.condition import condition, difference, jobs
from elaunch.agent.forkserver.warm.files import Loaded
from elaunch.agent.forkserver.warm.handover import Handover
from elaunch.agent.forkserver.warm.variables import Read, read_before

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Known:
    """What a warm fork server knows of itself since its imports.

    `folder` is where it imported, `environment` was there then, without what nothing can have `read`. `modules` are all
    loaded ones, whether hidden or not. `in_folder` are files that they looked for in the current folder. `packages` and
    `sharers` as in `Boot`.
    """

    folder: str
    environment: Mapping[str, str]
    modules: Mapping[str, ModuleType]
    read: Read
    loaded: Loaded
    in_folder: frozenset[str]
    loaded_at_start: Collection[str]
    packages: tuple[str, ...]
    sharers: int = 0


@dataclass(frozen=True)
class Unfit:
    """Why a job starts cold. `is_outdated` says that the warm fork server is of no use to the next one like it either.

    `lacks` says that the program needs more modules than the fork server has.
    """

    why: str
    is_outdated: bool = True
    lacks: bool = False


def misfit(known: Known, handover: Handover) -> Unfit | None:
    """Why that job must not start from this process, which is in the job's folder; None if it may."""
    if why := difference(condition(), handover.condition):
        return Unfit(why)
    if why := difference(jobs(dict(known.environment)), jobs(handover.variables)):
        return Unfit(why)
    if why := _other_share(known, handover) or read_before(known.environment, handover.variables, known.read):
        return Unfit(why)
    if why := known.loaded.change():
        return Unfit(why)
    if found := sorted(path for path in known.in_folder if os.path.exists(path)):  # noqa: PTH110
        return Unfit(f"a module reads {found[0]} in the current folder while it is imported", is_outdated=False)
    return _of_program(known, handover)


def _other_share(known: Known, handover: Handover) -> str:
    """A sentence about another number of workers, if OMP_NUM_THREADS has followed it."""
    then, now = known.sharers, handover.boot.sharers
    if not then or not now or known.environment.get(_THREADS) == handover.variables.get(_THREADS):
        return ""
    return (
        f"{_workers(now)} here, and {_workers(then)} before: each has another share of the cores ({_THREADS}), which is"
        f" read when a program starts; with {_THREADS} in the shell any number starts warm"
    )


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _of_program(known: Known, handover: Handover) -> Unfit | None:
    program = handover.boot.program
    if shadow := next(shadows(program, known.loaded_at_start, known.modules), None):
        return Unfit(f"{shadow[1]} has the name of a module that is loaded", is_outdated=False)
    if missing := [name for name in handover.boot.packages if name not in known.packages]:
        text = f"{missing[0].replace(':', '.')} is not imported yet, which {program.target} imports"
        return Unfit(text, lacks=True)
    return None
