"""What a rule about causes looks at, and what it answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SHARED_MEMORY = "/dev/shm"
# Less than this is no room for a checkpoint.
_FULL_BYTES = 16 << 20
_FULL_PART = 50


@dataclass(frozen=True)
class KnownCause:
    """`detail` is what the failure's own message does not say, `advice` the next step. Both may be empty.

    `is_enough` says that a traceback and the worker's output add nothing to that but the place in the user's code.
    """

    detail: str = ""
    advice: str = ""
    is_enough: bool = False


@dataclass(frozen=True)
class SpaceOf:
    """Asks for the free space of the file system that has `path`, which need not exist."""

    path: str


@dataclass(frozen=True)
class FullDisks:
    """Asks for the file systems of this host that are full and that a program could write to."""


@dataclass(frozen=True)
class IsThere:
    """Asks whether there is a file or a package of that path (a package's path is its `__init__.py`)."""

    path: str


@dataclass(frozen=True)
class GpuErrors:
    """Asks for the errors that the NVIDIA driver has counted or logged on this host."""


@dataclass(frozen=True)
class MemoryLimits:
    """Asks for the memory of this process's cgroup."""


@dataclass(frozen=True)
class KillCounters:
    """Asks whether the kernel counts the processes of this cgroup that it kills for lack of memory."""


Question = SpaceOf | FullDisks | IsThere | GpuErrors | MemoryLimits | KillCounters


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
        """Whether it has no room for anything of size."""
        return self.total > 0 and self.free < min(_FULL_BYTES, self.total // _FULL_PART)


@dataclass(frozen=True)
class Facts:
    """The answers to the questions about one failure. What could not be found out is missing.

    `spaces` is by the path that was asked for; `full` are the file systems that have no room.
    `mismatch` is not asked for: the rank table has it.
    """

    spaces: Mapping[str, Space] = field(default_factory=dict)
    full: tuple[Space, ...] = ()
    there: frozenset[str] = frozenset()
    gpu_errors: tuple[str, ...] = ()
    memory_limit: str = ""
    kills_are_counted: bool = False
    mismatch: str = ""


NO_FACTS = Facts()


@dataclass(frozen=True)
class Evidence:
    """What is known about one failure.

    `code` is as in `Failure`. `exception` is the uncaught exception's type without its module. `words` is its whole
    text; without an exception it is the end of what the worker wrote to stderr. `files` are the files of the
    traceback's frames, outermost first. `crash` is the innermost frame of the user's code at a crash.
    `has_no_sender` says that it is not known who sent the SIGKILL.
    """

    code: int | None
    exception: str = ""
    words: str = ""
    files: tuple[str, ...] = ()
    traceback: str = ""
    crash: str = ""
    was_out_of_memory: bool = False
    has_no_sender: bool = False
    facts: Facts = NO_FACTS


Values = Mapping[str, Any]


@dataclass(frozen=True)
class CauseRule:
    """One recognised cause.

    It applies if the exit code is in `codes`, the exception in `exceptions`, and `pattern` is found in the words; one
    that is empty is not asked. `more` adds values for the templates, or says with None that the rule does not apply.
    `detail` and `advice` are templates: `{name}` is a group of the pattern or a value of `more`. `asks` are questions
    whose answers `more` wants. The documentation shows `shown`, or else the template of the advice. `is_enough` as in
    `KnownCause`.
    """

    title: str
    advice: str
    pattern: str = ""
    exceptions: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    detail: str = ""
    more: Callable[[Evidence, Values], Values | None] | None = None
    asks: Callable[[Evidence, Values], tuple[Question, ...]] | None = None
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
        found = re.search(self.pattern, evidence.words, re.IGNORECASE)
        return {name: text or "" for name, text in found.groupdict().items()} if found else None

    def cause(self, evidence: Evidence) -> KnownCause | None:
        """What the rule says about this failure; None if it does not apply."""
        values = self.values(evidence)
        if values is None:
            return None
        if self.more:
            added = self.more(evidence, values)
            if added is None:
                return None
            values = {**values, **added}
        return KnownCause(self.detail.format_map(values), self.advice.format_map(values), self.is_enough)

    def questions(self, evidence: Evidence) -> tuple[Question, ...]:
        """What has to be found out before `cause` can be asked."""
        if self.asks is None:
            return ()
        values = self.values(evidence)
        return () if values is None else self.asks(evidence, values)


def regex(text: str) -> re.Pattern[str]:
    """A pattern that does not tell capitals from small letters."""
    return re.compile(text, re.IGNORECASE)
