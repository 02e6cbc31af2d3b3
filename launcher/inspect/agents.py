"""Finds the agents of this host by their sockets, and queries them."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elaunch.agent.core.membership import OrderResponse
from elaunch.agent.diagnosis.stack_groups import StackAnswer, read_stack_answer
from elaunch.agent.guardian.guardian import SOCKET_FOLDERS
from elaunch.agent.linux import credentials, in_threads, state
from elaunch.agent.serve.status_server import SOCKET_NAME
from elaunch.rendezvous.codec import decode, decode_fields
from elaunch.rendezvous.format import plain
from elaunch.rendezvous.rules.queries import Topic
from elaunch.rendezvous.rules.reports import JobReport, NodeReport
from elaunch.strict_json import parse_json

# An agent that clears a generation away may be busy for a moment.
RESPONSE_S = 3.0
_RESPONSE_BYTES_MAX = 4 << 20
_FOLDER = re.compile(r"elaunch_[0-9a-f]{16}_socket")
_ROOT = 0
# Sockets of one other user that root queries, who may have made any number. Each takes a thread.
_OF_ANOTHER_MAX = 64
# A query that is late has its own message, which names the agent.
_SPARE_S = 0.5

Response = TypeVar("Response")


class NoResponse(Exception):
    """An agent that was found gave no response, or none that can be read. The message has no full stop."""


class AgentGone(NoResponse):
    """The agent has exited, or was killed."""


@dataclass(frozen=True)
class LocalAgent:
    """An agent of this host, by its socket at `path`. `is_own`: it runs as this user."""

    path: Path
    pid: int
    is_own: bool
    is_remote: bool
    job: JobReport
    node: NodeReport


def local_agents() -> tuple[list[LocalAgent], list[str]]:
    """The agents of this user (root's: of all users) that answer, and a sentence for each one that does not."""
    problems: list[str] = []
    paths: list[Path] = []
    for uid, found in _sockets().items():
        limit = len(found) if uid == os.geteuid() else _OF_ANOTHER_MAX
        paths += found[:limit]
        if found[limit:]:
            problems.append(f"{len(found) - limit} more sockets of user {uid} were not queried: it takes too long")
    agents: list[LocalAgent] = []
    for path, response in zip(paths, query_all([partial(status_of, path) for path in paths]), strict=True):
        if isinstance(response, LocalAgent):
            agents.append(response)
        elif path.exists():
            # One that has exited since it was listed is of no interest.
            problems.append(str(response))
    agents.sort(key=lambda agent: (agent.job.run_id, agent.pid))
    return agents, list(dict.fromkeys(problems))


def query_all(queries: Sequence[Callable[[], Response]], wait_s: float = RESPONSE_S) -> list[Response | NoResponse]:
    """The responses in order, each queried at the same time; NoResponse for each agent that gives none."""

    def tried(query: Callable[[], Response]) -> Response | NoResponse:
        try:
            return query()
        except NoResponse as error:
            return error

    works = {number: partial(tried, query) for number, query in enumerate(queries)}
    found = in_threads(works, wait_s + _SPARE_S, "elaunch-query")
    late = NoResponse(f"an elaunch of this host did not answer within {wait_s:g} s")
    return [found.get(number, late) for number in range(len(queries))]


def status_of(path: Path) -> LocalAgent:
    """The report of the agent at that socket. Raises NoResponse."""
    kinds: dict[str, type] = {"is_remote": bool, "job": JobReport, "node": NodeReport}
    return _query(path, "status", lambda fields, *who: LocalAgent(path, *who, **decode_fields(kinds, fields)))


def store_locator(agent: LocalAgent) -> str:
    """How its agent reaches the job's store, as JSON (`locate.locator_of`). Raises NoResponse."""
    return _query(agent.path, "store", lambda fields, *_: json.dumps(fields["store"]))


def stacks_of(agent: LocalAgent, wait_s: float) -> StackAnswer:
    """The stacks of that agent's workers. Raises NoResponse."""

    def read(fields: dict[str, Any], *_: object) -> StackAnswer:
        response = read_stack_answer(json.dumps(fields["stacks"]), agent.node.node_id)
        if response is None:
            raise ValueError("these are no stacks")
        return response

    return _query(agent.path, "stacks", read, wait_s)


def order_to(agent: LocalAgent, topic: Topic) -> OrderResponse:
    """Give that agent an order for its whole job. Raises NoResponse."""
    return _query(agent.path, topic.value, lambda fields, *_: decode(OrderResponse, json.dumps(fields["order"])))


def _sockets() -> dict[int, list[Path]]:
    """The sockets in folders that only their owners can have made, by the owners' user ids."""
    found: defaultdict[int, list[Path]] = defaultdict(list)
    own = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for parent in dict.fromkeys(folder for folder in (*SOCKET_FOLDERS, *own) if folder):
        with suppress(OSError):
            for folder in sorted(each for each in Path(parent).iterdir() if _FOLDER.fullmatch(each.name)):
                with suppress(OSError):
                    status = folder.lstat()
                    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
                    if is_private and os.geteuid() in (status.st_uid, _ROOT):
                        found[status.st_uid].append(folder / SOCKET_NAME)
    return found


def _query(
    path: Path, topic: str, read: Callable[[dict[str, Any], int, bool], Response], wait_s: float = RESPONSE_S
) -> Response:
    """What `read` makes of an agent's response, its pid, and whether it runs as this user. Raises NoResponse."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(wait_s)
        try:
            owner = path.parent.lstat().st_uid
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            raise AgentGone(f"the elaunch of {path.parent} has ended") from None
        except OSError as error:
            # The kernel's backlog may be full: many others query it, or it hangs.
            raise NoResponse(f"the socket {path} cannot be queried: {error.strerror or error}") from None
        pid, uid = credentials(connection)
        # The folder is its owner's alone, so this is the owner too. A link in it may lead to another user's socket,
        # even to one that root has opened, and that others answer.
        if uid != owner:
            raise NoResponse(f"the socket {path} is served by another user; it is not trusted")
        try:
            connection.sendall(f'{{"ask":"{topic}"}}\n'.encode())
            if state(pid) in ("T", "t"):
                raise NoResponse(f"the elaunch with pid {pid} is stopped, by SIGSTOP or a debugger (kill -CONT {pid})")
            with connection.makefile("rb") as stream:
                response = parse_json(stream.readline(_RESPONSE_BYTES_MAX))
            if isinstance(response, dict) and "error" in response:
                raise NoResponse(f"the elaunch with pid {pid}: {plain(str(response['error'])[:200])}")
            return read(response, pid, uid == os.geteuid())
        except TimeoutError:
            raise NoResponse(f"the elaunch with pid {pid} did not answer within {wait_s:g} s") from None
        except (OSError, KeyError, TypeError, ValueError, RecursionError):
            raise NoResponse(f"the elaunch with pid {pid} gave no response that can be read") from None
