"""The records of a job, from its command line to the exit code.

    JobSpec → Terms → Node → Joined → RankTable → Failure → Generation … → Outcome → exit code

All are frozen. Durations end in `_s`; wall-clock times (`*_at`) are for people only and decide nothing. Records that
go to the store are `Bounded`: no text of a user or a program can make a transaction too large for the store.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256
from typing import Annotated, NamedTuple

from elaunch.rendezvous.codec import (
    HOST_BYTES_MAX,
    ROLE_BYTES_MAX,
    Between,
    Bounded,
    Name,
    keep_ends,
    keep_line,
    keep_tail,
)
from elaunch.rendezvous.format import plain

# torchrun's name for a job without --run-id. All nodes of the job must use the same name.
UNNAMED = "none"
_RANDOM_DIGITS = 8

# More workers than any host runs. The sum over all nodes still fits into a rank.
SLOTS_MAX = 1 << 16
GENERATION_DIGITS = 10
# Far below the largest number that fits into a key, so the next number always fits too.
GENERATION_MAX = 10 ** (GENERATION_DIGITS - 1)

_Address = Annotated[str, keep_line(HOST_BYTES_MAX)]
_Host = Annotated[_Address, Name()]
_Id = Annotated[str, keep_line(HOST_BYTES_MAX + 1 + _RANDOM_DIGITS)]
_NodeId = Annotated[_Id, Name()]
_Role = Annotated[str, keep_line(ROLE_BYTES_MAX)]
_Secret = Annotated[str, keep_line(64)]
_Count = Annotated[int, Between(0)]
_Port = Annotated[int, Between(0, 65535)]
_Signal = Annotated[int, Between(0, 64)]
_ExitCode = Annotated[int, Between(1, 255)]
_Number = Annotated[int, Between(0, GENERATION_MAX - 1)]
# To the end of the year 9999, the last year of Python's datetime.
_Time = Annotated[float, Between(0, 253_402_300_799)]
_Reason = Annotated[str, keep_line(4 << 10)]
_Cause = Annotated[str, keep_line(1 << 10)]
_MESSAGE = keep_line(2 << 10)
# Linux's PATH_MAX.
_Path = Annotated[str, keep_line(4 << 10)]
TRACEBACK, TAIL = keep_ends(32 << 10), keep_tail(8 << 10)
# Tracebacks and output of all nodes that fail in one generation, since the leader reads all; and each node's minimum.
_TEXTS_BYTES_MAX, _TEXTS_BYTES_MIN = 4 << 20, 3 << 10


def host_of(node_id: str) -> str:
    """The host's name in a node's id."""
    return node_id[: -_RANDOM_DIGITS - 1]


@dataclass(frozen=True)
class Terms(Bounded):
    """The settings on which all nodes of a job must agree. The store holds the terms of the first node.

    `max_restarts` 0 is a plain launch. The budget belongs to the job, not to a node: `max_restarts` over the job's
    whole life or, with `restart_window_s`, within any window of that length (Erlang/OTP's intensity and period).
    `command` is for people; two commands are the same if their `digest` is equal. A node is excluded after
    `exclude_after` failures in a row that are alike; 0 means never. A worker's exit code in `no_restart_codes` ends the
    job.
    """

    nodes_min: Annotated[int, Between(1, GENERATION_MAX)] = 1
    nodes_max: Annotated[int, Between(1, GENERATION_MAX)] = 1
    max_restarts: _Count = 3
    restart_window_s: _Time | None = None
    # Two commands usually differ near their beginning.
    command: Annotated[str, keep_line(300)] = ""
    digest: str = ""
    exclude_after: _Count = 0
    no_restart_codes: tuple[_ExitCode, ...] = ()


def job_name(run_id: str) -> str:
    """The job's name in messages."""
    return "unnamed job" if run_id == UNNAMED else f"job {run_id}"


def called(run_id: str, pid: int) -> str:
    """The job's name in commands on its host: the pid of its elaunch if it is unnamed."""
    return str(pid) if run_id == UNNAMED else shlex.quote(plain(run_id))


class ProgramKind(Enum):
    """How the worker's program is named on the command line."""

    SCRIPT = "script"  # python -u target args…
    MODULE = "module"  # python -u -m target args…
    COMMAND = "command"  # target args…, no Python (--no-python)


@dataclass(frozen=True)
class Program:
    """The program that every worker runs.

    `target` is a path, a module name or a command, as typed. `interpreter` runs scripts and modules: the interpreter of
    this process, unless `PYTHON_EXEC` names another one. `${local_rank}` in `args` is replaced for each worker. The
    script `-` is read from stdin.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()
    interpreter: str = ""
    interpreter_options: tuple[str, ...] = ()

    @property
    def is_on_stdin(self) -> bool:
        return self.kind is ProgramKind.SCRIPT and self.target == "-"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of a freshly started worker."""
        python = (self.interpreter, *self.interpreter_options, "-u")
        match self.kind:
            case ProgramKind.SCRIPT:
                return (*python, self.target, *self.args)
            case ProgramKind.MODULE:
                return (*python, "-m", self.target, *self.args)
            case ProgramKind.COMMAND:
                return (self.target, *self.args)


@dataclass(frozen=True)
class JobSpec:
    """The job as given on one agent's command line: its name, the program, and what all nodes must agree on."""

    run_id: str
    program: Program
    nodes_min: int = 1
    nodes_max: int = 1
    max_restarts: int = 3
    restart_window_s: float | None = None
    exclude_after: int = 0
    no_restart_codes: tuple[int, ...] = ()

    @property
    def terms(self) -> Terms:
        """The terms that nodes compare. Interpreters may differ: each host has its own."""
        program = self.program
        parts = [program.kind.value, program.target, *program.args]
        digest = sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]
        module = ["-m"] if program.kind is ProgramKind.MODULE else []
        command = shlex.join([*module, program.target, *program.args])
        # A lone surrogate (a byte of another encoding in argv) cannot be encoded in UTF-8.
        shown = command.encode(errors="backslashreplace").decode()
        budget, rules = (self.max_restarts, self.restart_window_s), (self.exclude_after, self.no_restart_codes)
        return Terms(self.nodes_min, self.nodes_max, *budget, shown, digest, *rules)


@dataclass(frozen=True)
class Node(Bounded):
    """One agent process as a node of the job. `node_id` is the host name and 8 random hex digits.

    The other nodes reach it at `address`. `process` identifies the agent's process even after its host was restarted: a
    later agent that finds this record can check whether the process is dead. `node_rank` is the rank that the user
    requested, -1 if none; nodes of one `topology` get neighbouring ranks.
    """

    node_id: _NodeId
    host: _Host
    address: _Address
    slots: Annotated[int, Between(1, SLOTS_MAX)]
    process: _Address = ""
    role: _Role = "default"
    node_rank: Annotated[int, Between(-1, GENERATION_MAX)] = -1
    topology: Annotated[str, keep_line(1 << 10)] = ""


@dataclass(frozen=True)
class Joined(Bounded):
    """The record that a node's old workers are stopped and that it can run the generation.

    `port` is a port that the node has reserved on its `address`: if the node becomes the first in the table, the worker
    store listens there, and workers get its `secret`. `progressed`: a worker of this node made progress in the
    generation that ran before. `software` names the versions that must be equal on all nodes, empty if unknown.
    """

    node_id: _NodeId
    port: _Port
    progressed: bool = False
    software: Annotated[str, keep_line(120)] = ""
    secret: _Secret = field(default="", repr=False)


# A named tuple: every agent makes one for each node, and a dataclass takes three times as long.
class Seat(NamedTuple):
    """One node's place in a rank table; its ranks are `first_rank … first_rank + slots - 1`."""

    node_id: str
    slots: int
    first_rank: int
    role: str = "default"

    @property
    def host(self) -> str:
        return host_of(self.node_id)


@dataclass(frozen=True)
class Streak(Bounded):
    """Failures in a row that were all on one node, and alike.

    `who` is the node's host, or its id if several nodes have that host; `way` is how they failed.
    """

    who: _NodeId
    way: Annotated[str, keep_line(300)]
    times: _Count


@dataclass(frozen=True)
class Exclusion(Bounded):
    """A node that gets no seat while enough others are there. `who` and `way` are as in `Streak`."""

    who: _NodeId
    way: Annotated[str, keep_line(300)]
    why: Annotated[str, keep_line(600)]


@dataclass(frozen=True)
class RankTable(Bounded):
    """The ranks of all nodes in one generation. The leader seals it, at most one per generation.

    `restarts` counts the restarts charged to the budget so far. If the budget has a window, `restart_ages_s` holds, for
    each restart still in the window, how long before the seal it was. `barren` counts the generations in a row, this
    one included, that began after one without progress. `progressed`: whether any earlier generation made progress.
    `streak` and `excluded` are those after the last failure. `mismatch` is a sentence about nodes with different
    software. `vacant` are the roles for which free seats are reserved. Workers get `secret` in their environment.
    """

    generation: _Number
    seats: tuple[Seat, ...]
    master_addr: _Address
    master_port: _Port
    reason: _Reason
    restarts: _Count = 0
    restart_ages_s: tuple[_Time, ...] = ()
    barren: _Count = 0
    progressed: bool = False
    streak: Streak | None = None
    excluded: tuple[Exclusion, ...] = ()
    mismatch: Annotated[str, keep_line(600)] = ""
    vacant: tuple[str, ...] = ()
    secret: _Secret = field(default="", repr=False)

    @property
    def world_size(self) -> int:
        return self.seats[-1].first_rank + self.seats[-1].slots if self.seats else 0

    @property
    def size_text(self) -> str:
        """The workers, and the nodes if there are several."""
        workers = "1 worker" if self.world_size == 1 else f"{self.world_size} workers"
        return workers + ("" if len(self.seats) == 1 else f" on {len(self.seats)} nodes")

    def group_rank(self, node_id: str) -> int | None:
        """The node's index in the table, or None if it has no seat."""
        return next((i for i, seat in enumerate(self.seats) if seat.node_id == node_id), None)


class OpenKind(Enum):
    """Why a generation was opened (protocol: `ctl/generation`)."""

    START = "start"
    FAIL = "fail"
    LOSS = "loss"
    JOIN = "join"
    LEAVE = "leave"
    RESTART = "restart"

    @property
    def is_urgent(self) -> bool:
        """Whether it is pointless to let workers finish their step: the group is broken already, or it may hang."""
        return self in (OpenKind.FAIL, OpenKind.LOSS, OpenKind.RESTART)


@dataclass(frozen=True)
class Generation(Bounded):
    """One start or restart of the group. Every key, event, log line and worker environment carries its `number`.

    `cause` is the end of a sentence. If a node opened the generation because it failed or left, `node_id` names that
    node, and `signum` is the signal that made it leave. `is_secondary`: another failure may explain that one.
    """

    number: _Number
    kind: OpenKind
    cause: _Cause
    node_id: _Id = ""
    signum: _Signal = 0
    is_secondary: bool = False


class FailureKind(Enum):
    """The cause of a worker's failure, as far as its agent knows."""

    EXCEPTION = "exception"
    EXIT_CODE = "exit code"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out of memory"
    PEER_LOST = "peer lost"
    ENDED_EARLY = "ended early"
    HANG = "hang"
    STARTUP = "start-up"
    REFUSED = "refused"
    DEBUGGER = "debugger"
    STORE_LOST = "worker store lost"
    TEMPLATE_LOST = "fork server lost"
    SPAWN = "spawn"

    @property
    def counts_as_identical(self) -> bool:
        """Whether the same failure twice in a row can mean that a third try is pointless."""
        kinds = (FailureKind.EXCEPTION, FailureKind.EXIT_CODE, FailureKind.OUT_OF_MEMORY, FailureKind.ENDED_EARLY)
        return self in kinds

    @property
    def is_secondary(self) -> bool:
        """Whether any other kind of failure in the same generation explains this one."""
        return self in (FailureKind.PEER_LOST, FailureKind.ENDED_EARLY)


@dataclass(frozen=True)
class Failure(Bounded):
    """The first failure on a node in one generation: of a worker, or of a server that the workers need.

    `code` is the exit status as Python reports it: the exit code, or minus the signal's number; None if no worker
    exited. `rank` is -1 if no worker caused the failure. `exception`, `frame` and `message` describe the uncaught
    exception (`frame` is its innermost frame in the user's code, `file:line in function`; `call` is the function of
    torch in which it waited for other ranks, or empty). `advice` is what the user can do about it, empty if unknown.
    `progressed`: whether the rank had reported a step or created its process group; None if that is unknown. `step` is
    the newest step that the rank reported, -1 if none, and `lived_s` how long its worker ran. `is_cut`: the message or
    the traceback was too long; their full text is in `error_file` and `log_path`, on the worker's host. `is_blameless`:
    nothing points at the node: one had to be named, or to write the record. `tail` is the end of stderr, or if it
    `is_mixed` of both streams, which were one pipe. `ranks_alike` counts the node's ranks that had this same bug.
    `world_size` is that of the generation, 0 if unknown.

    A record is less than 64 kB of JSON.
    """

    kind: FailureKind
    generation: Annotated[int, Between(-1, GENERATION_MAX)]
    node_id: _Id
    host: _Address
    rank: int
    local_rank: int
    pid: int
    code: int | None
    message: Annotated[str, _MESSAGE]
    exception: Annotated[str, keep_line(256)] = ""
    frame: _Cause = ""
    traceback: Annotated[str, TRACEBACK] = ""
    tail: Annotated[str, TAIL] = ""
    log_path: _Path = ""
    error_file: _Path = ""
    failed_at: _Time = 0.0
    progressed: bool | None = None
    is_cut: bool = False
    call: Annotated[str, keep_line(256)] = ""
    advice: Annotated[str, keep_line(1 << 10)] = ""
    step: int = -1
    lived_s: _Time = 0.0
    is_blameless: bool = False
    is_mixed: bool = False
    ranks_alike: int = 1
    world_size: int = 0

    def __post_init__(self) -> None:
        whole = _MESSAGE.clean(self.message), self.traceback
        super().__post_init__()
        if (self.message, self.traceback) != whole:
            object.__setattr__(self, "is_cut", True)

    @property
    def opening(self) -> Failure:
        """The short record that opens a generation: without traceback and output."""
        return replace(self, traceback="", tail="")

    def one_of(self, nodes: int) -> Failure:
        """The record for the store, where this many nodes may have one: whole for up to 100 nodes."""
        bytes_max = max(_TEXTS_BYTES_MAX // max(nodes, 1), _TEXTS_BYTES_MIN)
        if bytes_max >= TRACEBACK.bytes_max + TAIL.bytes_max:
            return self
        traceback, tail = keep_ends(bytes_max * 4 // 5).of(self.traceback), keep_tail(bytes_max // 5).of(self.tail)
        return replace(self, traceback=traceback, tail=tail, is_cut=self.is_cut or traceback != self.traceback)

    @property
    def sentence(self) -> str:
        """Which rank failed and how, without a full stop."""
        if self.rank < 0:
            return f"{self.message} on {self.host} in generation {self.generation}"
        who = f"rank {self.rank} (local rank {self.local_rank} on {self.host}, pid {self.pid})"
        return f"{who} {self.message} in generation {self.generation}"

    @property
    def headline(self) -> str:
        """The sentence, without the reason of a refusal: the job's last line has it."""
        is_refusal = self.kind is FailureKind.REFUSED
        return replace(self, message=self.message.partition(":")[0]).sentence if is_refusal else self.sentence

    @property
    def sentence_of_first(self) -> str:
        """The sentence, if another failure ended the job in a later generation."""
        where = f" in generation {self.generation}"
        return f"failed first{where}: {self.sentence.removesuffix(where)}"


class OutcomeKind(Enum):
    """How a job, or an agent's part in it, ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"  # This node does not fit the job.
    UNKNOWN = "unknown"  # The store is unreachable.


@dataclass(frozen=True)
class Outcome(Bounded):
    """The end of the job, written once and equal for all agents; or the end of one agent's part in the job.

    `failure` ended the job, if one did. `first` is the job's first failure, if that is another one, and not alike.
    `signum` is set for INTERRUPTED only. `code` is the exit code of a FAILED job: 1, or one of `no_restart_codes`.
    """

    kind: OutcomeKind
    reason: _Reason
    generation: Annotated[int, Between(-1, GENERATION_MAX)]
    restarts: _Count
    max_restarts: int
    failure: Failure | None = None
    signum: _Signal = 0
    first: Failure | None = None
    code: _ExitCode = 1

    @property
    def exit_code(self) -> int:
        """0, `code` of a failed job, 2 for a wrong request, 3 for an unavailable site, 128 + n after signal n."""
        codes = {"succeeded": 0, "failed": self.code, "interrupted": 128 + self.signum, "refused": 2, "unknown": 3}
        return codes[self.kind.value]
