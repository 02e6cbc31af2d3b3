"""A rule that recognises the cause of a failure, and the evidence that it checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.rendezvous.types import FailureKind

SHARED_MEMORY = "/dev/shm"
# A file system with less free space than both this many bytes and this part of its size is full: no checkpoint fits.
_FULL_BYTES = 16 << 20
_FULL_PART = 50


@dataclass(frozen=True)
class Space:
    """One file system: its mount point, its size and its free space in bytes, and the inodes that are free."""

    mount: str
    total: int
    free: int
    files_free: int = 1

    @property
    def is_out_of_inodes(self) -> bool:
        return self.total > 0 and self.files_free == 0

    @property
    def is_full(self) -> bool:
        return self.total > 0 and self.free < min(_FULL_BYTES, self.total // _FULL_PART)


@dataclass(frozen=True)
class Facts:
    """Facts that were collected on this host after a failure. A fact that could not be determined has its default.

    `shm` is /dev/shm, `full` are the full file systems, and `folder` is the user's folder in which the missing module
    was found: all three only where a rule `needs_disks`.
    `gpu_errors` are those that the NVIDIA driver logged. `kills_are_counted`: the kernel counts the processes of this
    cgroup that it kills for lack of memory. `mismatch` as in `RankTable`.
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
    the user's code at a crash. `killed` is the failure's kind if a signal killed the worker.
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
    that is empty is not checked. `more` returns further values for the templates, or None if the rule does not
    apply. `detail` and `advice` are templates: `{name}` is a group of the pattern or a value of `more`. A rule that
    `needs_disks` uses facts about file systems. The documentation shows `shown`, or else the template of the advice.
    With `is_enough` the report shows the line of the user's code, without the traceback and the worker's output.
    """

    title: str
    advice: str
    pattern: str = ""
    exceptions: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    detail: str = ""
    more: Callable[[Evidence, Values], Values | None] | None = None
    needs_disks: bool = False
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
        """The detail that the failure's own message lacks, and the next step; None if the rule does not apply."""
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
    """Compile a pattern that ignores case."""
    return re.compile(text, re.IGNORECASE)
