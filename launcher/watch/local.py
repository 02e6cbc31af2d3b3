"""Finds the agents of this host by their sockets, and asks them."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elaunch.agent.answers.local_socket import SOCKET_NAME, credentials
from elaunch.agent.core.stack_answer import StackAnswer, read_stack_answer
from elaunch.agent.guardian.guardian import SOCKET_FOLDERS
from elaunch.records import dataclass
from elaunch.rendezvous.codec import decode_fields, parse_json
from elaunch.rendezvous.rules.reports import JobReport, NodeReport, is_possible
from elaunch.rendezvous.texts import plain

# An agent that clears a generation away may be busy for a moment.
ANSWER_S = 3.0
_AGAIN_S = 0.05
_ANSWER_BYTES_MAX = 4 << 20
_FOLDER = re.compile(r"elaunch_[0-9a-f]{16}_socket")
_ROOT = 0


class NoAnswer(Exception):
    """An agent that was found said nothing, or nothing that can be read. The message has no full stop."""


class AgentGone(NoAnswer):
    """The agent has ended, or was killed."""


@dataclass(frozen=True)
class LocalAgent:
    """An agent of this host, by its socket at `path`. `is_own` says that it runs as this user."""

    path: Path
    pid: int
    is_own: bool
    is_remote: bool
    job: JobReport
    node: NodeReport


def local_agents() -> tuple[list[LocalAgent], list[str]]:
    """The agents of this user (root's: of all users) that answer, and a sentence for each one that does not."""
    found: list[LocalAgent] = []
    troubles: list[str] = []
    spent_s: defaultdict[int, float] = defaultdict(float)
    for path, owner in _sockets():
        # Another user's sockets may be many and silent: all of that user's together get the time of one answer.
        if owner != os.geteuid() and spent_s[owner] >= ANSWER_S:
            troubles.append(f"the other sockets of the user with id {owner} were not asked: it takes too long")
            continue
        begun_s = time.monotonic()
        try:
            found.append(status_of(path))
        except NoAnswer as error:
            # One that has ended since it was listed is of no interest.
            if path.exists():
                troubles.append(str(error))
        spent_s[owner] += time.monotonic() - begun_s
    return sorted(found, key=lambda agent: (agent.job.run_id, agent.pid)), list(dict.fromkeys(troubles))


def status_of(path: Path) -> LocalAgent:
    """Ask the agent at that socket how its node is. Raises NoAnswer."""
    fields, pid, uid = _ask(path, "status")
    try:
        said = decode_fields({"is_remote": bool, "job": JobReport, "node": NodeReport}, fields)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise NoAnswer(f"the elaunch with pid {pid} is of another version: its answer cannot be read") from None
    if not is_possible(said["node"]):
        raise NoAnswer(f"the elaunch with pid {pid} gave an answer that cannot be true")
    return LocalAgent(path, pid, uid == os.geteuid(), **said)


def way_to_store(agent: LocalAgent) -> str:
    """How its agent reaches the job's store, as JSON (`store.way`). Raises NoAnswer."""
    fields, pid, _ = _ask(agent.path, "store")
    if not isinstance(fields.get("store"), dict):
        raise NoAnswer(f"the elaunch with pid {pid} does not say where the job's store is")
    return json.dumps(fields["store"])


def stacks_of(agent: LocalAgent, wait_s: float) -> StackAnswer:
    """The stacks of that agent's workers. Raises NoAnswer."""
    fields, pid, _ = _ask(agent.path, "stacks", wait_s)
    answer = read_stack_answer(json.dumps(fields.get("stacks")), agent.node.node_id)
    if answer is None:
        raise NoAnswer(f"the elaunch with pid {pid} sent stacks that cannot be read")
    return answer


def _sockets() -> Iterator[tuple[Path, int]]:
    """The sockets in folders that nobody but their owners can have made, and the owners' user ids."""
    own = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for parent in dict.fromkeys(folder for folder in (*SOCKET_FOLDERS, *own) if folder):
        try:
            names = sorted(name for name in os.listdir(parent) if _FOLDER.fullmatch(name))  # noqa: PTH208
        except OSError:
            continue
        for name in names:
            folder = Path(parent, name)
            try:
                status = folder.lstat()
            except OSError:
                continue
            is_seen = os.geteuid() in (status.st_uid, _ROOT)
            if stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077 and is_seen:
                yield folder / SOCKET_NAME, status.st_uid


def _ask(path: Path, topic: str, patience_s: float = ANSWER_S) -> tuple[dict[str, Any], int, int]:
    """The answer, and the pid and user id of the process that gave it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience_s)
        try:
            owner = path.parent.lstat().st_uid
            _connect(connection, str(path), patience_s)
        except TimeoutError:
            raise NoAnswer(f"too many others ask the elaunch at {path}, or it does not go on") from None
        except FileNotFoundError:
            raise AgentGone(f"the elaunch of {path.parent} has ended") from None
        except ConnectionRefusedError:
            raise AgentGone(
                f"an elaunch that was killed has left {path.parent}; its user's next one removes it"
            ) from None
        except OSError as error:
            raise NoAnswer(f"the socket {path} cannot be asked: {error.strerror or error}") from None
        pid, uid = credentials(connection)
        # The folder is its owner's alone, so this is the owner too. A link in it may lead to another user's socket,
        # even to one that root has opened, and that others answer.
        if uid != owner:
            raise NoAnswer(f"the socket {path} is served by another user; it is not believed")
        try:
            connection.sendall(f'{{"ask":"{topic}"}}\n'.encode())
            answer = parse_json(_line(connection, patience_s))
        except TimeoutError:
            raise NoAnswer(f"the elaunch with pid {pid} did not answer within {patience_s:g} s") from None
        except (OSError, ValueError):
            raise NoAnswer(f"the elaunch with pid {pid} gave no answer") from None
    if not isinstance(answer, dict):
        raise NoAnswer(f"the elaunch with pid {pid} gave no answer that can be read")
    if "error" in answer:
        raise NoAnswer(f"the elaunch with pid {pid} says: {plain(str(answer['error'])[:200])}")
    return answer, pid, uid


def _connect(connection: socket.socket, path: str, patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while True:
        try:
            connection.connect(path)
            return
        except BlockingIOError:
            # The kernel holds no more connections for it.
            if time.monotonic() > end_s:
                raise TimeoutError from None
        time.sleep(_AGAIN_S)


def _line(connection: socket.socket, patience_s: float) -> bytes:
    end_s = time.monotonic() + patience_s
    data = bytearray()
    while not data.endswith(b"\n"):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(1 << 16)
        if not piece or len(data) > _ANSWER_BYTES_MAX:
            raise ValueError("the answer ends too early or not at all")
        data += piece
    return bytes(data)
