"""A rule about causes, and the evidence and the facts that it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.rendezvous.types import FailureKind

SHARED_MEMORY = "/dev/shm"
# With less than this free, a checkpoint does not fit.
_FULL_BYTES = 16 << 20
_FULL_PART = 50


@dataclass(frozen=True)
class Space:
    """One file system: bytes in all, bytes and files that are free for a user, and where it is mounted."""

    mount: str
    total: int
    free: int
    files_free: int = 1

    @property
    def is_without_files(self) -> bool:
        return self.total > 0 and self.files_free == 0

    @property
    def is_full(self) -> bool:
        return self.total > 0 and self.free < min(_FULL_BYTES, self.total // _FULL_PART)


@dataclass(frozen=True)
class Facts:
    """What was found out on this host after a failure. What could not be found out is missing.

    `shm` is the shared memory, `full` are the file systems that have no room, and `folder` is the one of the job that
    has the missing module: all three only where a rule `wants_disks`.
    `gpu_errors` are those that the NVIDIA driver logged. `kills_are_counted`: the kernel counts the processes of this
    cgroup that it kills for lack of memory. `mismatch` is that of the rank table.
    """

    shm: Space | None = None
    full: tuple[Space, ...] = ()
    folder: str = ""
    gpu_errors: tuple[str, ...] = ()
    memory_limit: str = ""
    kills_are_counted: bool = False
    mismatch: str = ""


NO_FACTS = Facts()


@dataclass(frozen=True)
class Evidence:
    """What is known about one failure.

    `code` is as in `Failure`. `exception` is the uncaught exception's type without its module. `text` is its whole
    message; without an exception it is the end of what the worker wrote to stderr. `crash` is the innermost frame of
    the user's code at a crash, and `killed` the kind of failure where a signal ended the worker.
    """

    code: int | None
    exception: str = ""
    text: str = ""
    traceback: str = ""
    crash: str = ""
    killed: FailureKind | None = None
    facts: Facts = NO_FACTS


Values = Mapping[str, Any]


@dataclass(frozen=True)
class CauseRule:
    """One recognised cause.

    It applies if the exit code is in `codes`, the exception in `exceptions`, and `pattern` is found in the text; one
    that is empty is not checked. `more` adds values for the templates, or is None if the rule does not apply. `detail`
    and `advice` are templates: `{name}` is a group of the pattern or a value of `more`, which reads file systems where
    it `wants_disks`. The documentation shows `shown`, or else the template of the advice. With `is_enough` a traceback
    and the worker's output add nothing but the place in the user's code.
    """

    title: str
    advice: str
    pattern: str = ""
    exceptions: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    detail: str = ""
    more: Callable[[Evidence, Values], Values | None] | None = None
    wants_disks: bool = False
    shown: str = ""
    is_enough: bool = False

    def values(self, evidence: Evidence) -> Values | None:
        """The groups of the pattern, or None if the rule cannot apply, whatever the facts are."""
        if self.codes and evidence.code not in self.codes:
            return None
        if self.exceptions and evidence.exception not in self.exceptions:
            return None
        if not self.pattern:
            return {}
        found = re.search(self.pattern, evidence.text, re.IGNORECASE)
        return {name: text or "" for name, text in found.groupdict().items()} if found else None

    def cause(self, evidence: Evidence) -> tuple[str, str] | None:
        """What the failure's own message lacks, and the next step; None if the rule does not apply."""
        values = self.values(evidence)
        if values is None:
            return None
        if self.more:
            added = self.more(evidence, values)
            if added is None:
                return None
            values = {**values, **added}
        return self.detail.format_map(values), self.advice.format_map(values)


def regex(text: str) -> re.Pattern[str]:
    """A pattern that ignores case."""
    return re.compile(text, re.IGNORECASE)
