"""One agent's settings beyond the job's spec: this node's own choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from pathlib import Path
from typing import Literal

from elaunch.rendezvous.endpoint import PREFIX
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import JobSpec

# Levels of elaunch's own log lines: a detail, a step of the job, what may need a person, a failure.
Level = Literal["debug", "info", "warning", "error"]


class CannotRun(Exception):
    """The agent cannot run as configured. The message has the reason and the way out."""


class Streams(IntFlag):
    """torchrun's values for --redirects and --tee."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True)
class StreamChoice:
    """Which streams of which local ranks: `default` for all but those in `by_rank`."""

    default: Streams = Streams.NONE
    by_rank: Mapping[int, Streams] = field(default_factory=dict)

    def of(self, local_rank: int) -> Streams:
        return self.by_rank.get(local_rank, self.default)

    def __bool__(self) -> bool:
        return any((self.default, *self.by_rank.values()))


class NumaBinding(Enum):
    """torchrun's values for --numa-binding."""

    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


class LogFormat(Enum):
    """The values of --log-format: lines with a time where stderr is no terminal, lines without, JSON objects."""

    TEXT = "text"
    PLAIN = "plain"
    JSON = "json"


class OnHang(Enum):
    """The reaction to a hang of the whole job: none, log lines, or a failure like any other."""

    OFF = "off"
    WARN = "warn"
    RESTART = "restart"


@dataclass(frozen=True)
class OutputPlan:
    """Where the workers' output goes.

    Without `log_dir` nothing stays on disk, unless `makes_log_dir`: the agent makes a private one then. A redirected
    stream goes to its file, or to the console if that fails; a teed one to both.
    `console_ranks` (global) and `console_local_ranks` limit the console, never the files; None is all.
    A stream's file is rotated, and has at most `log_bytes_max` together with the older one; 0 is no limit.
    With `show_all_tracebacks` the console gets survivors' tracebacks too.
    Elaunch's own lines below `least` are left out.
    `duplicate_*_filters`: lines of teed streams that contain one of the texts are copied to one file per generation.
    """

    log_dir: Path | None = None
    makes_log_dir: bool = False
    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    console_local_ranks: frozenset[int] | None = None
    console_ranks: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    log_format: LogFormat = LogFormat.TEXT
    show_all_tracebacks: bool = False
    least: Level = "info"
    log_bytes_max: int = 0


@dataclass(frozen=True)
class ProgramText:
    """The program's imports as its text shows them, before it runs.

    `unused` are the modules of DEFAULT_PRELOAD that it cannot use. `packages` are its imports of preloadable packages:
    MODULE, or MODULE:NAME for a name that it imports from there. `is_refused`: the text is no valid Python.
    """

    unused: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    is_refused: bool = False


@dataclass(frozen=True)
class AgentConfig:
    """One agent's settings. `environment` is what workers inherit, without the rank variables.

    `worker_env` are variables that each worker gets over these, whatever its rank: from options and the network.
    `store_prefix` is the prefix of all the job's keys in the store.
    `master_ports` is empty for a fresh port per generation; else the ports that may be used, in order of preference.
    `preload` are the modules that the fork server imports; None execs every worker as a fresh interpreter. It does not
    import those that the program does not use by its `text`, and imports the packages that this names.
    `warm_s` is how long a fork server may stay idle after the job, for the next one; 0 if none is to stay.
    `master_addr` is where the other nodes reach this one; `node_rank` and `topology` as in `Node`.
    `notices` are those of `signals` by which a scheduler announces that a job's end is near: workers with a handler for
    them get them, others get SIGTERM. With `has_named_signals` the user has named them, and all workers get them.
    `ignored` are signals that the scheduler may send to workers too; workers ignore them from their start.
    `children_grace_s` is how long the workers' orphans may be idle after a successful job.
    `invitation` is the line with the command for the other nodes, if this node serves their store. `only_here` is the
    hint that no other host can reach the store, and what to give instead.
    `on_event` is the command that is notified of the job's events. `metrics` is the host and the port of the metrics.
    `gpus` are those that this node's workers may use.
    `notes` are warnings about the command line, `details` its debug lines (--verbose).
    """

    spec: JobSpec
    slots: int
    environment: Mapping[str, str]
    worker_env: Mapping[str, str] = field(default_factory=dict)
    role: str = "default"
    output: OutputPlan = OutputPlan()
    times: Times = field(default_factory=Times)
    store_prefix: str = PREFIX
    node_rank: int = -1
    topology: str = ""
    signals: tuple[int, ...] = ()
    notices: tuple[int, ...] = ()
    has_named_signals: bool = False
    ignored: tuple[int, ...] = ()
    on_hang: OnHang = OnHang.OFF
    preload: tuple[str, ...] | None = None
    text: ProgramText = ProgramText()
    warm_s: float = 0.0
    master_addr: str = "127.0.0.1"
    master_ports: tuple[int, ...] = ()
    numa_binding: NumaBinding | None = None
    virtual_local_rank: bool = False
    children_grace_s: float = 60.0
    on_event: tuple[str, ...] = ()
    metrics: tuple[str, int] | None = None
    gpus: int = 0
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    invitation: str = ""
    only_here: str = ""
