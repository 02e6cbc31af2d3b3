"""The status and stacks of one job, and orders to it: through the agents of this host, the job's store, or both."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from elaunch.agent.core.membership import OrderResponse
from elaunch.agent.diagnosis.stack_groups import Stack, StackResponse, read_stack_response, stacks_in
from elaunch.agent.guardian.guardian import SOCKET_FOLDERS
from elaunch.agent.linux import credentials, in_threads, state
from elaunch.agent.serve.status_server import SOCKET_NAME, STACKS_S
from elaunch.launcher.errors import SiteError
from elaunch.launcher.store.connect import store_of
from elaunch.launcher.store.locate import RendezvousPlan
from elaunch.rendezvous.codec import decode, decode_fields
from elaunch.rendezvous.format import plain
from elaunch.rendezvous.rules.queries import RESPONSE_BYTES_MAX, RESPONSES_PER_S, Query, Topic, post_query
from elaunch.rendezvous.rules.reports import JobReport, JobState, NodeReport, job_report, read_node_report
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, SnapshotReader
from elaunch.rendezvous.store import Changes, Denied, OwnLimit, Store, StoreError, Unavailable, Update, View
from elaunch.rendezvous.types import OpenKind, host_of, job_name
from elaunch.strict_json import parse_json

# An agent that tears down a generation may be busy for a moment.
RESPONSE_S = 3.0
_RESPONSE_BYTES_MAX = 4 << 20
_FOLDER = re.compile(r"elaunch_[0-9a-f]{16}_socket")
_ROOT = 0
# The limit of sockets of another user that root queries: each takes a thread.
_OF_ANOTHER_MAX = 64
# Added, so that a query's own timeout comes first: its message names the agent.
_SPARE_S = 0.5

Response = TypeVar("Response")
# A healthy node responds immediately. The nodes of a large job take turns.
PATIENCE_S = 3.0
# The lease outlives the query, so that a late response is deleted with it.
_LEASE_SPARE_S = 5.0
_RETRY_S = 0.2
_OF_NO_JOB = (JobState.ENDED, JobState.GONE)


class NoResponse(SiteError):
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


def local_jobs() -> tuple[list[list[LocalAgent]], list[str]]:
    """The agents of this user (root: of all users) that answer, by job, and a sentence for each one that does not."""
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
            # An agent that has exited since it was listed is not reported.
            problems.append(str(response))
    # Two jobs may have one run id: their leaders differ.
    jobs: dict[tuple[str, str], list[LocalAgent]] = {}
    for agent in sorted(agents, key=lambda agent: (agent.job.run_id, agent.pid)):
        jobs.setdefault((agent.job.run_id, agent.job.leader), []).append(agent)
    return [*jobs.values()], list(dict.fromkeys(problems))


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


def stacks_of(agent: LocalAgent, wait_s: float) -> StackResponse:
    """The stacks of that agent's workers. Raises NoResponse."""

    def read(fields: dict[str, Any], *_: object) -> StackResponse:
        response = read_stack_response(json.dumps(fields["stacks"]), agent.node.node_id)
        if response is None:
            raise ValueError("these are not stacks")
        return response

    return _query(agent.path, "stacks", read, wait_s)


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
    """Returns `read(response, pid, is_own)` for the agent at `path`. Raises NoResponse."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(wait_s)
        try:
            owner = path.parent.lstat().st_uid
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            raise AgentGone(f"the elaunch of {path.parent} has ended") from None
        except OSError as error:
            # The listen backlog may be full: many others query the agent, or it hangs.
            raise NoResponse(f"the socket {path} cannot be queried: {error.strerror or error}") from None
        pid, uid = credentials(connection)
        # The folder is private, so this must be its owner too. A symlink in it may lead to another user's socket, even
        # to one that root has opened, and that others serve.
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


@dataclass(frozen=True)
class Gathered:
    """The status of a job: its keys, its nodes' reports, and why a node did not report, both by node id."""

    job: JobReport
    nodes: Mapping[str, NodeReport]
    silent: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeStacks:
    """The stacks of a job's workers, by rank; `silent` has a sentence for each host without a response."""

    run_id: str
    stacks: tuple[Stack, ...]
    silent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class JobOver(SiteError):
    """The job's agent on this host has ended since the last query."""


def patience_s(nodes: int, base_s: float = PATIENCE_S) -> float:
    """How long the responses of that many nodes may take."""
    return base_s + nodes / RESPONSES_PER_S


def absence(job: JobReport, node_id: str) -> str:
    """Whether a seated node without a lease has `left` or was `lost`."""
    has_left = job.generation and job.generation.kind is OpenKind.LEAVE and job.generation.node_id == node_id
    return "left" if has_left else "lost"


def query_nodes(store: Store, keys: Keys, topic: Topic, node_ids: Set[str], wait_s: float) -> dict[str, str]:
    """The nodes' responses as text, by node id: of all of `node_ids`, or of those that answer within `wait_s`.

    While another query is pending it is waited for, within the same time. Raises StoreError.
    """
    query = Query(secrets.token_hex(8), topic, secrets.randbits(62) + 1)
    prefix = keys.responses(query.identity)
    end_s = time.monotonic() + wait_s
    store.grant(query.lease, math.ceil(wait_s + _LEASE_SPARE_S))
    try:
        # Watched, not polled: the responses of a large job are long.
        updates = SimpleQueue[Update]()
        with closing(store.watch(prefix, None, updates.put)) as watch:
            watch.begun()
            while not store.commit(post_query(keys, query)).held:
                if time.monotonic() > end_s:
                    raise Unavailable(f"another query of its nodes has been pending for more than {wait_s:g} s")
                time.sleep(_RETRY_S)
            return _collected(updates, prefix, node_ids, wait_s)
    finally:
        with suppress(StoreError):
            store.revoke(query.lease)


def _collected(updates: SimpleQueue[Update], prefix: str, node_ids: Set[str], wait_s: float) -> dict[str, str]:
    responses: dict[str, str] = {}
    end_s = time.monotonic() + wait_s
    with suppress(Empty):
        while len(responses) < len(node_ids) and (left_s := end_s - time.monotonic()) > 0:
            match updates.get(timeout=left_s):
                case View(_, entries) | Changes(_, entries):
                    for key, entry in entries.items():
                        node_id = key.removeprefix(prefix)
                        if entry and node_id in node_ids and len(entry.value) <= RESPONSE_BYTES_MAX:
                            responses[node_id] = entry.value
                case StoreError():
                    break
    return responses


class StoreSource:
    """A job by its store: this host need not be one of the job's."""

    def __init__(self, plan: RendezvousPlan, run_id: str) -> None:
        """Raises UsageError, and SiteError if the store cannot be reached."""
        self._keys = Keys(run_id, plan.prefix)
        self._where = ",".join(str(endpoint) for endpoint in plan.endpoints)
        self.notes: list[str] = []
        self._store: Store = store_of(plan, self.notes.append)
        try:
            self._store.check()
        except StoreError as error:
            self._store.close()
            is_away = isinstance(error, Unavailable) and not isinstance(error, OwnLimit)
            away = f"the job's store at {self._where} does not answer: " if is_away else ""
            raise SiteError(f"{away}{error}") from None

    def take(self, known: Mapping[str, NodeReport] | None = None) -> Gathered:
        """The job's current status, with the reports in `known`. Raises SiteError."""
        known = known or {}
        snapshot = self._snapshot()
        responses, silent, notes = self._query(Topic.STATUS, snapshot, known.keys())
        nodes = {node_id: report for node_id, text in responses.items() if (report := read_node_report(text, node_id))}
        return Gathered(job_report(snapshot), {**nodes, **known}, silent, (*self.notes, *notes))

    def stacks(self, known: Collection[StackResponse] = ()) -> NodeStacks:
        """The stacks of the nodes in `known`, and of all others, taken now. Raises SiteError."""
        snapshot = self._snapshot()
        responses = {response.node_id: response for response in known}
        texts, silent, notes = self._query(Topic.STACKS, snapshot, responses.keys(), STACKS_S)
        for node_id, text in texts.items():
            if response := read_stack_response(text, node_id):
                responses[node_id] = response
            else:
                silent[node_id] = "sent stacks that cannot be read"
        table = snapshot.table.seats if snapshot.table else ()
        seats = {seat.node_id: range(seat.first_rank, seat.first_rank + seat.slots) for seat in table}
        # Only a node's own ranks count, whatever its response has.
        found = [(id_, stack) for id_, response in responses.items() for stack in stacks_in([response])]
        stacks = [stack for id_, stack in found if stack.rank in seats.get(id_, ())]
        absent = [f"{host_of(id_)} {why}" for id_, why in silent.items() if id_ in seats]
        return NodeStacks(self._keys.run_id, tuple(stacks), tuple(absent), (*self.notes, *notes))

    def order(self, topic: Topic) -> OrderResponse:
        """Give the whole job an order. Raises SiteError."""
        snapshot = self._snapshot()
        if snapshot.ended:
            return OrderResponse(topic is Topic.STOP, f"the job has ended: {snapshot.ended.reason}")
        leader = snapshot.leader
        if leader is None or leader not in snapshot.members:
            raise SiteError("no node leads the job now; wait a moment, and retry")
        try:
            text = query_nodes(self._store, self._keys, topic, {leader}, patience_s(len(snapshot.members))).get(leader)
            if text:
                return decode(OrderResponse, text)
        except (StoreError, ValueError) as error:
            raise SiteError(f"the job did not get the order: {error}") from None
        raise SiteError(
            f"{host_of(leader)}, which leads the job, did not answer: it may run an older elaunch, or be stopped; on a"
            " host of the job, send SIGINT to its elaunch"
        )

    def close(self) -> None:
        self._store.close()

    def _snapshot(self) -> Snapshot:
        try:
            snapshot = SnapshotReader(self._keys).read(self._store.read(self._keys.root), whole=True)
        except (StoreError, ValueError) as error:
            raise SiteError(str(error)) from None
        if snapshot.generation is None:
            raise SiteError(
                f"the store at {self._where} has no {job_name(self._keys.run_id)} (under {self._keys.prefix});"
                " name it as its nodes do, with --run-id, and --rdzv-conf etcd_prefix if they have one"
            )
        return snapshot

    def _query(
        self, topic: Topic, snapshot: Snapshot, known: Collection[str], seconds: float = 0.0
    ) -> tuple[dict[str, str], dict[str, str], list[str]]:
        """The members' responses, why others gave none, both by node id, and notes, without the members in `known`.

        `seconds` is how long a node works on its response.
        """
        job = job_report(snapshot)
        if job.state in _OF_NO_JOB:
            return {}, {}, []
        reasons = {"left": "left the job", "lost": "was lost: its lease has expired"}
        missing = {seat.node_id: reasons[absence(job, seat.node_id)] for seat in job.seats if not seat.is_member}
        wanted = snapshot.members.keys() - set(known)
        if not wanted:
            return {}, missing, []
        wait_s = patience_s(len(wanted)) + seconds
        try:
            responses = query_nodes(self._store, self._keys, topic, wanted, wait_s)
        except StoreError as error:
            may = "the store allows only reads, so " if isinstance(error, Denied) else ""
            return {}, missing, [f"{may}the nodes were not queried: {error}"]
        late = f"did not answer within {wait_s:.2g} s; its lease still holds"
        return responses, {**missing, **dict.fromkeys(wanted - responses.keys(), late)}, []


class LocalSource:
    """A job of this host: by its agents here, and the store that they name if there are more nodes."""

    def __init__(self, agents: Collection[LocalAgent]) -> None:
        """`agents` are of one job, and at least one."""
        self._agents = list(agents)
        self._store: StoreSource | None = None
        self._is_alone = not any(agent.is_remote for agent in agents)

    def take(self) -> Gathered:
        """The job's current status. Raises SiteError, and JobOver."""
        responses = query_all([partial(status_of, agent.path) for agent in self._agents])
        now = [response for response in responses if isinstance(response, LocalAgent)]
        problems = [str(why) for why in responses if isinstance(why, NoResponse) and not isinstance(why, AgentGone)]
        if not now:
            if self._store:
                return self._store.take()
            over = f"{job_name(self._agents[0].job.run_id)}: its elaunch on this host has ended"
            raise SiteError("; ".join(problems)) if problems else JobOver(over)
        reports = {agent.node.node_id: agent.node for agent in now}
        # An agent without contact to the store may have an older state than another one.
        known = Gathered(max((agent.job for agent in now), key=_how_new), reports, {})
        if not self._is_alone:
            try:
                known = self._remote().take(reports)
            except SiteError as error:
                known = replace(known, notes=(f"only the agents on this host: {error}",))
        return replace(known, notes=(*known.notes, *problems))

    def stacks(self) -> NodeStacks:
        """The stacks of all workers, taken now. Raises SiteError."""
        wait_s = RESPONSE_S + STACKS_S
        found = query_all([partial(stacks_of, agent, wait_s) for agent in self._agents], wait_s)
        responses = [response for response in found if isinstance(response, StackResponse)]
        silent = [str(why) for why in found if isinstance(why, NoResponse)]
        notes: tuple[str, ...] = ()
        if not self._is_alone:
            try:
                return self._remote().stacks(responses)
            except SiteError as error:
                notes = (f"only the workers on this host: {error}",)
        elif not responses:
            raise SiteError("; ".join(silent))
        return NodeStacks(self._agents[0].job.run_id, stacks_in(responses), tuple(silent), notes)

    def order(self, topic: Topic) -> OrderResponse:
        """Give the whole job an order. Raises SiteError."""
        # One agent is enough: it informs the others. A spare runs no workers.
        agent = min(self._agents, key=lambda agent: agent.node.state not in ("running", "done"))
        return _query(agent.path, topic.value, lambda fields, *_: decode(OrderResponse, json.dumps(fields["order"])))

    def close(self) -> None:
        if self._store:
            with suppress(StoreError):
                self._store.close()

    def _remote(self) -> StoreSource:
        """The job's store, as its agent here reaches it. Raises SiteError."""
        if self._store is None:
            agent = next((agent for agent in self._agents if agent.is_own and agent.is_remote), None)
            if agent is None:
                # Another user's agent could make root open any address and any file.
                raise SiteError("it is another user's job; its own user sees the other nodes too")
            plan = _query(agent.path, "store", lambda fields, *_: decode(RendezvousPlan, json.dumps(fields["store"])))
            self._store = StoreSource(plan, agent.job.run_id)
        return self._store


JobSource = StoreSource | LocalSource


def _how_new(job: JobReport) -> tuple[bool, int, bool]:
    return job.ended is not None, job.generation.number if job.generation else -1, job.is_whole
