"""What earlier starts have shown of a program's imports, so that a fork server can have them from the start.

All of it is a hint: the fork server checks itself, after its imports, that workers may be forked from it. So a hint
that does not hold any more costs time, and nothing else.
"""

from __future__ import annotations

from elaunch.agent.config import ProgramText
from elaunch.agent.default_preload import DEFAULT_PRELOAD
from elaunch.agent.forkserver.selection import Selection
from elaunch.records import dataclass


@dataclass(frozen=True)
class Named:
    """What may be imported for one name of --preload."""

    name: str
    selection: Selection


@dataclass(frozen=True)
class Learned:
    """`named` are selections for names of --preload, `program` is that for the program's own imports.

    `variables` are those that the program sets itself: no module that keeps the value of one may be preloaded.
    `unused` are the modules of DEFAULT_PRELOAD that no worker had imported when the program last ended well, and
    `unused_in` is the `ProgramText.state` of that run.
    `packages` is the state of the installed packages in which all this was seen. `is_tried` says that a fork server has
    imported `program`; without it, only a process that tried the imports has.
    """

    named: tuple[Named, ...] = ()
    program: Selection = Selection()
    variables: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    unused_in: str = ""
    packages: str = ""
    is_tried: bool = False

    @property
    def is_used(self) -> bool:
        """Whether a fork server imports anything because of it."""
        return bool(self.named or self.program.entries)

    def selection(self, name: str) -> Selection | None:
        """What is known of that name of --preload."""
        return next((each.selection for each in self.named if each.name == name), None)


NOTHING = Learned()


@dataclass(frozen=True)
class FirstImports:
    """What a job's first fork server imports: `preload`, and what is `learned`.

    `warm_preload` is what a fork server has that stays for several jobs; empty if this job needs none.
    """

    preload: tuple[str, ...] | None
    warm_preload: tuple[str, ...]
    learned: Learned


def first_imports(preload: tuple[str, ...] | None, text: ProgramText, learned: Learned) -> FirstImports:
    """Leave out of `preload` what the program does not use. If the text is clear, the last run only adds modules."""
    if preload is None:
        return FirstImports(None, (), learned)
    if text.is_refused:
        return FirstImports((), preload, Learned(packages=learned.packages))
    unused = {*text.unused}
    if text.state and text.state == learned.unused_in:
        last = {*learned.unused} & {*DEFAULT_PRELOAD}
        unused = unused & last if text.is_clear else last
    left = tuple(name for name in preload if name not in unused)
    return FirstImports(left, preload if left else (), learned)
