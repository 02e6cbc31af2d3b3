"""Fork servers that stay when their job has ended: what the log says of them, and what the command `warm` shows."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.config import AgentConfig
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.forkserver.warm.client import Cold, WarmKind, why_useless
from elaunch.agent.forkserver.warm.holders import holders
from elaunch.agent.forkserver.warm.keeping import leave_behind, servers, state, stop
from elaunch.agent.forkserver.warm.place import NoPlace as NoPlace
from elaunch.agent.forkserver.warm.place import folder
from elaunch.rendezvous.codec import decode_fields
from elaunch.rendezvous.texts import plain


def how_it_began(fork_server: ForkServer) -> str:
    """The sentence for the log about a job that wanted a warm start; empty if there was nothing to start from."""
    if origin := fork_server.began_from:
        clock = time.strftime("%H:%M", time.localtime(origin.since))
        return f"warm start: from the fork server that stayed since {clock} (pid {origin.pid})"
    why = str(fork_server.cold or "")
    return f"cold start: {why}" if why else ""


def leave(config: AgentConfig, fork_server: ForkServer) -> str:
    """Let a fork server stay, if none is there that the next job can use. Returns a sentence for the log, if any."""
    program, preload = config.spec.program, fork_server.warm_preload
    if not preload or why_useless(program, config.environment):
        return ""
    cold, origin = fork_server.cold, fork_server.began_from
    if cold and not (cold.is_gone or cold.is_outdated or cold.is_stuck):
        # The one that is there serves other programs, or nobody could use one here.
        return ""
    known = origin.packages if origin else cold.packages if cold else ()
    if origin:
        return ""
    packages = tuple(dict.fromkeys((*known, *config.text.packages)))
    kind = WarmKind(program, preload)
    try:
        in_place = not (cold and cold.is_gone)
        leave_behind(kind, config.environment, packages, config.warm_s, in_place=in_place, sharers=fork_server.sharers)
    except NoPlace as error:
        return f"no fork server stays: {error}"
    except OSError as error:
        return f"no fork server stays: {error.filename or folder(os.environ)}: {error.strerror}"
    return (
        f"a fork server stays for {config.warm_s / 60:g} min without a job, so that the next start needs no import;"
        " elaunch warm --stop ends it"
    )


@dataclass(frozen=True)
class WarmState:
    """What a fork server that stayed says of itself. `left_s` is None while a job uses it."""

    pid: int
    since: float
    left_s: float | None
    jobs: int
    python: str
    program: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Stayed:
    """A fork server of this user, by its socket; `state` is None where `trouble` says why it does not tell.

    `is_gone` says that somebody has killed it, and nothing is left but its socket.
    """

    path: Path
    state: WarmState | None
    pss_bytes: int | None = None
    trouble: str = ""
    is_gone: bool = False


_HINTS = {
    "pid": int,
    "since": float,
    "left_s": float | None,
    "jobs": int,
    "python": str,
    "program": str,
    "packages": tuple[str, ...],
}


def all_that_stayed() -> tuple[Stayed, ...]:
    """The fork servers of this user that stayed. Raises NoPlace."""
    return tuple(_looked_at(path) for path in servers())


def _looked_at(path: Path) -> Stayed:
    try:
        said = WarmState(**decode_fields(_HINTS, state(path)))
    except Cold as error:
        # On a busy host it may live and answer late.
        is_gone = error.is_gone and not holders(path)
        return Stayed(path, None, trouble=str(error) or "it has ended", is_gone=is_gone)
    except (KeyError, TypeError, ValueError, OSError) as error:
        return Stayed(path, None, trouble=plain(str(error)))
    return Stayed(path, said, _pss_bytes(said.pid))


def _pss_bytes(pid: int) -> int | None:
    """The process's share of memory: pages that several processes have count in parts."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return None


def end(stayed: Stayed) -> str:
    """End it; jobs go on. Returns why it cannot be ended, or nothing."""
    try:
        stop(stayed.path)
    except Cold as error:
        return str(error)
    except OSError as error:
        return f"{stayed.path} cannot be ended or removed ({error.strerror})"
    return ""
