"""Which of the modules that an import loads a fork server may have, from what was seen of each (see probe.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from elaunch.agent.forkserver.selection import Cost, Selection, added
from elaunch.records import dataclass, field


@dataclass
class Load:
    """One module that was loaded: what it loaded itself, in order, and the modules that it asked for meanwhile.

    `why` says why workers must not be forked after it; empty if they may. `own_s` is without the modules that it
    loaded. `is_gone` says that its import failed.
    """

    name: str
    loads: list[Load] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    why: str = ""
    own_s: float = 0.0
    is_gone: bool = False

    def all(self) -> Iterator[Load]:
        """This one, and all that were loaded for it."""
        yield self
        for each in self.loads:
            yield from each.all()


def select(roots: Iterable[Load], refused: Collection[str] = ()) -> Selection:
    """Leave out the unsuitable modules, and those that asked for one: directly, through others or by their package.

    `refused` are modules that are left out already.
    """
    loads = {each.name: each for root in roots for each in root.all()}
    unsuitable = [each for each in loads.values() if each.why]
    users: dict[str, set[str]] = {}
    for each in loads.values():
        for asked in each.asked | {each.name.rpartition(".")[0]}:
            users.setdefault(asked, set()).add(each.name)
    left_out: set[str] = set()
    found = [each.name for each in loads.values() if each.why or each.name in refused]
    while found:
        name = found.pop()
        if name not in left_out:
            left_out.add(name)
            found.extend(users.get(name, ()))
    return Selection(
        tuple(_entries(roots, left_out)),
        tuple(sorted(left_out)),
        tuple(f"{each.name} {each.why}" for each in unsuitable),
        sum(loads[name].own_s for name in left_out),
        _costs(each for each in loads.values() if each.name not in left_out),
    )


def _costs(loads: Iterable[Load]) -> tuple[Cost, ...]:
    return added(Cost(each.name.partition(".")[0], each.own_s) for each in loads)


def _entries(loads: Iterable[Load], left_out: Collection[str]) -> Iterator[str]:
    """The first modules on each way that are not left out: their imports load the rest, as the whole import did."""
    for each in loads:
        if each.name in left_out:
            yield from _entries(each.loads, left_out)
        elif not each.is_gone:
            yield each.name
